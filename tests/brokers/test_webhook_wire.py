"""What a webhook says: CloudEvents and Standard Webhooks, as their own libraries read them."""

import base64
import datetime as dt
import json
import time

import pytest
from cloudevents.core.bindings.http import HTTPMessage, from_binary
from cloudevents.core.formats.json import JSONFormat
from cloudevents.core.v1.event import CloudEvent
from hypothesis import given
from hypothesis import strategies as st
from standardwebhooks import Webhook, WebhookVerificationError

from helpers_messages import make_message
from postroom.brokers import Delivered, Permanent, Transient
from postroom.brokers.base import Outcome
from postroom.brokers.webhook_address import Target
from postroom.brokers.webhook_wire import meaning, request_headers, retry_after
from postroom.errors import ConfigurationError
from postroom.messages import Message

NEW, OLD = b"n" * 24, b"o" * 32


def whsec(secret: bytes) -> str:
    return f"whsec_{base64.b64encode(secret).decode()}"


def headers_of(message: Message, *secrets: bytes, now: float | None = None) -> dict[str, str]:
    now = time.time() if now is None else now
    return request_headers(message, source="/der shop", epoch=3, secrets=secrets, now=now)


# ── CloudEvents ────────────────────────────────────────────────────────────────────────────────

TEXTS = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=60)


@given(key=TEXTS, type=TEXTS)
def test_the_sdk_reads_what_was_meant(key: str, type: str) -> None:
    message = make_message(b'{"total": 42}', key=key, type=type)
    headers = headers_of(message)
    assert all(value.isascii() and value.isprintable() for value in headers.values())
    event = from_binary(HTTPMessage(headers, message.payload), JSONFormat(), CloudEvent)
    assert event.get_id() == message.id
    assert event.get_type() == type
    assert event.get_source() == "/der shop"
    assert event.get_specversion() == "1.0"
    assert event.get_extension("partitionkey") == key
    assert event.get_datacontenttype() == "application/json"
    assert event.get_data() == {"total": 42}
    epoch = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
    assert event.get_time() == epoch + dt.timedelta(microseconds=message.created_us)


def test_what_the_binding_demands_is_encoded_and_nothing_else() -> None:
    said = headers_of(make_message(key='a b"c%dé€~!', headers={"ce-own": "100 %"}))
    assert said["ce-partitionkey"] == "a%20b%22c%25d%C3%A9%E2%82%AC~!"
    assert said["ce-own"] == "100%20%25"


def test_plain_headers_of_the_publisher_go_as_they_are() -> None:
    own = {"Baggage": "a=b%20c,d=e", "traceparent": "00-0af7-b7ad-01", "X-Empty": ""}
    said = headers_of(make_message(headers=own | {"X-Umlaut": "grüße", "X-Edge": " x "}))
    assert {name: said[name.lower()] for name in own} == own
    assert said["x-umlaut"] == "gr%C3%BC%C3%9Fe"
    assert said["x-edge"] == "%20x%20"


@pytest.mark.parametrize(
    "name",
    [
        *("Host", "Content-Length", "Transfer-Encoding", "connection", "TE", "Upgrade", "Expect"),
        *("webhook-id", "Webhook-Signature", "Proxy-Authorization", "Content-Encoding", "Trailer"),
    ],
)
def test_a_publisher_cannot_steer_the_request(name: str) -> None:
    said = headers_of(make_message(headers={name: "evil"}), NEW)
    assert "evil" not in said.values()


@pytest.mark.parametrize("name", ["CE-ID", "Content-Type", "Event_Id", "ce-Type"])
def test_our_names_win_in_any_case(name: str) -> None:
    message = make_message(headers={name: "evil"})
    assert headers_of(message) == headers_of(message._replace(headers_json=None))


@pytest.mark.parametrize("content_type", ["text/plän", "text/plain ", "a\u2028b"])
def test_a_content_type_that_is_no_header_is_refused(content_type: str) -> None:
    with pytest.raises(ValueError, match="content type"):
        headers_of(make_message(content_type=content_type))


# ── Signatures ─────────────────────────────────────────────────────────────────────────────────


@given(payload=st.text().map(str.encode))
def test_the_library_verifies_what_we_sign(payload: bytes) -> None:
    headers = headers_of(make_message(payload), NEW)
    Webhook(whsec(NEW)).verify(payload, headers, json_parse=False)


@pytest.mark.parametrize("secret", [NEW, OLD])
def test_while_secrets_are_rotated_either_verifies(secret: bytes) -> None:
    message = make_message()
    assert Webhook(whsec(secret)).verify(message.payload, headers_of(message, NEW, OLD)) == {
        "total": 42
    }


def test_another_secret_content_or_time_does_not_verify() -> None:
    message = make_message()
    for payload, secret, now in (
        (message.payload, b"x" * 24, time.time()),
        (message.payload + b" ", NEW, time.time()),
        (message.payload, NEW, time.time() - 600),
    ):
        with pytest.raises(WebhookVerificationError):
            Webhook(whsec(secret)).verify(payload, headers_of(message, NEW, now=now))


def test_the_id_stays_over_attempts_and_redrives() -> None:
    message = make_message()
    assert headers_of(message, NEW)["webhook-id"] == message.id
    assert headers_of(message._replace(redrives=2), NEW)["webhook-id"] == message.id


