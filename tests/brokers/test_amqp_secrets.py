"""Who may come in to RabbitMQ, and that no secret gets out."""

import logging
from collections.abc import Iterator
from urllib.parse import quote

import pytest

from certificates import make_certificate
from helpers import eventually_async
from helpers_amqp import PATIENT
from helpers_messages import make_message, make_messages
from helpers_receiving import take
from postroom.brokers import BrokerOptions, Delivered, Permanent, Transient, Unknown
from postroom.brokers.amqp import AmqpBroker
from postroom.errors import ConfigurationError, Unreachable
from servers import RabbitMQServer, free_port

SECRET = "canary:p@ss/w%rd"


@pytest.fixture(scope="module")
def users(rabbitmq_server: RabbitMQServer) -> Iterator[RabbitMQServer]:
    rabbitmq_server.require_private()
    control = rabbitmq_server.control
    control("add_user", "re:lay", SECRET)
    control("add_vhost", "its own/vhost")
    control("set_permissions", "-p", "its own/vhost", "re:lay", ".*", ".*", ".*")
    control("set_permissions", "-p", "/", "re:lay", ".*", "", ".*")
    control("add_vhost", "closed")
    control("add_vhost", "full")
    control("set_permissions", "-p", "full", "re:lay", ".*", ".*", ".*")
    control("set_vhost_limits", "-p", "full", '{"max-connections": 0}')
    yield rabbitmq_server
    control("delete_user", "re:lay")
    for vhost in ("its own/vhost", "closed", "full"):
        control("delete_vhost", vhost)


def as_user(server: RabbitMQServer, user: str, password: str, vhost: str = "") -> str:
    who = f"{quote(user, safe='')}:{quote(password, safe='')}"
    path = f"/{quote(vhost, safe='')}" if vhost else ""
    return f"amqp://{who}@127.0.0.1:{server.port}{path}?exchange=secret-events"


async def test_users_and_vhosts_with_odd_characters(users: RabbitMQServer) -> None:
    broker = AmqpBroker(as_user(users, "re:lay", SECRET, "its own/vhost"), PATIENT)
    billing = await broker.receive(["orders"], consumer="billing")
    assert await broker.send([make_message()]) == [Delivered()]
    assert len(await take(billing, 1)) == 1
    await billing.close()
    await broker.close()
    extra = {"user": "re:lay", "password": SECRET}
    broker = AmqpBroker(f"amqp://127.0.0.1:{users.port}", BrokerOptions(extra=extra))
    await broker.ping()
    await broker.close()


async def test_an_exchange_that_may_not_be_written_to(users: RabbitMQServer) -> None:
    broker = AmqpBroker(as_user(users, "re:lay", SECRET), PATIENT)
    for outcome in await broker.send(make_messages(3)):
        assert isinstance(outcome, Unknown)
        assert (outcome.code, outcome.down) == ("not_permitted", "broker")
    await broker.close()


@pytest.mark.parametrize(
    ("vhost", "reason"),
    [
        ("nope", "NOT_ALLOWED - vhost nope not found"),
        ("closed", "NOT_ALLOWED - "),  # the user has no permission there
        ("full", "connection limit"),
    ],
)
async def test_the_reason_for_which_a_vhost_is_refused_is_told(
    users: RabbitMQServer, vhost: str, reason: str
) -> None:
    broker = AmqpBroker(as_user(users, "re:lay", SECRET, vhost), PATIENT)
    (outcome,) = await broker.send([make_message()])
    assert isinstance(outcome, Transient)
    assert (outcome.code, outcome.down) == ("not_permitted", "broker")
    assert reason in outcome.text
    with pytest.raises(Unreachable, match=f"cannot connect to RabbitMQ at amqp://.*{reason}"):
        await broker.receive(["orders"], consumer="billing")
    await broker.close()


async def test_a_wrong_password_shows_no_password(
    users: RabbitMQServer, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    broker = AmqpBroker(as_user(users, "somebody", "canary-password"), PATIENT)
    (outcome,) = await broker.send([make_message()])
    assert isinstance(outcome, Transient)
    assert (outcome.code, outcome.down) == ("not_permitted", "broker")
    with pytest.raises(Unreachable) as pinged:
        await broker.ping()
    with pytest.raises(Unreachable) as received:
        await broker.receive(["orders"], consumer="billing")
    await broker.close()
    shown = capfd.readouterr()
    errors = f"{pinged.value!r}{received.value!r}{received.value.__cause__!r}"
    assert "canary" not in f"{outcome}{errors}{broker!r}{broker._address}{caplog.text}{shown}"


async def test_tls_with_a_certificate_of_our_own(rabbitmq_server: RabbitMQServer) -> None:
    rabbitmq_server.require_private()
    certificate, key = make_certificate()
    port = free_port()
    config = f"""
listeners.ssl.default = 127.0.0.1:{port}
ssl_options.certfile = {certificate}
ssl_options.keyfile = {key}
ssl_options.verify = verify_none
max_message_size = 1000000
"""
    with RabbitMQServer(config=config, fsync=False):
        url = f"amqps://guest:guest@127.0.0.1:{port}?exchange=events"
        broker = AmqpBroker(f"{url}&tls_ca={quote(certificate)}", PATIENT)

        async def reached() -> bool:
            await broker.ping()
            return True

        await eventually_async(reached, 30, retry=(Unreachable,))
        billing = await broker.receive(["orders"], consumer="billing")
        assert await broker.send([make_message()]) == [Delivered()]
        assert len(await take(billing, 1)) == 1
        stranger = AmqpBroker(url, PATIENT)
        (outcome,) = await stranger.send([make_message()])
        assert isinstance(outcome, Transient)
        assert outcome.code == "unreachable"
        assert "CERTIFICATE_VERIFY_FAILED" in outcome.text
        # The same server takes no more than a megabyte: what is larger is found out, and alone.
        batch = [make_message(), make_message(b"x" * 1_200_000), make_message()]
        assert isinstance((await broker.send(batch))[1], Permanent)
        fine, large, too = await broker.send(batch)
        assert fine == too == Delivered()
        assert isinstance(large, Permanent)
        assert large.code == "too_large"
        await billing.close()
        await broker.close()
        await stranger.close()


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("amqp://localhost", "amqp://localhost:5672"),
        ("amqp://", "amqp://localhost:5672"),
        ("amqp://u:p%40ss@a:7000/v?exchange=x", "amqp://a:7000/v"),
        ("amqps://token@[::1]/", "amqps://[::1]:5671/"),
        ("amqp://a?password=canary", "amqp://a:5672"),
    ],
)
def test_addresses(url: str, shown: str) -> None:
    assert repr(AmqpBroker(url)) == shown


@pytest.mark.parametrize(
    "url",
    [
        "amqp://user:s3cr3t@host:port",
        "amqp://user:s3cr3t@host?exchnge=a",
        "amqp://user:s3cr3t@host?queue_type=stream",
        "amqp://user:s3cr3t@host?prefetch=0",
        "amqp://user:s3cr3t@host?max_outstanding=no",
        "amqp://user:s3cr3t@host?tls_ca=/a",
        "amqps://user:s3cr3t@host?tls_ca=/nowhere",
    ],
)
def test_bad_settings_are_refused_without_showing_secrets(url: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        AmqpBroker(url)
    assert "s3cr3t" not in str(caught.value)
