"""What only Redis does: streams, memory, replicas, trimming, leases, secrets."""

import asyncio
import logging
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import redis as redis_py

from certificates import make_certificate
from helpers import eventually_async
from helpers_messages import make_message, make_messages
from helpers_receiving import numbered, numbers, send, take, take_nothing
from postroom.brokers import (
    BrokerOptions,
    CanExamine,
    CanReceive,
    Delivered,
    Permanent,
    Transient,
    Unknown,
)
from postroom.brokers.base import Outcome
from postroom.brokers.redis import RedisBroker
from postroom.brokers.redis_receiving import most_rows
from postroom.brokers.redis_wire import entry, judge, replies
from postroom.errors import ConfigurationError, MissingDriver, Unreachable
from postroom.messages import new_id
from proxy import ChaosProxy
from servers import RedisServer

PATIENT = BrokerOptions(send_timeout_seconds=20.0)
QUICK = BrokerOptions(send_timeout_seconds=4.0)  # for tests of silence: they wait it out
SECRET = "canary:p@ss/w%rd"


class Shelf:
    """A topic of our own and a broker that sends to it."""

    def __init__(self, server: RedisServer) -> None:
        self.server = server
        self.topic = f"t{new_id()}"
        self.broker = RedisBroker(server.url, PATIENT)

    def ask(self, *words: Any) -> Any:
        with self.server.client() as client:
            return client.execute_command(*words)

    def stored(self) -> int:
        return int(self.ask("XLEN", self.topic))


@pytest.fixture
async def shelf(redis_server: RedisServer) -> AsyncIterator[Shelf]:
    made = Shelf(redis_server)
    yield made
    await made.broker.close()
    made.ask("DEL", made.topic)


@pytest.fixture
def own() -> Iterator[RedisServer]:
    """A server whose settings a test may spoil."""
    with RedisServer(fsync=False) as server:
        yield server


# ── What its answers mean ──────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("said", "kind", "down"),
    [
        ("OOM command not allowed when used memory > 'maxmemory'.", Transient, "broker"),
        ("READONLY You can't write against a read only replica.", Transient, "broker"),
        ("LOADING Redis is loading the dataset in memory", Transient, "broker"),
        ("MISCONF Errors writing to the AOF file: No space left", Transient, "broker"),
        ("NOREPLICAS Not enough good replicas to write.", Transient, "broker"),
        ("BUSY Redis is busy running a script.", Transient, "broker"),
        ("CLUSTERDOWN The cluster is down", Transient, "broker"),
        ("NOPERM this user has no permissions to run the 'xadd' command", Transient, "broker"),
        ("NOPERM No permissions to access a key", Transient, "topic"),
        ("WRONGTYPE Operation against a key holding the wrong kind of value", Transient, "topic"),
        ("MOVED 3999 127.0.0.1:6381", Transient, "topic"),
        ("ERR The stream has exhausted the last possible ID", Transient, "topic"),
        ("ERR something new", Transient, None),
    ],
)
def test_errors(said: str, kind: type[Outcome], down: str | None) -> None:
    outcome = judge(said, "orders")
    assert isinstance(outcome, kind)
    assert getattr(outcome, "down", None) == down


def test_replies_come_in_any_pieces() -> None:
    stream = b"$15\r\n1526919030474-0\r\n-OOM no\r\n+PONG\r\n:2\r\n$0\r\n\r\n$2\r\n\r\n\r\n"
    whole = [b"$1526919030474-0", b"-OOM no", b"+PONG", b":2", b"$", b"$\r\n"]
    assert replies(stream) == (whole, b"")
    for cut in range(len(stream)):
        first, rest = replies(stream[:cut])
        second, left = replies(rest + stream[cut:])
        assert (first + second, left) == (whole, b"")


def test_entries_of_others_are_taken_too() -> None:
    assert entry([b"a", b"1", b"payload", b"x"]) == ({"a": "1"}, b"x")
    assert entry([b"payload", b"x", b"a", b"\xff"]) == ({"payload": "x", "a": "\ufffd"}, b"")
    assert entry([]) == ({}, b"")


async def test_no_memory_is_the_brokers_fault_and_passes(own: RedisServer) -> None:
    broker = RedisBroker(own.url, PATIENT)
    assert await broker.send(make_messages(3)) == [Delivered()] * 3
    with own.client() as client:
        client.config_set("maxmemory", "1mb")
        for outcome in await broker.send(make_messages(3)):
            assert isinstance(outcome, Transient)
            assert (outcome.code, outcome.down) == ("oom", "broker")
            assert "maxmemory" in outcome.text
        client.config_set("maxmemory", "0")
        assert await broker.send(make_messages(3)) == [Delivered()] * 3
        assert client.xlen("orders") == 6
    await broker.close()


