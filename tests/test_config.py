"""Settings: which source wins, and what is refused."""

import dataclasses
from pathlib import Path

import pytest

from postroom.config import RelaySettings, Routes, Settings, load
from postroom.errors import ConfigurationError


@pytest.fixture(autouse=True)
def _own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def _file(text: str, name: str = "postroom.toml") -> str:
    Path(name).write_text(text)
    return name


def test_defaults() -> None:
    settings = load(environ={})
    assert settings == Settings()
    relay = settings.relay
    assert (relay.lease_seconds, relay.send_timeout_seconds, relay.on_dead) == (30, 10, "hold")
    assert relay.batch_bytes == 8 * 1024 * 1024
    assert relay.keep_delivered_seconds == 7 * 86_400
    with pytest.raises(dataclasses.FrozenInstanceError):
        relay.lease_seconds = 1  # type: ignore[misc]


def test_later_sources_win() -> None:
    _file(
        'database_url = "file-db"\nbroker_url = "file-broker"\n'
        "[relay]\nlease_seconds = 40\nbatch_rows = 10\nconcurrency = 2\n"
    )
    environ = {
        "POSTROOM_BROKER_URL": "environment-broker",
        "POSTROOM_RELAY_BATCH_ROWS": "20",
        "POSTROOM_RELAY_CONCURRENCY": "3",
        "POSTROOM_RELAY_SOURCE": "shop",
    }
    settings = load(environ=environ, relay={"concurrency": 9, "on_dead": None})
    assert settings.database_url == "file-db"
    assert settings.broker_url == "environment-broker"
    assert settings.relay.lease_seconds == 40
    assert settings.relay.batch_rows == 20
    assert settings.relay.concurrency == 9
    assert settings.relay.source == "shop"
    assert settings.relay.on_dead == "hold"
    assert load(environ=environ, broker_url="option").broker_url == "option"
    assert load(environ={"POSTROOM_DATABASE_URL": ""}).database_url == "file-db"


def test_where_the_file_is() -> None:
    other = _file('database_url = "other"', "other.toml")
    third = _file('database_url = "third"', "third.toml")
    assert load(environ={}).database_url is None
    assert load(environ={"POSTROOM_CONFIG": other}).database_url == "other"
    assert load(environ={"POSTROOM_CONFIG": other}, config=third).database_url == "third"
    with pytest.raises(ConfigurationError, match=r"no configuration file nowhere\.toml"):
        load(environ={}, config="nowhere.toml")


def test_routes() -> None:
    _file(
        'broker_url = "default"\n[relay.routes]\n'
        '"orders.eu.*" = "europe"\n"orders.*" = "world"\n"audit" = "europe"\n'
    )
    routes = load(environ={}).require_routes()
    assert routes.url_for("orders.eu.placed") == "europe"
    assert routes.url_for("orders.placed") == "world"
    assert routes.url_for("audit") == "europe"
    assert routes.url_for("Audit") == "default"
    assert routes.urls == ("europe", "world", "default")
    assert Routes((("orders", "world"),)).url_for("x") is None


def test_what_is_missing_is_named() -> None:
    with pytest.raises(ConfigurationError, match="POSTROOM_DATABASE_URL"):
        load(environ={}).require_database()
    with pytest.raises(ConfigurationError, match="POSTROOM_BROKER_URL"):
        load(environ={}).require_routes()


def test_send_must_end_before_its_lease() -> None:
    with pytest.raises(ConfigurationError) as caught:
        RelaySettings(lease_seconds=15, send_timeout_seconds=10)
    assert str(caught.value) == (
        "send_timeout_seconds (10) + 1 must be below 2/3 of lease_seconds (15), so that a send "
        "ends before its lease: set lease_seconds above 16.5."
    )
    with pytest.raises(ConfigurationError):
        RelaySettings(lease_seconds=16.5, send_timeout_seconds=10)
    RelaySettings(lease_seconds=16.6, send_timeout_seconds=10)


WRONG_FILES = {
    "database_url = 5": "database_url must be text",
    'databse_url = "x"': "did you mean database_url?",
    "[relay]\nlease_secs = 3": "did you mean lease_seconds?",
    "[relay]\nbatch_rows = 1.5": "batch_rows must be a whole number",
    "[relay]\nbatch_rows = true": "batch_rows must be a whole number",
    '[relay]\nlease_seconds = "30"': "lease_seconds must be a number",
    "[relay]\nlease_seconds = inf": "lease_seconds must be a number",
    "[relay]\nlease_seconds = nan": "lease_seconds must be a number",
    "[relay]\nbatch_rows = 0": "batch_rows must be above zero",
    "[relay]\nkeep_delivered_seconds = -1": "keep_delivered_seconds must be zero or more",
    "[relay]\npoll_min_seconds = 2": "poll_min_seconds must not be above poll_max_seconds",
    "[relay]\nbatch_rows = 99999": "batch_rows must not be above in_flight_rows",
    '[relay]\non_dead = "panic"': 'on_dead must be "hold" or "continue"',
    "[relay]\nsource = 7": "source must be text",
    "relay = 7": "relay in postroom.toml must be a table",
    '[relay]\nroutes = "x"': "routes in postroom.toml must be a table",
    "[relay.routes]\norders = 7": "orders must be text",
    "= nonsense": "not valid TOML",
}


@pytest.mark.parametrize("text", WRONG_FILES)
def test_wrong_files(text: str) -> None:
    _file(text)
    with pytest.raises(ConfigurationError) as caught:
        load(environ={})
    assert WRONG_FILES[text] in str(caught.value)
    assert "\n" not in str(caught.value)


def test_wrong_environment() -> None:
    with pytest.raises(ConfigurationError, match="POSTROOM_RELAY_BATCH_ROWS must be a whole"):
        load(environ={"POSTROOM_RELAY_BATCH_ROWS": "many"})
    with pytest.raises(ConfigurationError, match="did you mean POSTROOM_RELAY_BATCH_ROWS"):
        load(environ={"POSTROOM_RELAY_BATCH_ROW": "1"})


def test_zero_means_at_once() -> None:
    relay = load(environ={"POSTROOM_RELAY_KEEP_DELIVERED_SECONDS": "0"}).relay
    assert relay.keep_delivered_seconds == 0


def test_no_secret_is_shown() -> None:
    _file('[relay.routes]\na = "nats://u:hunter22@h"')
    settings = load(
        environ={}, database_url="postgres://u:hunter22@h/d", broker_url="nats://u:hunter22@h"
    )
    assert "hunter22" not in repr(settings)


def test_routes_on_record_are_shown_as_people_write_them() -> None:
    def shown(routes: Routes) -> str:
        return Routes.describe(routes.fingerprint(lambda url: url))

    assert shown(Routes(default="stdout://")) == "all topics to stdout://"
    both = Routes(patterns=(("orders.*", "nats://a"),), default="stdout://")
    assert shown(both) == "orders.* to nats://a, all other topics to stdout://"
    assert Routes.describe("written by another version") == "written by another version"
