"""Alerts by webhook: a document a POST, a few tries, and an address that nobody gets to see."""

import asyncio
import json
import threading
import uuid
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from commands import Here

from helpers import eventually_async
from postroom import Draft, Outbox, Relay, RetryPolicy, signals
from postroom.alerts import Alert
from postroom.brokers import memory
from postroom.brokers.base import Permanent
from postroom.config import AlertSettings, load
from postroom.databases import migrate
from postroom.errors import ConfigurationError, Unreachable
from postroom.ops.actions import discard
from postroom.outbox import watch
from postroom.worker.alert_webhook import Webhook

ALERT = Alert("key_held", "raised", "it is held", 3, "2026-01-01T00:00:00+00:00", "mail-1")
QUICK: dict[str, Any] = {"timeout_seconds": 0.5, "pauses_seconds": (0.01, 0.01)}


class Hook:
    """A web server that takes what is posted, and answers what it is told."""

    def __init__(self) -> None:
        self.posted: list[tuple[str, dict[str, str], Any]] = []
        self.answers: list[int] = []
        self.silent = threading.Event()
        hook = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                headers = {name.lower(): value for name, value in self.headers.items()}
                hook.posted.append((self.path, headers, json.loads(body)))
                code = hook.answers.pop(0) if hook.answers else 204
                if code == 0:
                    hook.silent.wait(10)
                    return
                self.send_response(code)
                self.send_header("location", "http://127.0.0.1:9/elsewhere")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def place(self) -> str:
        return f"127.0.0.1:{self.server.server_address[1]}"


@pytest.fixture
def hook() -> Iterator[Hook]:
    hook = Hook()
    yield hook
    hook.silent.set()
    hook.server.shutdown()
    hook.server.server_close()


def test_an_alert_is_posted_as_a_document(hook: Hook) -> None:
    Webhook(f"http://me:s%40cret@{hook.place}/hook/T0?x=1", **QUICK)(ALERT)
    ((path, headers, body),) = hook.posted
    assert path == "/hook/T0?x=1"
    assert headers["content-type"] == "application/json"
    assert headers["authorization"] == "Basic bWU6c0BjcmV0"
    assert body == ALERT.document()


@pytest.mark.parametrize(
    ("answers", "tries", "fails"),
    [
        ([500, 503, 200], 3, None),
        ([429, 200], 2, None),
        ([500, 500, 500], 3, "answered 500"),
        ([404], 1, "answered 404"),
        ([302], 1, "answered 302"),
        ([0, 0, 0], 3, "cannot be reached: TimeoutError"),
    ],
)
def test_it_tries_again_where_that_may_help(
    hook: Hook, answers: list[int], tries: int, fails: str | None
) -> None:
    hook.answers = list(answers)
    webhook = Webhook(f"http://{hook.place}/canary-path", **QUICK)
    if fails is None:
        webhook(ALERT)
    else:
        with pytest.raises(Unreachable, match=fails) as raised:
            webhook(ALERT)
        assert "canary" not in str(raised.value)
    assert len(hook.posted) == tries


def test_nobody_there_is_one_sentence_without_the_address() -> None:
    with pytest.raises(Unreachable) as raised:
        Webhook("http://127.0.0.1:9/canary-path", **QUICK)(ALERT)
    assert str(raised.value) == "webhook at 127.0.0.1 cannot be reached: ConnectionRefusedError"


@pytest.mark.parametrize("url", ["ftp://x/y", "https://", "hooks.example", "http://x:port/y"])
def test_what_is_no_webhook_is_refused(url: str) -> None:
    with pytest.raises(ConfigurationError):
        Webhook(url)


def test_settings_come_from_the_file_and_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert load(environ={}).alerts == AlertSettings()
    Path("postroom.toml").write_text(
        '[alerts]\nstale_seconds = 60\nwebhook_url = "https://hooks.example/canary"\n'
    )
    environ = {"POSTROOM_ALERTS_REPEAT_SECONDS": "30", "POSTROOM_ALERTS_STALE_SECONDS": "90"}
    found = load(environ=environ)
    assert (found.alerts.stale_seconds, found.alerts.repeat_seconds) == (90, 30)
    assert found.alerts.webhook_url == "https://hooks.example/canary"
    assert "canary" not in repr(found)
    for wrong in (
        {"POSTROOM_ALERTS_STALE": "1"},
        {"POSTROOM_ALERTS_STALE_SECONDS": "soon"},
        {"POSTROOM_ALERTS_WEBHOOK_URL": "hooks.example"},
        {"POSTROOM_ALERTS_REPEAT_SECONDS": "0"},
    ):
        with pytest.raises(ConfigurationError):
            load(environ=wrong)


async def test_a_relay_tells_of_a_dead_letter_and_of_its_end(
    database_url: str, hook: Hook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "MEASURE_SECONDS", 0.2)
    await migrate.install(database_url)
    name = uuid.uuid4().hex
    broker = memory.broker(name)
    broker.fail(lambda m: m.key == "dead", Permanent("no", "never"), times=1)
    told: list[Alert] = []
    relay = Relay(
        database_url,
        f"memory://{name}",
        retry=RetryPolicy((0.05,), attempts=3),
        alerts=[told.append, Webhook(f"http://{hook.place}/hook", **QUICK)],
        alert_settings=AlertSettings(stale_seconds=0.5),
    )
    from sqlalchemy.ext.asyncio import create_async_engine

    from postroom.databases.urls import resolve

    target = resolve(database_url)
    engine = create_async_engine(target.url, connect_args=target.connect_args)
    async with engine.begin() as connection:
        draft = Draft(payload=1, type="note", key="dead")
        behind = Draft(payload=2, type="note", key="dead")
        dead, _ = await Outbox().publish_many_async(connection, [draft, behind])
    await engine.dispose()

    def names(state: str) -> set[str]:
        return {alert.alert for alert in told if alert.state == state}

    async with relay:
        # What waits behind the dead letter grows old, and that is told as well.
        wanted = {"attempts_spent", "key_held", "stale_backlog"}
        await eventually_async(lambda: names("raised") == wanted, 20)
        assert names("resolved") == set()
        await discard(database_url, dead.id, why="a test")
        await eventually_async(lambda: names("resolved") == wanted, 20)
    assert len(told) == 6
    assert sorted(body["alert"] for _, _, body in hook.posted) == sorted(a.alert for a in told)
    memory._brokers.pop(name, None)


def test_the_command_posts_to_the_webhook_and_keeps_its_address(
    here: Here, tmp_path: Path, hook: Hook, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"sqlite:///{tmp_path}/app.db"
    asyncio.run(migrate.install(url))
    import sqlite3

    with closing(sqlite3.connect(tmp_path / "app.db")) as connection:
        Outbox().publish(connection, "poison", type="note")
        connection.commit()
    monkeypatch.setenv("POSTROOM_ALERTS_WEBHOOK_URL", f"http://{hook.place}/canary-path")
    hook.answers = [404]
    lost: list[dict[str, Any]] = []
    stop = signals.listen(lambda name, f: lost.append(f) if name == "alert.lost" else None)
    done = here(
        *("relay", "--once", "--database", url, "--broker", "call:receivers:refuse_poison"),
        *("--log-format", "json"),
    )
    stop()
    assert done.returncode == 0, done.stderr
    assert [body["alert"] for _, _, body in hook.posted] == ["attempts_spent"]
    assert [(each["receiver"], each["count"]) for each in lost] == [("webhook at 127.0.0.1", 1)]
    assert "canary" not in done.stderr + done.stdout + repr(lost)