async def test_a_replica_takes_nothing(own: RedisServer, redis_server: RedisServer) -> None:
    broker = RedisBroker(own.url, PATIENT)
    await broker.ping()
    with own.client() as client:
        client.config_set("replica-serve-stale-data", "yes")
        client.replicaof("127.0.0.1", "1")
        (outcome,) = await broker.send([make_message()])
        assert isinstance(outcome, Transient)
        assert (outcome.code, outcome.down) == ("readonly", "broker")
        warned = await broker.examine([])
        assert any("is a replica" in sentence for sentence in warned)
        client.replicaof("NO", "ONE")
    assert await broker.send([make_message()]) == [Delivered()]
    await broker.close()


async def test_another_kind_of_key_is_one_topics_trouble(shelf: Shelf) -> None:
    shelf.ask("SET", f"{shelf.topic}-text", "a text")
    batch = [make_message(topic=topic) for topic in (shelf.topic, f"{shelf.topic}-text")]
    fine, refused = await shelf.broker.send(batch)
    assert fine == Delivered()
    assert isinstance(refused, Transient)
    assert (refused.code, refused.down) == ("wrong_type", "topic")
    assert "prefix" in refused.text
    (warned,) = [s for s in await shelf.broker.examine([f"{shelf.topic}-text"]) if "-text" in s]
    assert "holds a string and no stream" in warned
    shelf.ask("DEL", f"{shelf.topic}-text")


async def test_a_message_too_large_for_the_server_stands_alone(own: RedisServer) -> None:
    with own.client() as client:
        client.config_set("proto-max-bulk-len", "1mb")
    broker = RedisBroker(own.url, PATIENT)
    just, over = (make_message(b"x" * size) for size in (1 << 20, (1 << 20) + 1))
    first, large, last = await broker.send([just, over, make_message()])
    assert first == last == Delivered()
    assert isinstance(large, Permanent)
    assert large.code == "too_large"
    assert broker.capabilities.max_bytes == 1 << 20
    await broker.close()


@pytest.mark.parametrize(
    "bad",
    [
        {"headers_json": "[1]"},
        {"headers_json": "{"},
        {"headers_json": '{"a": "\\ud800"}'},
        {"headers_json": '{"a": 1}'},
        {"topic": "a b"},
        {"topic": "a\r\n$1\r\n*"},
        {"topic": ""},
    ],
)
async def test_nothing_in_a_message_speaks_to_the_server(shelf: Shelf, bad: dict[str, Any]) -> None:
    messages = [make_message(**({"topic": shelf.topic} | one)) for one in ({}, bad, {})]
    messages[0] = messages[0]._replace(key="a\r\n*1\r\n$8\r\nFLUSHALL\r\n")
    outcomes = await shelf.broker.send(messages)
    assert outcomes[0] == outcomes[2] == Delivered()
    assert isinstance(outcomes[1], Permanent)
    assert outcomes[1].code in ("bad_header", "bad_topic")
    assert shelf.stored() == 2


# ── Silence, loss, limits ──────────────────────────────────────────────────────────────────────


async def test_a_silent_server_leaves_the_outcome_unknown(shelf: Shelf) -> None:
    shelf.broker = RedisBroker(shelf.server.url, QUICK)
    assert await shelf.broker.send([make_message(topic=shelf.topic)]) == [Delivered()]
    shelf.server.require_private()
    batch = make_messages(50, topic=shelf.topic)
    with shelf.server.paused():
        for outcome in await shelf.broker.send(batch):
            assert isinstance(outcome, Unknown)
            assert (outcome.code, outcome.down) == ("timeout", "broker")
        # The silent connection was given up, and a new one gets no greeting.
        for outcome in await shelf.broker.send(batch):
            assert isinstance(outcome, Transient)
            assert (outcome.code, outcome.down) == ("unreachable", "broker")
        with pytest.raises(Unreachable, match="cannot connect to Redis at redis://127"):
            await shelf.broker.ping()
    assert await shelf.broker.send(batch) == [Delivered()] * 50


