"""An exception of a handler is logged with its frames, and kept with the attempt it ended."""

import json
import logging
import traceback
from typing import Any

import pytest
from consuming import House, note

from postroom.ops.logs import JsonFormatter
from postroom.retry import RetryPolicy

CANARY = "hunter2-s3cret"


class Reporter(logging.Handler):
    """A handler that reports exceptions elsewhere: it reads `exc_info`, frame by frame."""

    def __init__(self) -> None:
        super().__init__()
        self.reports: list[tuple[str, str, list[str], list[dict[str, Any]]]] = []
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            kind, error, trace = record.exc_info
            assert kind is not None
            frames = list(traceback.walk_tb(trace))
            names = [frame.f_code.co_name for frame, _ in frames]
            self.reports.append(
                (kind.__name__, str(error), names, [dict(frame.f_locals) for frame, _ in frames])
            )
        self.lines += [logging.Formatter().format(record), JsonFormatter().format(record)]


@pytest.fixture
def reporter() -> Any:
    made, logger = Reporter(), logging.getLogger("postroom")
    logger.addHandler(made)
    yield made
    logger.removeHandler(made)


def charge(secret: str) -> None:
    raise ValueError(f"cannot charge postgresql://app:{secret}@bank/x\nparameters: {secret}")


@pytest.mark.parametrize(("attempts", "signal"), [(2, "delivery.failed"), (1, "delivery.buried")])
@pytest.mark.parametrize("kind", ["async", "in a thread"])
async def test_an_exception_of_a_handler_is_logged_with_its_frames(
    house: House, reporter: Reporter, attempts: int, signal: str, kind: str
) -> None:
    consumer = house.consumer(retry=RetryPolicy((60,), attempts=attempts))
    if kind == "async":

        @consumer.on("note")
        async def handle(event: Any, tx: Any) -> None:
            charge(CANARY)
    else:

        @consumer.on("note")
        def handle_in_thread(event: Any, tx: Any) -> None:
            charge(CANARY)

    await house.send(note("k", 0))
    await consumer.drain_once()
    ((name, text, frames, values),) = reporter.reports
    assert name == "ValueError"
    assert text == "ValueError: cannot charge postgresql://app:***@bank/x"
    assert frames[-2:] == ["handle" if kind == "async" else "handle_in_thread", "charge"]
    assert values == [{}] * len(frames), "a frame shows what the message held"
    (said,) = house.said(signal)
    assert said["error"] == text
    logged = "\n".join(reporter.lines)
    assert signal in logged
    assert __file__ in logged
    assert ", in charge" in logged
    assert CANARY not in logged
    # Kept with the attempt: the handler's frame and the last ones.
    ((history,),) = house.stage.query("SELECT history FROM {p}inbox_held") or [(None,)]
    (entry,) = house.letters()[0]["history"] if attempts == 1 else json.loads(history)
    line = charge.__code__.co_firstlineno + 1
    assert entry["where"][-1] == f"{__file__}:{line} charge"
    assert entry["where"][0].endswith(frames[-2])


async def test_a_deep_traceback_keeps_the_handlers_frame(house: House) -> None:
    consumer = house.consumer(retry=RetryPolicy((60,), attempts=1))

    def fall(depth: int) -> None:
        if not depth:
            raise KeyError("nokey")
        fall(depth - 1)

    @consumer.on("note")
    async def handle(event: Any, tx: Any) -> None:
        fall(20)

    await house.send(note("k", 0))
    await consumer.drain_once()
    ((entry,),) = [each["history"] for each in house.letters()]
    assert [each.split()[-1] for each in entry["where"]] == ["handle", *["fall"] * 4]


async def test_a_type_without_a_handler_is_told_what_to_do(
    house: House, reporter: Reporter
) -> None:
    await house.send(note("k", 0, type="order.packed.v1"))
    await house.applying().drain_once()
    (letter,) = house.letters()
    assert letter["error"] == (
        'no handler for messages of type order.packed.v1: write one, or `Consumer(unknown="skip")`'
    )
    assert reporter.reports == [], "nothing was raised"
