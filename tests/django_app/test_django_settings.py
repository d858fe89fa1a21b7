"""POSTROOM in Django's settings: what is wrong is found by `manage.py check` and by whoever reads
it, in one sentence with a suggestion."""

from typing import Any

import pytest
from django.core import checks
from django.test import override_settings

import django_doors
from postroom import Outbox
from postroom.django import Wishes, settings
from postroom.errors import ConfigurationError

assert django_doors.settings.configured

WRONG = {
    "no dict": ("nats://x", "POSTROOM must be a dict"),
    "misspelt": (
        {"brokr_url": "x"},
        r"'brokr_url'\] is not a setting; did you mean 'broker_url'",
    ),
    "shortened": ({"broker": "nats://x"}, "did you mean 'broker_url'"),
    "no broker": ({"broker_url": "rabbit://x"}, r"\['broker_url'\]: no broker for rabbit://"),
    "capitals": ({"BROKER_URL": "x"}, "did you mean 'broker_url'"),
    "unheard of": ({"zebra": 1}, "it may hold database, database_url, broker_url, brokers, relay"),
    "brokers no dict": ({"brokers": 1}, "brokers in postroom.toml must be a table"),
    "no alias": ({"database": "reports"}, "DATABASES has no 'reports'; it has 'default'"),
    "a number": ({"database": 7}, "DATABASES has no 7"),
    "no URL": ({"broker_url": 7}, r"\['broker_url'\] must be the text of a URL"),
    "empty": ({"database_url": ""}, r"\['database_url'\] must be the text of a URL"),
    "bytes": ({"max_bytes": "1 MB"}, r"\['max_bytes'\] must be a whole number above zero"),
    "no bytes": ({"max_bytes": 0}, "above zero"),
    "notify": ({"notify": "yes"}, r"\['notify'\] must be True or False"),
    "keys": ({"keys": 5}, r"\['keys'\] must say where your Keys are"),
    "notify here": ({"notify": True}, r"\['notify'\] needs PostgreSQL; leave it out"),
    "routes": ({"routes": ["orders"]}, "must be a dict of message types to topics"),
    "a topic": ({"routes": {"order.*": "a b"}}, r"routes\['order\.\*'\]: bad topic 'a b'"),
    "relay": ({"relay": 60}, r"\['relay'\] must be a dict"),
    "relay routes": ({"relay": {"routes": "nats://x"}}, "its 'routes' one of topics to broker"),
    "relay name": ({"relay": {"lease_second": 1}}, r"not a relay setting; did you mean lease_sec"),
    "relay value": ({"relay": {"lease_seconds": 1}}, "set lease_seconds above"),
    "relay route": ({"relay": {"routes": {"a": 1}}}, "a must be text in quotes"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_said(name: str) -> None:
    given, said = WRONG[name]
    with override_settings(POSTROOM=given):
        (found,) = checks.run_checks(tags=["postroom"])
        assert found.id == "postroom.E001"
        assert found.level == checks.ERROR
        with pytest.raises(ConfigurationError, match=said):
            settings.chosen()
        with pytest.raises(ConfigurationError, match=said):
            settings.outbox()
        assert settings.problems() == [found.msg]


def test_keys_that_are_nowhere_are_found_by_the_check() -> None:
    with override_settings(POSTROOM={"keys": "shop.nokeys.keys"}):
        (found,) = checks.run_checks(tags=["postroom"])
        assert found.msg == "POSTROOM['keys'] cannot be imported: No module named 'shop'."


def test_several_mistakes_are_said_at_once() -> None:
    given = {"brokr_url": "x", "max_bytes": -1, "relay": {"lease": 1}, "database": "x"}
    with override_settings(POSTROOM=given):
        assert len(checks.run_checks(tags=["postroom"])) == 4


GOOD: list[dict[str, Any]] = [
    {},
    {"broker_url": "nats://localhost:4222"},
    {"relay": {"lease_seconds": 60, "routes": {"orders.*": "nats://a", "*": "nats://b"}}},
    {"database": "default", "routes": {"order.*": "orders"}, "max_bytes": 10, "notify": False},
]


@pytest.mark.parametrize("given", GOOD)
def test_what_is_right_stays_as_it_is(given: dict[str, Any]) -> None:
    before = repr(given)
    with override_settings(POSTROOM=given):
        assert checks.run_checks(tags=["postroom"]) == []
        settings.outbox()
        document = settings.document()
    assert repr(given) == before
    assert document["relay"] == given.get("relay", {})


def test_without_any() -> None:
    assert settings.chosen() == settings.Chosen()


def test_secrets_are_not_shown() -> None:
    url = "nats://user:hunter2@x"
    chosen = settings.Chosen(database_url=url, broker_url=url, relay={"routes": {"*": url}})
    assert "hunter2" not in repr(chosen)


def test_publish_takes_what_the_outbox_takes() -> None:
    assert set(Wishes.__annotations__) == set(Outbox.publish.__kwdefaults__)
