"""Where webhooks never go: no connection is made, as the sockets themselves tell."""

import contextlib
import socket
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from helpers import eventually_async
from helpers_messages import make_message
from hostile_addresses import ANSWERS, METADATA, urls
from postroom.brokers import BrokerOptions, Delivered, Permanent, Transient, webhook_net
from postroom.brokers.webhook_guard import Allowed, check_host, literal, why_refused
from postroom.brokers.webhooks import WebhookBroker
from postroom.errors import ConfigurationError, Unreachable
from servers import WebhookServer, free_port

URLS = urls()
SECRET = "#secret=whsec_" + "A" * 32
PATIENT = BrokerOptions(send_timeout_seconds=20.0)

_connects: list[Any] | None = None


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if _connects is not None and event in ("socket.connect", "socket.sendto"):
        _connects.append(arguments[1])


# It cannot be removed again, so it does nothing unless a test watches.
sys.addaudithook(_watch)


@pytest.fixture
def connects() -> Iterator[list[Any]]:
    """Every address that any socket of this process was connected to, during the test."""
    global _connects
    _connects = []
    yield _connects
    _connects = None


class Trap:
    """Listens where hostile URLs lead, on loopback of both kinds; knows who came."""

    def __init__(self) -> None:
        self.port = free_port()
        self.came: list[Any] = []
        self._listeners = []
        for family, host in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::1")):
            with contextlib.suppress(OSError):  # not every machine has IPv6
                listener = socket.create_server((host, self.port), family=family)
                self._listeners.append(listener)
                threading.Thread(target=self._serve, args=(listener,), daemon=True).start()
        assert self._listeners

    def _serve(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, address = listener.accept()
                self.came.append(address)
                connection.close()

    def close(self) -> None:
        for listener in self._listeners:
            listener.close()


@pytest.fixture(scope="module")
def one_trap() -> Iterator[Trap]:
    made = Trap()
    yield made
    made.close()


@pytest.fixture
def trap(one_trap: Trap) -> Trap:
    one_trap.came.clear()  # what another test let in is not this one's fault
    return one_trap


def to_loopback(host: str, port: int) -> list[str]:
    return ["127.0.0.1"]


def test_there_are_enough_of_them() -> None:
    assert len(URLS) == len(set(URLS)) >= 200
    assert len(ANSWERS) >= 100


@pytest.mark.parametrize("url", URLS, ids=ascii)
async def test_no_connection_is_made(url: str, connects: list[Any], trap: Trap) -> None:
    url = url.replace("PORT", str(trap.port))
    url += SECRET if "#" not in url else f"&{SECRET[1:]}"
    refusal = ""
    try:
        broker = WebhookBroker(url, PATIENT, resolver=to_loopback)
    except ConfigurationError as error:
        refusal = str(error)
    else:
        (outcome,) = await broker.send([make_message()])
        assert isinstance(outcome, Transient)
        assert (outcome.code, outcome.down) == ("address_refused", "broker")
        with pytest.raises(Unreachable):
            await broker.ping()
        await broker.close()
    assert "AAAA" not in refusal
    assert connects == []
    assert trap.came == []


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: "+".join(answer) or "nothing")
async def test_a_name_that_leads_inside_is_not_connected_to(
    answer: list[str], connects: list[Any], trap: Trap
) -> None:
    broker = WebhookBroker(
        f"https://hooks.example:{trap.port}/{SECRET}", PATIENT, resolver=lambda *_: answer
    )
    (outcome,) = await broker.send([make_message()])
    assert isinstance(outcome, Transient)
    assert outcome.code in ("address_refused", "not_resolved")
    await broker.close()
    assert connects == []
    assert trap.came == []


async def test_without_the_check_the_watch_sees_a_connection(
    connects: list[Any], trap: Trap, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhook_net, "why_refused", lambda *_: None)
    broker = WebhookBroker(
        f"https://hooks.example:{trap.port}/{SECRET}", PATIENT, resolver=to_loopback
    )
    (outcome,) = await broker.send([make_message()])
    assert isinstance(outcome, Transient)
    await broker.close()
    assert connects == [("127.0.0.1", trap.port)]
    await eventually_async(lambda: trap.came)
    trap.came.clear()


# ── Rebinding ──────────────────────────────────────────────────────────────────────────────────


def here(server: WebhookServer, more: str = "") -> str:
    """A URL of the server by a name; only 127.0.0.1 is allowed, as if it were public."""
    return f"http://hooks.example:{server.port}/ok#allow=127.0.0.1/32&allow_http=yes&unsigned=yes{more}"


async def test_the_address_that_was_checked_is_the_one_connected_to(
    webhook_server: WebhookServer, connects: list[Any]
) -> None:
    """A name server that gives a good answer first and a bad one ever after."""
    asked = []

    def rebinding(host: str, port: int) -> list[str]:
        asked.append(host)
        return ["127.0.0.1"] if len(asked) == 1 else ["127.0.0.2"]

    broker = WebhookBroker(here(webhook_server), PATIENT, resolver=rebinding)
    assert await broker.send([make_message()]) == [Delivered()]
    assert asked == ["hooks.example"]
    assert connects == [("127.0.0.1", webhook_server.port)]
    await broker.close()


async def test_a_new_connection_is_checked_anew(
    webhook_server: WebhookServer, connects: list[Any]
) -> None:
    answers = iter([["127.0.0.1"], ["127.0.0.2"], ["127.0.0.1"]])
    broker = WebhookBroker(here(webhook_server), PATIENT, resolver=lambda *_: next(answers))
    webhook_server.require_private()
    assert await broker.send([make_message()]) == [Delivered()]
    webhook_server.kill()
    webhook_server.start()
    connects.clear()
    (outcome,) = await broker.send([make_message()])
    assert isinstance(outcome, Transient)
    assert outcome.code == "address_refused"
    assert connects == []
    assert await broker.send([make_message()]) == [Delivered()]
    await broker.close()


