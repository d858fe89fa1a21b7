"""NATS with passwords, permissions and TLS: who may come in, and that no secret gets out."""

import asyncio
import contextlib
import json
import logging
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import nats
import pytest

from helpers_messages import make_message
from postroom.brokers import BrokerOptions, Delivered, Transient
from postroom.brokers.nats import NatsBroker
from postroom.errors import Unreachable
from servers import NatsServer

SECRET = "canary:p@ss/w%rd"
PATIENT = BrokerOptions(send_timeout_seconds=20.0)
USERS = """
    authorization { users = [
      { user: "re:lay", password: "%s" }
      { user: narrow, password: pw, permissions: {
          publish: ["orders"], subscribe: ["_INBOX.>"] } }
      { user: mute, password: pw, permissions: {
          publish: { deny: ["$JS.ACK.>"] }, subscribe: ["_INBOX.>"] } }
      { user: idle, password: pw, permissions: {
          publish: { deny: ["$JS.API.CONSUMER.MSG.NEXT.>"] }, subscribe: ["_INBOX.>"] } }
      { user: deaf, password: pw, permissions: { publish: [">"], subscribe: ["mine.>"] } }
    ] }
"""


class LockedServer(NatsServer):
    """A server that lets in only those it knows; `config` is added to its own."""

    def __init__(self, config: str = USERS % SECRET) -> None:
        super().__init__()
        self._config = config

    def _command(self) -> list[str]:
        path = self.directory / "conf"
        path.write_text(self._config)
        return [*super()._command(), "-c", str(path)]

    async def _ask_jetstream(self) -> None:
        async def quiet(_: Exception) -> None: ...

        client = await nats.connect(
            self.url,
            user="re:lay",
            password=SECRET,
            allow_reconnect=False,
            connect_timeout=5,
            error_cb=quiet,
        )
        try:
            await client.jetstream().account_info()
        finally:
            await client.close()

    def as_user(self, user: str, password: str) -> str:
        return f"nats://{quote(user, safe='')}:{quote(password, safe='')}@127.0.0.1:{self.port}"


@pytest.fixture(scope="module")
def locked(nats_server: NatsServer) -> Iterator[LockedServer]:
    nats_server.require_private()
    with LockedServer() as server:
        asyncio.run(_make_stream(server))
        yield server


async def _make_stream(server: LockedServer) -> None:
    async with await nats.connect(server.url, user="re:lay", password=SECRET) as client:
        await client.jetstream().add_stream(name="orders", subjects=["orders", "private"])


async def test_names_and_passwords_with_odd_characters_work(locked: LockedServer) -> None:
    broker = NatsBroker(locked.as_user("re:lay", SECRET))
    assert await broker.send([make_message()]) == [Delivered()]
    await broker.close()


