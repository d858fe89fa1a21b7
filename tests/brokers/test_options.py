"""Options of brokers: from URLs and settings, refused if unknown, and never shown."""

import json
import re
from pathlib import Path

import pytest

from postroom import Relay
from postroom.brokers import BrokerOptions, open_broker
from postroom.brokers.nats import NatsBroker
from postroom.brokers.options import known_only, open_brokers, split_url
from postroom.config import load
from postroom.errors import ConfigurationError
from postroom.signals import redact

CANARY = "canary-pa55"


def test_a_url_says_more_than_settings() -> None:
    options = BrokerOptions(extra={"a": "settings", "b": "settings"})
    url, extra = split_url("nats://u:p@h:1,i:2?a=in%20url&c=", options, ["a", "b", "c"])
    assert url == "nats://u:p@h:1,i:2"
    assert extra == {"a": "in url", "b": "settings", "c": ""}


@pytest.mark.parametrize("url", ["nats://h?tls_cax=1", "nats://h?TLS_CA=1", "memory://x?limit=1"])
def test_an_unknown_option_is_refused_with_the_known_ones(url: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        open_broker(url)
    text = str(caught.value)
    assert repr(url.partition("?")[2].partition("=")[0]) in text
    assert ("credentials, " in text and "tls_ca, " in text) or "there are none" in text


@pytest.mark.parametrize(
    "url",
    [
        *("nats://", "stdout://", "call:json:dumps", "memory://", "redis://", "amqp://"),
        *("sqs://", "sns://", "https://hooks.example/#unsigned=yes"),
    ],
)
def test_an_unknown_option_of_the_settings_too(url: str) -> None:
    with pytest.raises(ConfigurationError, match="'speed' is not an option of"):
        open_broker(url, BrokerOptions(extra={"speed": CANARY}))


@pytest.mark.parametrize(
    "url",
    [
        f"nats://u:{CANARY}?{CANARY}@host:4222",
        f"nats://u:{CANARY}?x={CANARY}@host:4222",
        f"nats://host?{CANARY}",
        "nats://host?",
        f"nats://host?token={CANARY}&token={CANARY}",
        f"nats://host?tls_ca=/no/where&password={CANARY}&user=u",
        f"nats://host?password={CANARY}",
        f"nats://host?user=u&password={CANARY}&token={CANARY}",
        f"nats://host?tls_key=/no/where&token={CANARY}",
        f"nats://host?tls_cert=/no/where&token={CANARY}",
        f"nats://host?ack_wait_seconds=0&token={CANARY}",
    ],
)
def test_a_bad_query_shows_no_secret(url: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        NatsBroker(url)
    assert CANARY not in str(caught.value)


def test_secrets_are_in_no_text() -> None:
    options = BrokerOptions(extra={"token": CANARY})
    settings = load(environ={"POSTROOM_BROKERS_NATS_TOKEN": CANARY}, base={})
    broker = NatsBroker(f"nats://h?user=u&password={CANARY}")
    assert CANARY not in f"{options!r} {settings!r} {broker!r} {broker._address!r}"
    assert CANARY not in redact(f"nats://h?user=u&password={CANARY}&tls_ca=x")
    assert CANARY not in redact(f"nats://h?token={CANARY}")
    with pytest.raises(ConfigurationError) as caught:
        known_only("nats", {"x": CANARY}, ["y"])
    assert CANARY not in str(caught.value)


def test_options_of_the_url_say_who_we_are() -> None:
    assert NatsBroker("nats://h?user=u&password=p%26")._address.settings()["password"] == "p&"
    assert NatsBroker("nats://h?token=t")._address.settings()["token"] == "t"
    assert NatsBroker("nats://a:b@h?token=t")._address.settings()["user"] == "a"


def test_settings_of_file_and_environment(tmp_path: Path) -> None:
    path = tmp_path / "postroom.toml"
    path.write_text(
        '[brokers.nats]\ntls_ca = "/file"\nmax_unacked = 10\n[brokers.tls]\nfast = true\n'
    )
    environ = {"POSTROOM_BROKERS_NATS_TLS_CA": "/variable", "POSTROOM_BROKERS_KAFKA_ACKS": "all"}
    assert load(config=str(path), environ=environ).brokers == {
        "nats": {"tls_ca": "/variable", "max_unacked": "10"},
        "tls": {"fast": "true"},
        "kafka": {"acks": "all"},
    }


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("brokers = 1", r"\[brokers\]"),
        ("[brokers]\nnats = 1", r"\[brokers.nats\]"),
        ("[brokers.nats]\na = [1]", "text or a number"),
    ],
)
def test_settings_that_are_no_options(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "postroom.toml"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=said):
        load(config=str(path), environ={})


def test_a_variable_without_an_option() -> None:
    with pytest.raises(ConfigurationError, match="POSTROOM_BROKERS_NATS_OPTION"):
        load(environ={"POSTROOM_BROKERS_NATS": "x"}, base={})


def test_options_reach_the_broker_of_their_scheme() -> None:
    opened = open_brokers(
        ["nats://h", "memory://options"], BrokerOptions(), {"nats": {"max_unacked": "7"}}
    )
    broker = opened["nats://h"]
    assert isinstance(broker, NatsBroker)
    assert broker._max_unacked == 7
    with pytest.raises(ConfigurationError, match=r"options for pigeon://.*known are amqp, "):
        open_brokers([], BrokerOptions(), {"pigeon": {}})


async def test_a_relay_hands_them_on(tmp_path: Path) -> None:
    database = f"sqlite:///{tmp_path}/app.db"
    relay = Relay(database, "nats://h", broker_options={"nats": {"inbox_prefix": "mine"}})
    assert relay.sender._brokers["nats://h"]._inbox == "mine"  # type: ignore[attr-defined]
    with pytest.raises(ConfigurationError, match="'speed' is not an option of nats"):
        Relay(database, "nats://h", broker_options={"nats": {"speed": "9"}})
    assert json.loads(relay.routes.fingerprint(redact).partition(" ")[2]) == [[], "nats://h"]


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("kafak://localhost", "no broker for kafak://: did you mean kafka://? known are amqp,"),
        ("localhost:9092", "localhost:9092 has no scheme: write it before the host, as in kafka:"),
        ("pigeon://x", "no broker for pigeon://: known are amqp,"),
    ],
)
def test_a_scheme_that_nobody_knows(url: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(said)):
        open_broker(url)