async def test_a_lost_answer_is_unknown_and_those_before_it_are_not(shelf: Shelf) -> None:
    with ChaosProxy(shelf.server.url) as proxy:
        broker = RedisBroker(proxy.url, PATIENT)
        await broker.ping()
        loss = proxy.lose_reply(to=b"XADD", after=40)
        outcomes = await broker.send(make_messages(20, topic=shelf.topic))
        assert loss.happened
        kinds = [type(outcome) for outcome in outcomes]
        assert kinds == [Delivered] + [Unknown] * 19
        assert {o.code for o in outcomes if isinstance(o, Unknown)} == {"connection_lost"}
        assert await broker.send(make_messages(20, topic=shelf.topic)) == [Delivered()] * 20
        await broker.close()
    assert shelf.stored() == 40


async def test_nobody_there(unused_tcp_port: int) -> None:
    broker = RedisBroker(f"redis://127.0.0.1:{unused_tcp_port}", PATIENT)
    for outcome in await broker.send(make_messages(2)):
        assert isinstance(outcome, Transient)
        assert (outcome.code, outcome.down) == ("unreachable", "broker")
    with pytest.raises(Unreachable):
        await broker.ping()
    with pytest.raises(Unreachable):
        await broker.receive(["orders"], consumer="billing")
    with pytest.raises(Unreachable):
        await broker.examine(["orders"])
    await broker.close()
    assert await broker.send([make_message()]) != [Delivered()]