def test_the_vector_of_the_specification() -> None:
    """Of the specification's own libraries: id, time, payload, secret and signature."""
    message = make_message(b'{"test": 2432232314}', id="msg_p5jXN8AQM9LWM0D4loKWxJek")
    key = base64.b64decode("MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
    said = headers_of(message, key, now=1614265330)
    assert said["webhook-signature"] == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


# ── The address ────────────────────────────────────────────────────────────────────────────────


def target(url: str, **extra: str) -> Target:
    return Target.of(url, extra)


def test_options_stand_behind_the_hash_and_are_not_sent() -> None:
    url = (
        f"https://u%40x:p%3Aw@hooks.example/a/{{topic}}?v=1#secret={whsec(NEW)}&secret={whsec(OLD)}"
    )
    made = target(url)
    assert (made.scheme, made.host, made.port) == ("https", "hooks.example", 443)
    assert made.path_for("orders.created") == "/a/orders.created?v=1"
    assert made.secrets == (NEW, OLD)
    assert base64.b64decode((made.credentials or "").removeprefix("Basic ")) == b"u@x:p:w"
    assert str(made) == "https://hooks.example"
    for secret in ("p:w", "p%3Aw", whsec(NEW), base64.b64encode(NEW).decode()):
        assert secret not in repr(made)


def test_secrets_may_come_from_the_environment_or_from_options(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SHOP_SECRET", f"{whsec(NEW)} {whsec(OLD)}")
    assert target("https://hooks.example#secret_env=SHOP_SECRET").secrets == (NEW, OLD)
    assert target("https://hooks.example", secret=whsec(NEW)).secrets == (NEW,)
    with pytest.raises(ConfigurationError, match="no OTHER"):
        target("https://hooks.example#secret_env=OTHER")


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("https://hooks.example/", "is signed"),
        ("https://hooks.example/#secret=whsec_short", "24 to 64 bytes"),
        ("https://hooks.example/#secret=whsec_" + "!" * 40, "24 to 64 bytes"),
        ("https://hooks.example/#secret=" + "A" * 100, "24 to 64 bytes"),
        ("https://hooks.example/#unsigned=perhaps", "yes or no"),
        ("https://hooks.example/#sekret=x", "no option sekret"),
        ("https://hooks.example/#unsigned=yes&concurrency=0", "concurrency"),
        ("https://hooks.example/{key}#unsigned=yes", "no other braces"),
        ("https://hooks.example/ü#unsigned=yes", "printable ASCII"),
        ("http://hooks.example/#unsigned=yes", "https://"),
        ("https://hooks.example/#unsigned=yes&tls_ca=/nowhere", "cannot be read"),
    ],
)
def test_what_cannot_work_is_refused_at_once(url: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said) as caught:
        target(url)
    assert "AAAA" not in str(caught.value)
    assert "short" not in str(caught.value)


def test_three_secrets_are_too_many() -> None:
    one = f"secret={whsec(NEW)}"
    with pytest.raises(ConfigurationError, match="at most two"):
        target(f"https://hooks.example#{one}&{one}&{one}")


# ── Answers ────────────────────────────────────────────────────────────────────────────────────


def kind(outcome: Outcome) -> str:
    if isinstance(outcome, Delivered):
        return "delivered"
    if isinstance(outcome, Transient):
        return f"transient {outcome.down or 'message'}"
    return type(outcome).__name__.lower()


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [
        ([200, 201, 202, 204, 299], "delivered"),
        ([300, 301, 302, 304, 307, 308, 399], "permanent"),
        ([400, 401, 403, 404, 405, 409, 411, 413, 415, 422, 431, 451], "permanent"),
        ([408, 425, 500, 501, 505, 520, 599], "transient message"),
        ([410, 429, 502, 503, 504], "transient topic"),
        ([101, 199], "transient message"),
    ],
)
def test_every_status_has_one_meaning(statuses: list[int], expected: str) -> None:
    for status in statuses:
        assert kind(meaning(status, {}, b"", scope="topic")) == expected, status


NOON = dt.datetime(2026, 1, 1, 12, tzinfo=dt.UTC)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("0", 0.0),
        ("120", 120.0),
        (" 7 ", 7.0),
        ("999999999999999999999", 3600.0),
        ("Thu, 01 Jan 2026 12:00:30 GMT", 30.0),
        ("Thu, 01 Jan 2026 11:00:00 GMT", 0.0),
        ("Fri, 01 Jan 2027 12:00:00 GMT", 3600.0),
        ("-5", None),
        ("1.5", None),
        ("soon", None),
        ("", None),
        ("٣", None),
        ("Thu, 99 Jan 2026 12:00:30 GMT", None),
    ],
)
def test_retry_after_is_read_and_kept_within_an_hour(value: str, seconds: float | None) -> None:
    assert retry_after({"retry-after": value}, NOON) == seconds
    outcome = meaning(503, {"retry-after": "99999"}, b"", scope="broker")
    assert isinstance(outcome, Transient)
    assert outcome.retry_after_seconds == 3600


def test_what_the_receiver_said_is_told_in_one_short_line() -> None:
    body = json.dumps({"error": "no\nsuch order", "token": "canary-1"}).encode() + b"x" * 5000
    outcome = meaning(422, {"content-type": "application/json"}, body, scope="broker")
    assert isinstance(outcome, Permanent)
    assert "no\\nsuch order" in outcome.text
    assert "canary-1" not in outcome.text
    assert len(outcome.text) < 300
    html = meaning(422, {"content-type": "text/html"}, b"<script>", scope="broker")
    packed = {"content-type": "text/plain", "content-encoding": "gzip"}
    assert kind(html) == kind(meaning(422, packed, b"\x1f\x8b", scope="broker")) == "permanent"
    assert "said" not in str(html)
    assert "said" not in str(meaning(422, packed, b"\x1f\x8b", scope="broker"))
