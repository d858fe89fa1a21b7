"""Kafka with passwords, rights and TLS: who may come in, and that no secret gets out."""

import logging
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from helpers_kafka import take_nothing
from helpers_messages import make_message
from postroom.brokers import BrokerOptions, Delivered, Transient
from postroom.brokers.kafka import KafkaBroker
from postroom.errors import Unreachable
from servers import KafkaServer

SECRET = "canary:p@ss/w%rd"
PATIENT = BrokerOptions(send_timeout_seconds=20.0)
_JAAS = (
    "org.apache.kafka.common.security.plain.PlainLoginModule required "
    f'user_relay="{SECRET}" user_narrow="pw";'
)


class LockedServer(KafkaServer):
    """A broker that wants a name and a password, over TLS if it has a certificate, and lets the
    user `narrow` write to `orders` only."""

    def __init__(self, certificate: Path | None = None) -> None:
        self._certificate = certificate
        super().__init__()

    @property
    def _protocol(self) -> str:
        return "SASL_SSL" if self._certificate else "SASL_PLAINTEXT"

    def _properties(self) -> dict[str, str]:
        inside = f"CONTROLLER://127.0.0.1:{self.controller_port}"
        properties = {
            **super()._properties(),
            "listeners": f"OUT://127.0.0.1:{self.port},{inside}",
            "advertised.listeners": f"OUT://127.0.0.1:{self.port}",
            "inter.broker.listener.name": "OUT",
            "listener.security.protocol.map": f"OUT:{self._protocol},CONTROLLER:PLAINTEXT",
            "sasl.enabled.mechanisms": "PLAIN",
            "sasl.mechanism.inter.broker.protocol": "PLAIN",
            "listener.name.out.plain.sasl.jaas.config": _JAAS,
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            "super.users": "User:relay;User:ANONYMOUS",
        }
        if self._certificate:
            properties |= {
                "listener.name.out.ssl.keystore.type": "PEM",
                "listener.name.out.ssl.keystore.location": str(self._certificate / "both"),
                "listener.name.out.ssl.truststore.type": "PEM",
                "listener.name.out.ssl.truststore.location": str(self._certificate / "cert"),
                "listener.name.out.ssl.endpoint.identification.algorithm": "",
            }
        return properties

    def client_settings(self) -> dict[str, Any]:
        settings = {
            **super().client_settings(),
            "security.protocol": self._protocol,
            "sasl.mechanism": "PLAIN",
            "sasl.username": "relay",
            "sasl.password": SECRET,
        }
        if self._certificate:
            settings["ssl.ca.location"] = str(self._certificate / "cert")
        return settings

    def as_user(self, user: str, password: str) -> str:
        who = f"{quote(user, safe='')}:{quote(password, safe='')}"
        asked = "" if self._certificate else "?security.protocol=SASL_PLAINTEXT"
        return f"kafka://{who}@127.0.0.1:{self.port}{asked}"


@pytest.fixture(scope="module")
def locked(kafka_server: KafkaServer) -> Iterator[LockedServer]:
    kafka_server.require_private()
    with LockedServer() as server:
        server.create_topic("orders")
        server.create_topic("private")
        _let_in(server)
        yield server


def _let_in(server: LockedServer) -> None:
    from confluent_kafka import admin

    rights = [
        admin.AclBinding(
            admin.ResourceType.TOPIC,
            "orders",
            admin.ResourcePatternType.LITERAL,
            "User:narrow",
            "*",
            right,
            admin.AclPermissionType.ALLOW,
        )
        for right in (admin.AclOperation.WRITE, admin.AclOperation.DESCRIBE)
    ]
    for done in server.admin.create_acls(rights).values():
        done.result(10)


async def test_names_and_passwords_with_odd_characters_work(locked: LockedServer) -> None:
    broker = KafkaBroker(locked.as_user("relay", SECRET))
    assert await broker.send([make_message()]) == [Delivered()]
    await broker.ping()
    member = await broker.receive(["orders"], consumer="billing")
    assert len(await member.take(1)) in (0, 1)
    await member.close()
    await broker.close()


async def test_a_wrong_password_shows_no_password(
    locked: LockedServer, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    broker = KafkaBroker(locked.as_user("canary-user", "canary-password"), PATIENT)
    (outcome,) = await broker.send([make_message()])
    assert isinstance(outcome, Transient)
    assert (outcome.code, outcome.down) == ("not_permitted", "broker")
    assert "uthentication" in outcome.text
    with pytest.raises(Unreachable) as caught:
        await broker.ping()
    await broker.close()
    shown = capfd.readouterr()
    everything = f"{outcome}{caught.value!r}{broker!r}{broker._address}{caplog.text}{shown}"
    assert "canary" not in everything
    assert shown.err == ""


async def test_a_topic_that_may_not_be_written_to(locked: LockedServer) -> None:
    broker = KafkaBroker(locked.as_user("narrow", "pw"))
    allowed, refused = await broker.send([make_message(), make_message(topic="private")])
    assert allowed == Delivered()
    assert isinstance(refused, Transient)
    assert (refused.code, refused.down) == ("not_permitted", "topic")
    assert "kafka-acls.sh" in refused.text
    await broker.close()


async def test_a_group_that_may_not_be_joined(locked: LockedServer) -> None:
    broker = KafkaBroker(locked.as_user("narrow", "pw"))
    member = await broker.receive(["orders"], consumer="strangers")
    with pytest.raises(Unreachable, match="not allowed"):
        await take_nothing(member)
    await member.close()
    await broker.close()


async def test_tls_with_a_certificate_of_our_own(
    kafka_server: KafkaServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    kafka_server.require_private()
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl to make a certificate")
    make = "openssl req -x509 -newkey rsa:2048 -nodes -keyout key -out cert -subj /CN=localhost"
    names = ["-days", "2", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run([*make.split(), *names], cwd=tmp_path, check=True, capture_output=True)
    both = (tmp_path / "key").read_text() + (tmp_path / "cert").read_text()
    (tmp_path / "both").write_text(both)
    with LockedServer(tmp_path) as server:
        server.create_topic("orders")
        stranger = KafkaBroker(server.as_user("relay", SECRET), PATIENT)
        (outcome,) = await stranger.send([make_message()])
        assert isinstance(outcome, Transient)
        assert outcome.down == "broker"
        assert "certificate" in outcome.text
        assert "canary" not in outcome.text
        await stranger.close()
        trusting = BrokerOptions(extra={"tls_ca": str(tmp_path / "cert")})
        broker = KafkaBroker(server.as_user("relay", SECRET), trusting)
        assert await broker.send([make_message()]) == [Delivered()]
        await broker.close()
    assert capfd.readouterr().err == ""