async def test_the_window_is_bounded(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    from postroom.brokers.redis_link import RedisLink

    seen: list[int] = []
    expect = RedisLink.expect

    def watched(link: RedisLink, *arguments: Any) -> None:
        expect(link, *arguments)
        seen.append(len(link.waiting))

    monkeypatch.setattr(RedisLink, "expect", watched)
    broker = RedisBroker(f"{shelf.server.url}?max_outstanding=16", BrokerOptions())
    batches = [make_messages(500, topic=shelf.topic) for _ in range(3)]
    for outcomes in await asyncio.gather(*(broker.send(batch) for batch in batches)):
        assert outcomes == [Delivered()] * 500
    assert 1 < max(seen) <= 16
    await broker.close()


async def test_a_cancelled_send_gives_its_place_back(shelf: Shelf) -> None:
    await shelf.broker.ping()
    shelf.server.require_private()
    with shelf.server.paused():
        sending = asyncio.create_task(shelf.broker.send(make_messages(100, topic=shelf.topic)))
        await asyncio.sleep(0.1)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
    link = shelf.broker._link
    assert link is not None
    assert (len(link.waiting), link.bytes) == (0, 0)
    # Answers to those that nobody awaits any more are not taken for answers to others.
    shelf.ask("SET", f"{shelf.topic}-text", "a text")
    batch = [make_message(topic=t) for t in (shelf.topic, f"{shelf.topic}-text", shelf.topic)]
    outcomes = await shelf.broker.send(batch)
    assert outcomes[0] == outcomes[2] == Delivered()
    assert isinstance(outcomes[1], Transient)
    shelf.ask("DEL", f"{shelf.topic}-text")


async def test_without_replicas_that_were_asked_for_it_is_unknown(shelf: Shelf) -> None:
    options = BrokerOptions(send_timeout_seconds=1.0, extra={"replicas": "1"})
    broker = RedisBroker(shelf.server.url, options)
    for outcome in await broker.send(make_messages(3, topic=shelf.topic)):
        assert isinstance(outcome, Unknown)
        assert (outcome.code, outcome.down) == ("not_replicated", "broker")
    await broker.ping()
    await broker.close()


async def test_with_a_replica_it_is_delivered(own: RedisServer) -> None:
    with RedisServer(fsync=False, settings={"replicaof": f"127.0.0.1 {own.port}"}) as replica:
        broker = RedisBroker(f"{own.url}?replicas=1", BrokerOptions())

        async def delivered() -> bool:
            return await broker.send(make_messages(300)) == [Delivered()] * 300

        await eventually_async(delivered, 30)
        with replica.client() as client:
            assert client.xlen("orders") >= 300
        await broker.close()


# ── Trimming ───────────────────────────────────────────────────────────────────────────────────


async def test_only_what_all_groups_have_acknowledged_is_cut_off(shelf: Shelf) -> None:
    broker = RedisBroker(f"{shelf.server.url}?trim_seconds=1", BrokerOptions())
    key = shelf.topic
    await broker.send(make_messages(1_000, topic=key, keys=1_000))
    await asyncio.sleep(1.5)
    assert shelf.stored() == 1_000  # nobody has read it

    billing = await broker.receive([key], consumer="billing")
    shipping = await broker.receive([key], consumer="shipping")
    found = await take(billing, 1_000)
    await billing.ack(found)
    await broker.send(make_messages(1, topic=key))
    await asyncio.sleep(1.5)
    assert shelf.stored() == 1_001  # shipping has not

    hers = await take(shipping, 1_001)
    await shipping.ack(hers[:500] + hers[501:])
    await broker.send(make_messages(1, topic=key))
    # Cut in whole pieces of the stream, so not quite up to the one in hand.
    await eventually_async(lambda: shelf.stored() <= 700)
    kept = {each[0] for each in shelf.ask("XRANGE", key, "-", "+")}
    assert {each.receipt for each in hers[500:]} <= kept
    await billing.close()
    await shipping.close()
    await broker.close()


async def test_trimming_can_be_off(shelf: Shelf) -> None:
    broker = RedisBroker(f"{shelf.server.url}?trim_seconds=0", BrokerOptions())
    await broker.send([make_message(topic=shelf.topic)])
    assert broker._trimming is None
    await broker.close()


# ── Receiving ──────────────────────────────────────────────────────────────────────────────────


async def test_a_new_group_begins_at_the_beginning(shelf: Shelf) -> None:
    await send(shelf.broker, numbered(shelf.topic, range(10)))
    late = await shelf.broker.receive([shelf.topic], consumer="late")
    assert numbers(await take(late, 10)) == list(range(10))
    await late.close()


async def test_entries_whose_answer_was_lost_come_all_the_same(shelf: Shelf) -> None:
    await send(shelf.broker, numbered(shelf.topic, range(20)))
    with ChaosProxy(shelf.server.url) as proxy:
        billing = await RedisBroker(proxy.url, PATIENT).receive([shelf.topic], consumer="billing")
        first = await take(billing, 5)
        loss = proxy.lose_reply(to=b"XREADGROUP")
        with pytest.raises(Unreachable):
            await billing.take(5)
        assert loss.happened
        again = await take(billing, 20)
        assert numbers(again) == list(range(20))
        assert again[0].claim > first[0].claim
        await billing.close()


async def test_a_cancelled_take_loses_nothing(shelf: Shelf) -> None:
    await send(shelf.broker, numbered(shelf.topic, range(20)))
    shelf.server.require_private()
    billing = await shelf.broker.receive([shelf.topic], consumer="billing")
    await take(billing, 5)
    with shelf.server.paused():
        taking = asyncio.create_task(billing.take(5))
        await asyncio.sleep(0.1)
        taking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await taking
    assert numbers(await take(billing, 20)) == list(range(20))
    await billing.close()


async def test_who_lost_its_lease_gets_nothing_more(shelf: Shelf) -> None:
    options = BrokerOptions(extra={"lease_seconds": "1"})
    broker = RedisBroker(shelf.server.url, options)
    await send(broker, numbered(shelf.topic, range(10)))
    slow = await broker.receive([shelf.topic], consumer="billing")
    mine = await take(slow, 3)
    await asyncio.sleep(1.2)
    quick = await broker.receive([shelf.topic], consumer="billing")
    assert numbers(await take(quick, 5)) == list(range(5))
    await slow.give_back(mine)
    await slow.extend(mine)
    await take_nothing(slow)
    # Late, but it was handled: it counts.
    await slow.ack(mine)
    await quick.close()
    third = await broker.receive([shelf.topic], consumer="billing")
    assert numbers(await take(third, 7)) == list(range(3, 10))
    for each in (slow, third, broker):
        await each.close()


async def test_pending_entries_of_strangers_come_first(shelf: Shelf) -> None:
    await send(shelf.broker, numbered(shelf.topic, range(300), keys=300))
    shelf.ask("XGROUP", "CREATE", shelf.topic, "billing", "0")
    for stranger in ("x", "y"):
        words = ("COUNT", 120, "STREAMS", shelf.topic, ">")
        shelf.ask("XREADGROUP", "GROUP", "billing", stranger, *words)
    billing = await shelf.broker.receive([shelf.topic], consumer="billing")
    found = await take(billing, 300)
    assert numbers(found) == list(range(300))
    assert [each.seen for each in found] == [1] * 240 + [0] * 60
    await billing.close()


async def test_a_deleted_entry_is_no_obstacle(shelf: Shelf) -> None:
    await send(shelf.broker, numbered(shelf.topic, range(6)))
    first = await shelf.broker.receive([shelf.topic], consumer="billing")
    found = await take(first, 4)
    await first.close()
    shelf.ask("XDEL", shelf.topic, found[1].receipt)
    second = await shelf.broker.receive([shelf.topic], consumer="billing")
    rest = await take(second, 5)
    assert numbers(rest) == [0, 2, 3, 4, 5]
    await second.ack(rest)
    assert shelf.ask("XPENDING", shelf.topic, "billing")["pending"] == 0
    await second.close()


async def test_a_deleted_stream_begins_anew(shelf: Shelf) -> None:
    await send(shelf.broker, numbered(shelf.topic, range(3)))
    billing = await shelf.broker.receive([shelf.topic], consumer="billing")
    await take(billing, 3)
    shelf.ask("DEL", shelf.topic)
    await take_nothing(billing)
    await send(shelf.broker, numbered(shelf.topic, range(3, 6)))
    assert numbers(await take(billing, 3)) == [3, 4, 5]
    await billing.close()


async def test_a_message_without_an_id_has_the_same_name_each_time(shelf: Shelf) -> None:
    shelf.ask("XADD", shelf.topic, "*", "hello", "world")
    for seen in range(2):
        billing = await shelf.broker.receive([shelf.topic], consumer="billing")
        (found,) = await take(billing, 1)
        assert found.id == f"{shelf.topic}:{found.receipt.decode()}"
        assert (found.headers, found.payload, found.seen) == ({"hello": "world"}, b"", seen)
        await billing.close()


def test_large_entries_are_read_few_at_a_time() -> None:
    assert most_rows(100 * 500, 100) > 10_000
    assert most_rows(10 * 1_000_000, 10) == 8
    assert most_rows(100_000_000, 1) == 1


# ── What would lose messages ───────────────────────────────────────────────────────────────────


async def test_dangers_are_named(own: RedisServer) -> None:
    broker = RedisBroker(own.url, PATIENT)
    assert isinstance(broker, CanExamine)
    assert isinstance(broker, CanReceive)
    with own.client() as client:
        client.config_set("appendfsync", "always")
        assert await broker.examine(["orders"]) == []
        client.config_set("appendfsync", "everysec")
        (fsync,) = await broker.examine(["orders"])
        assert "appendfsync everysec" in fsync
        client.config_set("appendonly", "no")
        client.config_set("maxmemory-policy", "allkeys-lru")
        evicts, forgets = await broker.examine(["orders"])
        assert "maxmemory-policy allkeys-lru" in evicts
        assert "appendonly yes" in forgets
    await broker.close()


# ── Who may come in, and that no secret gets out ───────────────────────────────────────────────


class LockedServer(RedisServer):
    def __init__(self, **settings: str) -> None:
        super().__init__(fsync=False, settings={"requirepass": SECRET} | settings)

    def client(self) -> redis_py.Redis:
        return redis_py.Redis(port=self.port, password=SECRET, socket_timeout=5)

    def as_user(self, user: str, password: str) -> str:
        return f"redis://{quote(user, safe='')}:{quote(password, safe='')}@127.0.0.1:{self.port}"


async def test_passwords_users_and_databases(redis_server: RedisServer) -> None:
    redis_server.require_private()
    with LockedServer() as server:
        with server.client() as client:
            grants = ["+@all", "-debug", "~allowed*"]
            client.execute_command("ACL", "SETUSER", "re:lay", "on", f">{SECRET}", *grants)
        broker = RedisBroker(server.as_user("", SECRET) + "/3")
        assert await broker.send([make_message()]) == [Delivered()]
        with server.client() as client:
            assert client.exists("orders") == 0
        with redis_py.Redis(port=server.port, password=SECRET, db=3) as client:
            assert client.xlen("orders") == 1
        await broker.close()
        broker = RedisBroker(server.as_user("re:lay", SECRET), PATIENT)
        fine, refused = await broker.send([make_message(topic="allowed"), make_message()])
        assert fine == Delivered()
        assert isinstance(refused, Transient)
        assert (refused.code, refused.down) == ("not_permitted", "topic")
        await broker.close()
        by_option = BrokerOptions(extra={"password": SECRET})
        broker = RedisBroker(f"redis://127.0.0.1:{server.port}", by_option)
        await broker.ping()
        await broker.close()


@pytest.mark.parametrize("user", ["", "canary-user"])
async def test_a_wrong_password_shows_no_password(
    redis_server: RedisServer,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    user: str,
) -> None:
    redis_server.require_private()
    caplog.set_level(logging.DEBUG)
    with LockedServer() as server:
        broker = RedisBroker(server.as_user(user, "canary-password"), PATIENT)
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


async def test_tls_with_a_certificate_of_our_own(redis_server: RedisServer) -> None:
    redis_server.require_private()
    certificate, key = make_certificate()

    class TlsServer(LockedServer):
        def _command(self) -> list[str]:
            files = ["--tls-cert-file", certificate, "--tls-key-file", key]
            more = ["--tls-port", str(self.port), "--tls-auth-clients", "no"]
            return [*super()._command(), *files, *more, "--port", "0"]

        def _ask(self) -> None:
            with redis_py.Redis(
                port=self.port, password=SECRET, ssl=True, ssl_ca_certs=certificate
            ) as client:
                client.ping()

    with TlsServer() as server:
        url = server.as_user("", SECRET).replace("redis:", "rediss:")
        broker = RedisBroker(f"{url}?tls_ca={quote(certificate)}")
        assert await broker.send([make_message()]) == [Delivered()]
        billing = await broker.receive(["orders"], consumer="billing")
        assert len(await take(billing, 1)) == 1
        await billing.close()
        await broker.close()
        stranger = RedisBroker(url, PATIENT)
        (outcome,) = await stranger.send([make_message()])
        assert isinstance(outcome, Transient)
        assert outcome.code == "unreachable"
        assert SECRET not in outcome.text
        plain = RedisBroker(server.as_user("", SECRET), PATIENT)
        (outcome,) = await plain.send([make_message()])
        assert isinstance(outcome, Transient)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://localhost", "redis://localhost:6379"),
        ("redis://", "redis://localhost:6379"),
        ("redis://u:p%40ss@a:7000/2?prefix=x:", "redis://a:7000/2"),
        ("rediss://:token@[::1]:7", "rediss://[::1]:7"),
        ("redis://a?password=canary", "redis://a:6379"),
    ],
)
def test_addresses(url: str, shown: str) -> None:
    assert repr(RedisBroker(url)) == shown