async def test_a_wrong_password_shows_no_password(
    locked: LockedServer, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    broker = NatsBroker(locked.as_user("canary-user", "canary-password"), PATIENT)
    (outcome,) = await broker.send([make_message()])
    assert isinstance(outcome, Transient)
    assert (outcome.code, outcome.down) == ("not_permitted", "broker")
    with pytest.raises(Unreachable) as caught:
        await broker.ping()
    await broker.close()
    shown = capfd.readouterr()
    everything = f"{outcome}{caught.value!r}{broker!r}{broker._address}{caplog.text}{shown}"
    assert "canary" not in everything


async def test_a_token_is_a_secret_too(unused_tcp_port: int) -> None:
    broker = NatsBroker(f"nats://canary-token@127.0.0.1:{unused_tcp_port}", PATIENT)
    (outcome,) = await broker.send([make_message()])
    assert "canary" not in f"{outcome}{broker!r}{broker._address}"


async def test_a_topic_that_may_not_be_published(locked: LockedServer) -> None:
    broker = NatsBroker(locked.as_user("narrow", "pw"))
    allowed, refused = await broker.send([make_message(), make_message(topic="private")])
    assert allowed == Delivered()
    assert isinstance(refused, Transient)
    assert (refused.code, refused.down) == ("not_permitted", "topic")
    await broker.ping()  # it may not write to its own inbox, and being told so is an answer too
    await broker.close()


async def test_an_inbox_that_may_not_be_read(locked: LockedServer) -> None:
    broker = NatsBroker(locked.as_user("deaf", "pw"), PATIENT)
    (outcome,) = await broker.send([make_message()])
    assert isinstance(outcome, Transient)
    assert (outcome.code, outcome.down) == ("not_permitted", "broker")
    assert "inbox_prefix" in outcome.text
    options = BrokerOptions(send_timeout_seconds=1.0, extra={"inbox_prefix": "mine"})
    broker = NatsBroker(locked.as_user("deaf", "pw"), options)
    assert await broker.send([make_message()]) == [Delivered()]
    await broker.close()


@pytest.mark.parametrize("user", ["mute", "idle"])
async def test_a_receiver_without_its_rights_says_so(locked: LockedServer, user: str) -> None:
    """Pulls and acks have no answer of their own: silence would look like an empty stream."""
    broker = NatsBroker(locked.as_user(user, "pw"), PATIENT)
    assert await broker.send([make_message()]) == [Delivered()]
    subscription = await broker.receive(["orders"], consumer=user)

    async def receive() -> None:
        while True:
            await subscription.ack(await subscription.take(10))

    with pytest.raises(Unreachable, match=r"this user may not publish to .js"):
        await asyncio.wait_for(receive(), 30)
    await subscription.close()
    await broker.close()


async def test_a_receiver_that_may_not_look(locked: LockedServer) -> None:
    broker = NatsBroker(locked.as_user("narrow", "pw"), PATIENT)
    with pytest.raises(Unreachable, match=r"may not publish to .JS.API.STREAM.NAMES"):
        await broker.receive(["orders"], consumer="billing")
    with pytest.raises(Unreachable, match=r"may not publish to .JS.API.STREAM.NAMES"):
        await broker.examine(["orders"])
    await broker.close()


@pytest.mark.parametrize("secret", ["user:canary", "canary"])
async def test_tls_sends_no_secret_in_clear(secret: str) -> None:
    heard = bytearray()
    ended = asyncio.Event()

    async def plain(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        info = {"server_id": "x", "version": "2.11.0", "max_payload": 1000, "auth_required": True}
        writer.write(b"INFO " + json.dumps(info).encode() + b"\r\n")
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1000):
                heard.extend(data)
                writer.write(b"PONG\r\n")
        writer.close()
        ended.set()

    async with await asyncio.start_server(plain, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        broker = NatsBroker(f"tls://{secret}@127.0.0.1:{port}", PATIENT)
        (outcome,) = await broker.send([make_message()])
        assert isinstance(outcome, Transient)
        assert "does not ask for TLS" in outcome.text
        await broker.close()
        await asyncio.wait_for(ended.wait(), 5)
    assert b"canary" not in heard


async def test_tls_with_a_certificate_of_our_own(nats_server: NatsServer, tmp_path: Path) -> None:
    nats_server.require_private()
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl to make a certificate")
    make = "openssl req -x509 -newkey rsa:2048 -nodes -keyout key -out cert -subj /CN=localhost"
    names = ["-days", "2", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run([*make.split(), *names], cwd=tmp_path, check=True, capture_output=True)
    certificate = str(tmp_path / "cert")

    class TlsServer(LockedServer):
        def _own_url(self) -> str:
            return f"tls://127.0.0.1:{self.port}"

        async def _ask_jetstream(self) -> None:
            options = BrokerOptions(extra={"tls_ca": certificate})
            broker = NatsBroker(f"tls://secret-token@127.0.0.1:{self.port}", options)
            await broker.ping()
            await broker.close()

    config = f"tls {{ cert_file: {certificate}, key_file: {tmp_path / 'key'} }}\n"
    with TlsServer(config + "authorization { token: secret-token }") as server:
        stranger = NatsBroker(f"tls://secret-token@127.0.0.1:{server.port}", PATIENT)
        (outcome,) = await stranger.send([make_message()])
        assert isinstance(outcome, Transient)
        assert outcome.code == "unreachable"
        assert "secret-token" not in outcome.text
