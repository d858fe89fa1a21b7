"""A database that takes whatever it is asked and answers nothing."""

import asyncio
import threading
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack
from functools import partial
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from helpers import eventually, eventually_async
from postroom.databases import migrate
from postroom.errors import ConfigurationError
from postroom.idempotency import SHARED, Keys, Name, Policy, afterwards
from postroom.idempotency.asgi import IdempotencyMiddleware as Asgi
from postroom.idempotency.wsgi import IdempotencyMiddleware as Wsgi
from servers import MariaDBServer, PostgresServer
from stages import Stage

CROWD = 20
SERVERS = {"postgres": "postgresql", "mariadb": "mariadb"}
LONGEST_SECONDS = 20  # two tries of a second each, and a busy machine
POLICIES = {
    "POST /refused": Policy(),
    "POST /run": Policy(on_unreachable="run"),
    "POST /late": Policy(),
}
Post = Callable[[str, str], Awaitable[httpx.Response]]


class Shop:
    """Carries requests out, and those to /late when the database has gone silent."""

    def __init__(self) -> None:
        self.begun = threading.Semaphore(0)
        self.silent = threading.Event()
        self.done: Counter[str] = Counter()

    def work(self, path: str, key: str) -> None:
        if path == "/late":
            self.begun.release()
            assert self.silent.wait(60)
        self.done[key] += 1

    async def asgi(self, request: Request) -> PlainTextResponse:
        key = request.headers["idempotency-key"]
        await asyncio.to_thread(self.work, request.url.path, key)
        return PlainTextResponse("done")

    def wsgi(self, environ: Any, start: Any) -> Any:
        self.work(environ["PATH_INFO"], environ["HTTP_IDEMPOTENCY_KEY"])
        start("200 OK", [("Content-Length", "4")])
        return [b"done"]


def by_asgi(shop: Shop, keys: Keys) -> Post:
    routes = [Route(path.removeprefix("POST "), shop.asgi, methods=["POST"]) for path in POLICIES]
    transport = httpx.ASGITransport(Asgi(Starlette(routes=routes), keys))

    async def post(path: str, key: str) -> httpx.Response:
        async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
            return await client.post(path, headers={"Idempotency-Key": key})

    return post


def by_wsgi(shop: Shop, keys: Keys) -> Post:
    client = httpx.Client(transport=httpx.WSGITransport(Wsgi(shop.wsgi, keys)), base_url="http://s")

    async def post(path: str, key: str) -> httpx.Response:
        headers = {"Idempotency-Key": key}
        return await asyncio.to_thread(partial(client.post, path, headers=headers))

    return post


async def answered(post: Post, path: str, key: str) -> bool:
    return (await post(path, key)).status_code == 200


@pytest.mark.parametrize(
    ("server", "scheme", "door"),
    [
        ("postgres", "postgresql+asyncpg", by_asgi),
        ("postgres", "postgresql+psycopg", by_asgi),
        ("postgres", "postgresql", by_wsgi),
        ("mariadb", "mysql+asyncmy", by_asgi),
        ("mariadb", "mysql+aiomysql", by_asgi),
        ("mariadb", "mysql", by_wsgi),
    ],
)
async def test_nobody_waits_for_ever(
    server: str, scheme: str, door: Any, request: pytest.FixtureRequest
) -> None:
    place: PostgresServer | MariaDBServer = request.getfixturevalue(server)
    place.require_private()
    url = place.create_database(f"silent_{uuid.uuid4().hex[:8]}")
    await migrate.install(url)
    url = scheme + "://" + url.partition("://")[2]
    keys, shop = Keys(url, scope=SHARED, policies=POLICIES, timeout_seconds=1), Shop()
    post: Post = door(shop, keys)
    warm = [post("/refused", f"warm {number}") for number in range(3)]
    assert {answer.status_code for answer in await asyncio.gather(*warm)} == {200}
    late = asyncio.ensure_future(post("/late", "late"))
    await asyncio.to_thread(shop.begun.acquire)
    with place.paused():
        began = time.monotonic()
        shop.silent.set()
        async with asyncio.timeout(LONGEST_SECONDS * 2):
            answers = await asyncio.gather(post("/refused", "new"), post("/run", "run"), late)
        assert time.monotonic() - began < LONGEST_SECONDS
    assert [answer.status_code for answer in answers] == [503, 200, 200]
    assert int(answers[0].headers["retry-after"]) > 0
    assert shop.done == {"run": 1, "late": 1} | {f"warm {number}": 1 for number in range(3)}
    assert (await post("/refused", "next")).status_code == 200
    # What the database still made of the claim that was given up is undone.
    await eventually_async(partial(answered, post, "/refused", "new"), 30)
    assert (await post("/refused", "new")).headers["idempotent-replayed"] == "true"
    assert shop.done["new"] == 1
    # Its answer may have been written down after all; whatever it is told, it is not done again.
    assert (await post("/late", "late")).status_code in (200, 409)
    assert shop.done["late"] == 1
    await keys.close_async()