@pytest.mark.parametrize(
    "url",
    [
        "redis://user:s3cr3t@host:port",
        "redis://user:s3cr3t@host/orders",
        "redis://user:s3cr3t@host?prefics=a",
        "redis://user:s3cr3t@host?replicas=some",
        "redis://user:s3cr3t@host?trim_seconds=-1",
        "redis://user:s3cr3t@host?max_outstanding=0",
        "redis://user:s3cr3t@host?tls_ca=/a",
        "rediss://user:s3cr3t@host?tls_ca=/nowhere",
        "rediss://user:s3cr3t@host?tls_cert=/nowhere",
    ],
)
def test_bad_settings_are_refused_without_showing_secrets(url: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        RedisBroker(url)
    assert "s3cr3t" not in str(caught.value)


# ── Processes ──────────────────────────────────────────────────────────────────────────────────


def test_one_broker_on_two_loops_and_in_a_forked_child(redis_server: RedisServer) -> None:
    script = """
        import asyncio, os, sys
        sys.path.insert(0, sys.argv[2])
        from helpers_messages import make_messages
        from postroom.brokers import BrokerOptions, Delivered
        from postroom.brokers.redis import open_broker

        broker = open_broker(sys.argv[1], BrokerOptions())

        async def send():
            assert await broker.send(make_messages(50, topic="forked")) == [Delivered()] * 50

        asyncio.run(send())
        asyncio.run(send())
        child = os.fork()
        asyncio.run(send())
        if child == 0:
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        asyncio.run(send())
        print("ok")
    """
    tests = str(Path(__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), redis_server.url, tests],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == "ok\n", done.stderr


async def test_a_killed_server_prints_nothing(
    shelf: Shelf, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    shelf.server.require_private()
    assert await shelf.broker.send(make_messages(2, topic=shelf.topic)) == [Delivered()] * 2
    sending = asyncio.create_task(shelf.broker.send(make_messages(3_000, topic=shelf.topic)))
    await asyncio.sleep(0.02)
    await asyncio.to_thread(shelf.server.kill)
    outcomes = await sending
    assert {o.down for o in outcomes if isinstance(o, Unknown | Transient)} <= {"broker"}
    assert caplog.text == ""
    assert capfd.readouterr().err == ""


def test_a_missing_library_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis.asyncio", None)
    with pytest.raises(MissingDriver, match=r"pip install 'postroom\[redis\]'"):
        RedisBroker("redis://localhost")


def test_importing_the_broker_imports_no_client() -> None:
    check = "import sys, postroom.brokers.redis; print('redis' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
