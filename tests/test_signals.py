"""Signals: their fields are checked, their log lines are one line, and no secret gets through."""

import io
import json
import logging
import time
from collections.abc import Iterator
from typing import Any

import pytest

from postroom import signals
from postroom.ops.logs import JsonFormatter, TextFormatter

CANARY = "canary-pa55"
URL = f"postgresql://app:{CANARY}@db.example/shop"


@pytest.fixture
def heard() -> Iterator[list[tuple[str, dict[str, Any]]]]:
    found: list[tuple[str, dict[str, Any]]] = []
    stop = signals.listen(lambda name, fields: found.append((name, fields)))
    yield found
    stop()


class Log:
    """What a handler with a formatter of the application's choice writes."""

    def __init__(self, formatter: logging.Formatter) -> None:
        self._out = io.StringIO()
        self._handler = logging.StreamHandler(self._out)
        self._handler.setFormatter(formatter)
        self._logger = logging.getLogger("postroom")

    def __enter__(self) -> "Log":
        self._level = self._logger.level
        self._logger.addHandler(self._handler)
        self._logger.setLevel(logging.DEBUG)
        return self

    def __exit__(self, *_: object) -> None:
        self._logger.removeHandler(self._handler)
        self._logger.setLevel(self._level)

    @property
    def lines(self) -> list[str]:
        return self._out.getvalue().splitlines()


FORMATTERS = [TextFormatter, JsonFormatter, lambda: logging.Formatter("%(levelname)s %(message)s")]


@pytest.mark.parametrize("fields", [{}, {"incarnation": "x", "more": 1}, {"error": "x"}])
def test_wrong_or_missing_fields_are_an_error_where_they_are_checked(
    fields: dict[str, Any],
) -> None:
    with pytest.raises(TypeError, match=r"relay\.failed"):
        signals.emit("relay.failed", **fields)
    signals.check_fields(False)
    try:
        signals.emit("relay.failed", **fields)
    finally:
        signals.check_fields()


def test_an_unknown_signal_is_an_error() -> None:
    with pytest.raises(KeyError):
        signals.emit("relay.fell", error="x")


@pytest.mark.parametrize("formatter", FORMATTERS)
def test_secrets_are_taken_out_of_fields_lists_and_lines(
    formatter: Any, heard: list[tuple[str, dict[str, Any]]]
) -> None:
    with Log(formatter()) as log:
        signals.emit("relay.started", incarnation="i", database=URL, brokers=[URL, "stdout://"])
        signals.emit("notify.lost", error=f"host=x password={CANARY} user=y\nsecond line")
    assert len(log.lines) == 2
    assert CANARY not in "".join(log.lines)
    assert CANARY not in repr(heard)
    assert "postgresql://app:***@db.example/shop" in log.lines[0]


@pytest.mark.parametrize("formatter", FORMATTERS)
def test_secrets_are_taken_out_of_tracebacks(formatter: Any) -> None:
    def fail(name: str, fields: dict[str, Any]) -> None:
        raise ValueError(f"cannot reach {URL}")

    stop = signals.listen(fail)
    try:
        with Log(formatter()) as log:
            signals.emit("database.back", incarnation="i")
    finally:
        stop()
    text = "\n".join(log.lines)
    assert "a listener failed on database.back" in text
    assert "ValueError: cannot reach postgresql://app:***@db.example/shop" in text
    # The line of source that the traceback shows holds the name of the constant, not its value.
    assert CANARY not in text


def test_json_lines_hold_the_fields_of_a_signal_and_no_payload() -> None:
    with Log(JsonFormatter()) as log:
        signals.emit(
            "message.held",
            id="7",
            topic="orders",
            key="k",
            lane=3,
            status="failed",
            attempts=2,
            last_error_code="busy",
            adapter="nats://a:4222",
            delay_seconds=5.0,
        )
        logging.getLogger("postroom").warning("by hand: %s", URL)
    first, second = map(json.loads, log.lines)
    assert first["signal"] == "message.held"
    assert (first["level"], first["logger"]) == ("WARNING", "postroom")
    known = {"status": "failed", "attempts": 2, "last_error_code": "busy", "lane": 3}
    known |= {"adapter": "nats://a:4222", "id": "7", "topic": "orders", "key": "k"}
    known |= {"idempotency_key": "7"}
    assert known.items() <= first.items()
    assert "signal" not in second
    assert second["message"] == "by hand: postgresql://app:***@db.example/shop"


def test_a_long_list_is_counted_in_the_log_and_whole_for_listeners(
    heard: list[tuple[str, dict[str, Any]]],
) -> None:
    with Log(TextFormatter()) as log:
        signals.emit(
            "message.delivered", lane=0, status="succeeded", count=50, ages_seconds=[0.5] * 50
        )
    assert log.lines[0].endswith('status=succeeded count=50 ages_seconds="[50 values]"')
    assert len(heard[0][1]["ages_seconds"]) == 50


def test_a_line_of_text_has_nothing_that_a_terminal_acts_on() -> None:
    with Log(TextFormatter()) as log:
        signals.emit("notify.lost", error="\x1b[31m\x07 \x9b31m\x85\x7f\u2028\u2029 end")
    assert log.lines[0].isprintable(), log.lines
    shown = r"\u001b[31m\u0007 \u009b31m\u0085\u007f\u2028\u2029 end"
    assert log.lines[0].endswith(f'error="{shown}"')