LOCATIONS = [
    "http://169.254.169.254/latest/meta-data/",
    "http://metadata.google.internal/computeMetadata/v1/",
    "https://127.0.0.1:PORT/",
    "//127.0.0.1:PORT/",
    "http://[::1]:PORT/",
    "http://2130706433:PORT/",
    "https://example.com/",
    "/ok",
    "gopher://127.0.0.1:PORT/_",
    "file:///etc/passwd",
]


@pytest.mark.parametrize("location", LOCATIONS)
@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_a_redirect_is_not_followed(
    webhook_server: WebhookServer,
    connects: list[Any],
    trap: Trap,
    location: str,
    status: int,
) -> None:
    to = location.replace("PORT", str(trap.port)).replace("/", "%2F")
    url = f"{webhook_server.url}/status/{status}?header=Location:{to}"
    broker = WebhookBroker(f"{url}#allow=127.0.0.1&allow_http=yes&unsigned=yes", PATIENT)
    (outcome,) = await broker.send([make_message()])
    assert isinstance(outcome, Permanent)
    assert outcome.code == f"http_{status}"
    assert "not followed" in outcome.text
    await broker.close()
    assert connects == [("127.0.0.1", webhook_server.port)]
    assert trap.came == []


@pytest.mark.parametrize("variable", ["http_proxy", "HTTP_PROXY", "https_proxy", "ALL_PROXY"])
async def test_a_proxy_of_the_environment_is_not_used(
    webhook_server: WebhookServer,
    connects: list[Any],
    trap: Trap,
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
) -> None:
    monkeypatch.setenv(variable, f"http://127.0.0.1:{trap.port}")
    broker = WebhookBroker(here(webhook_server), PATIENT, resolver=to_loopback)
    assert await broker.send([make_message()]) == [Delivered()]
    await broker.close()
    assert connects == [("127.0.0.1", webhook_server.port)]
    assert trap.came == []


# ── What is let through ────────────────────────────────────────────────────────────────────────

NOTHING = Allowed()


@pytest.mark.parametrize(
    "address",
    [
        *("1.1.1.1", "8.8.8.8", "93.184.216.34", "9.255.255.255", "11.0.0.0", "100.63.255.255"),
        *("100.128.0.0", "126.255.255.255", "128.0.0.0", "168.63.129.15", "169.253.255.255"),
        *("169.255.0.0", "172.15.255.255", "172.32.0.0", "191.255.255.255", "192.0.1.0"),
        *("192.167.255.255", "192.169.0.0", "198.17.255.255", "198.20.0.0", "223.255.255.255"),
        *("2606:4700::1", "2a00:1450:4001:830::200e", "2001:200::1", "2003::1", "2001:db9::1"),
        *("64:ff9b::8.8.8.8", "3ffe:ffff::1"),
    ],
)
def test_a_public_address_is_let_through(address: str) -> None:
    found = literal(address)
    assert found is not None
    assert why_refused(found, "hooks.example", 443, NOTHING) is None
    assert check_host(address, 443, NOTHING) == address


@pytest.mark.parametrize(
    ("allow", "host", "address", "passes"),
    [
        ("10.1.0.0/16", "hooks.example", "10.1.2.3", True),
        ("10.1.0.0/16", "hooks.example", "10.2.2.3", False),
        ("10.1.2.3", "hooks.example", "10.1.2.3", True),
        ("fd00::/8", "hooks.example", "fd00::1", True),
        ("hooks.internal", "hooks.internal", "10.2.2.3", True),
        ("HOOKS.internal", "hooks.internal", "127.0.0.1", True),
        ("hooks.internal", "other.internal", "10.2.2.3", False),
        ("hooks.internal:443", "hooks.internal", "10.2.2.3", True),
        ("hooks.internal:8443", "hooks.internal", "10.2.2.3", False),
        # A name is no way to the metadata; who wants that must say the address.
        ("hooks.internal", "hooks.internal", "169.254.169.254", False),
        ("169.254.169.254", "hooks.internal", "169.254.169.254", True),
        *(("hooks.internal", "hooks.internal", place, False) for place in METADATA),
        *((place, "hooks.internal", place, True) for place in METADATA),
        ("100.64.0.0/10", "hooks.internal", "100.100.100.200", False),
        ("fc00::/7", "hooks.internal", "fd00:ec2::254", False),
        ("169.254.0.0/16", "hooks.internal", "169.254.169.254", False),
        ("hooks.internal", "hooks.internal", "::ffff:10.0.0.1", False),
        ("hooks.internal", "hooks.internal", "224.0.0.1", False),
    ],
)
def test_what_is_allowed_by_name_or_network(
    allow: str, host: str, address: str, passes: bool
) -> None:
    found = literal(address)
    assert found is not None
    assert (why_refused(found, host, 443, Allowed.of([allow])) is None) is passes


@pytest.mark.parametrize("entry", ["10.1.2.3/8", "a b", "*", "hooks.internal:x", "https://a", ""])
def test_a_bad_entry_of_the_allow_list_is_refused(entry: str) -> None:
    with pytest.raises(ConfigurationError, match="allow="):
        Allowed.of([entry])


@pytest.mark.parametrize(("port", "passes"), [(443, True), (1024, True), (8443, True), (25, False)])
def test_ports_of_other_services_are_refused(port: int, passes: bool) -> None:
    with contextlib.nullcontext() if passes else pytest.raises(ConfigurationError, match="port"):
        check_host("hooks.example", port, NOTHING)
    assert check_host("hooks.example", 25, Allowed.of(["hooks.example:25"])) == "hooks.example"