def workers() -> int:
    """The threads and tasks of ours that look for claims that were given up."""
    tasks = [getattr(task.get_coro(), "__qualname__", "") for task in asyncio.all_tasks()]
    names = [thread.name for thread in threading.enumerate()]
    return names.count("postroom-afterwards") + tasks.count("Afterwards._run_async")


async def connect(keys: Keys, door: Any) -> None:
    """Have as many connections as there will be requests."""
    if door is by_asgi:
        async with AsyncExitStack() as opened:
            for _ in range(CROWD):
                engine = keys.engines.engine_async(alone=True)
                await opened.enter_async_context(engine.connect())
        return
    with ExitStack() as held:
        for _ in range(CROWD):
            held.enter_context(keys.engines.engine(alone=True).connect())


@pytest.mark.parametrize(
    ("server", "scheme", "door"),
    [
        ("postgres", "postgresql+psycopg", by_asgi),  # asyncpg would ask for a plan, and no more
        ("postgres", "postgresql", by_wsgi),
        ("mariadb", "mysql+asyncmy", by_asgi),
        ("mariadb", "mysql", by_wsgi),
    ],
)
async def test_one_looks_for_all_that_was_given_up(
    server: str, scheme: str, door: Any, request: pytest.FixtureRequest
) -> None:
    place: PostgresServer | MariaDBServer = request.getfixturevalue(server)
    place.require_private()
    stage = Stage(SERVERS[server], place.create_database(f"silent_{uuid.uuid4().hex[:8]}"))
    await migrate.install(stage.url)
    url = scheme + "://" + stage.url.partition("://")[2]
    keys, shop = Keys(url, scope=SHARED, connections=CROWD, timeout_seconds=1), Shop()
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2 * CROWD))
    post: Post = door(shop, keys)
    await connect(keys, door)
    names = [f"k{number}" for number in range(CROWD)]
    with place.paused():
        answers = await asyncio.gather(*(post("/refused", name) for name in names))
        assert {answer.status_code for answer in answers} == {503}
        assert workers() == 1
    await eventually_async(lambda: not workers(), 60)
    # They were made after all, and undone.
    left = stage.query("SELECT status, count(*) FROM {p}idempotency_key GROUP BY status")
    assert left == [("failed", CROWD)]
    assert [await answered(post, "/refused", name) for name in names] == [True] * CROWD
    assert shop.done == dict.fromkeys(names, 1)
    stage.connection.close()
    await keys.close_async()


def test_of_too_many_the_oldest_is_dropped(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(afterwards, "MOST_CLAIMS", 2)
    keys = Keys("postgresql://127.0.0.1:1/nobody", scope=SHARED)
    for number in range(3):
        keys.engines.afterwards.in_thread(Name("ada", "POST /orders", f"k{number}"), "owner")
    told = [each.getMessage() for each in caplog.records if "key.unreturned" in each.getMessage()]
    assert told == ['key.unreturned operation="POST /orders" idempotency_key=k0']
    keys.close()
    eventually(lambda: "postroom-afterwards" not in [t.name for t in threading.enumerate()])


@pytest.mark.parametrize("seconds", [0, -1, float("nan")])
def test_a_limit_that_nothing_keeps_is_refused(seconds: float) -> None:
    with pytest.raises(ConfigurationError, match="timeout_seconds of Keys must be above zero"):
        Keys("sqlite:///shop.db", scope=SHARED, timeout_seconds=seconds)