@pytest.mark.parametrize(
    "key",
    [
        "x status=succeeded attempts=99",
        'x" status=succeeded y="',
        "x' status=succeeded y='",
        "x\\",
        "x\nsignal status=succeeded",
        "x\u2003status=succeeded",
        "x\u202e",
        'token="x" status=succeeded',
        "Bearer x status=succeeded",
        "https://h/#x",
        'https://h/#x" status=succeeded',
        "a://b:c@d",
        "",
    ],
)
@pytest.mark.parametrize("formatter", FORMATTERS[::2])
def test_no_value_can_be_read_as_other_fields(formatter: Any, key: str) -> None:
    with Log(formatter()) as log:
        signals.emit(
            "request.settled",
            id="7",
            idempotency_key=key,
            status="failed",
            attempts=1,
            last_error_code=None,
            adapter="call:x:y",
        )
    (line,) = log.lines
    assert line.isprintable()
    rest = line.partition(" id=7 idempotency_key=")[2]
    if rest.startswith('"'):
        value, end = json.JSONDecoder().raw_decode(rest)
    else:
        value, end = rest.partition(" ")[0], rest.index(" ")
    assert value == signals.redact(key)
    assert rest[end:] == " status=failed attempts=1 last_error_code=None adapter=call:x:y"
    assert log.lines[0].count(" status=failed") == 1


def test_what_needs_no_quotes_has_none() -> None:
    with Log(TextFormatter()) as log:
        signals.emit("relay.started", incarnation="ä-1", database="sqlite:///a.db", brokers=["a:b"])
        signals.emit("relay.started", incarnation="i", database="d", brokers=["a:b", "c"])
    assert log.lines[0].endswith("incarnation=ä-1 database=sqlite:///a.db brokers=['a:b']")
    assert log.lines[1].endswith("""brokers="['a:b', 'c']\"""")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ('{"token":"CANARY","n":1}', '{"token":"***","n":1}'),
        ('{"token":"CAN\\"ARY"}', '{"token":"***"}'),
        ('password="CANARY\\" user=x', 'password="***" user=x'),
        ("{'api_key': 'CANARY'}", "{'api_key': '***'}"),
        ('{"n":[{"token_id":1770}]}', '{"n":[{"token_id":***}]}'),
        ("password=CAN}AR]Y user=x", "password=*** user=x"),
        ("?token=CANARY&n=1", "?token=***&n=1"),
    ],
)
def test_what_is_around_a_secret_stays(text: str, shown: str) -> None:
    assert signals.redact(text) == shown
    assert signals.redact(shown) == shown, "a text may pass more than once"


def test_a_long_text_costs_no_more_than_its_length() -> None:
    def seconds(text: str) -> float:
        begun = time.process_time()
        signals.redact(text)
        return time.process_time() - begun

    odd = ("token=]", 'token="\\', "token=}x", "a://", "https://#", "a:@")
    for unit in ("x", "é", "token = ", "word ", *odd):
        few, many = unit * (20_000 // len(unit)), unit * (200_000 // len(unit))
        assert seconds(many) < 40 * seconds(few) + 0.5, unit
    assert signals.redact("9" * 50 + f"x9nats://u:{CANARY}@h").endswith("nats://u:***@h")


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        (f"amqp://app:a,{CANARY}@h:5672/v?exchange=e", "amqp://app:***@h:5672/v?exchange=e"),
        (f"redis://app:a {CANARY}@h/0", "redis://app:***@h/0"),
        (f"redis://h/0?password=a,{CANARY}&x=1", "redis://h/0?password=***&x=1"),
        (f"redis://app:a?{CANARY}", "redis://app:a?***"),
        (f"nats://{CANARY}'x@h", "nats://***@h"),
        (f"nats://a:{CANARY}@h1,nats://a:{CANARY}@h2", "nats://a:***@h1,nats://a:***@h2"),
        (f"nats://a:p,nats://{CANARY}@h2", "nats://a:***@h2"),
        (f"kafka://app:<{CANARY}>@h:1,i:2", "kafka://app:***@h:1,i:2"),
        (f"https://h/p?sig={CANARY}#secret=A,{CANARY}", "https://h/p?***#***"),
        (f"https://h/p#{CANARY}@{CANARY}", "https://***#***"),
        (f"https://a:x#{CANARY}@h/p", "https://***#***"),
        (f"https://a:{CANARY}@h/p#x@{CANARY}", "https://a:***@h/p#***"),
        ("stdout://", "stdout://"),
        ("sqs://eu-west-1/orders?endpoint=x", "sqs://eu-west-1/orders?endpoint=x"),
        ("topic orders", "topic orders"),
    ],
)
def test_the_name_of_a_place_holds_no_secret(url: str, shown: str) -> None:
    assert signals.redact_url(url) == shown
    assert signals.redact_url(shown) == shown  # it passes through more than one hand
    assert signals.redact(shown) == shown


@pytest.mark.parametrize("odd", [*",'\"<>@#/", "://"])
def test_a_url_in_a_text_ends_with_its_word(odd: str) -> None:
    text = signals.redact(f"cannot reach 'amqp://app:p{odd}{CANARY}@h:1', bob@h said")
    assert text == "cannot reach 'amqp://app:***@h:1', bob@h said"
    text = signals.redact(f"<https://h/p#secret=A{odd}{CANARY}> is down")
    assert CANARY not in text
    assert text.endswith(" is down")


def test_whether_anybody_listens(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # Whatever other tests have left: no listener, and a log that cares for warnings alone.
    monkeypatch.setattr(signals, "_listeners", [])
    caplog.set_level(logging.WARNING, logger="postroom")
    assert not signals.heard("message.delivered")
    stop = signals.listen(lambda name, fields: None)
    assert signals.heard("message.delivered")
    stop()
    stop = signals.listen(lambda name, fields: None, only=["message.held"])
    assert signals.heard("message.held")
    assert not signals.heard("message.delivered")
    stop()
    with Log(TextFormatter()):
        assert signals.heard("message.delivered")
