"""`same_transaction` with FastAPI over HTTP: record, change, message and answer are one commit."""

import json
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any

import httpx
import pytest
from fastapi import BackgroundTasks, Depends, FastAPI, HTTPException, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel
from serving import CLIENT, SYNC_DRIVERS, serve_asgi, with_driver
from sqlalchemy import create_engine, event, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from postroom import Outbox
from postroom.errors import WouldCommitAlone, WrongCall
from postroom.idempotency import Answer, Keys, Name, Policy
from postroom.idempotency.exchange import Asked
from postroom.idempotency.fastapi import keyed_session, keyed_turn, protect
from postroom.idempotency.turn import Answered, Turn
from stages import Stage, Stages

SAME = Policy(mode="same_transaction")
POLICIES = {
    "POST /orders": Policy(mode="same_transaction", required=True),
    "POST /orders/{id}/pay": SAME,
    "POST /in-threads": SAME,
    "POST /conflict": Policy(mode="same_transaction", mismatch_status=409),
    "POST /impatient": Policy(mode="same_transaction", wait_seconds=0.2),
    "POST /by-body": Policy(mode="same_transaction", body_field="idempotency_key", required=True),
    "POST /commits": SAME,
    "POST /forgets-rollback": SAME,
    "POST /answers/{status}": SAME,
    "POST /stream": SAME,
    "POST /large": Policy(mode="same_transaction", most_stored_bytes=1000),
    "POST /background": SAME,
    "POST /no-session": SAME,
}


class NewOrder(BaseModel):
    name: str
    note: str = ""


@dataclass
class Shop:
    address: str
    runs: Counter[str]
    background: list[str]
    gate: threading.Event
    sync_gate: threading.Event = field(default_factory=threading.Event)

    def post(self, path: str, key: str | None, body: Any = None, **headers: str) -> httpx.Response:
        named = {} if key is None else {"Idempotency-Key": key}
        return CLIENT.post(
            f"{self.address}{path}", json=body, headers={**named, **headers}, timeout=120
        )


def user_of(scope: Any) -> str:
    headers = dict(scope["headers"])
    return headers.get(b"x-user", b"ada").decode()


@contextmanager
def open_shop(stage: Stage) -> Iterator[Shop]:
    url = with_driver(stage.url)
    engine = create_async_engine(url, pool_size=10, max_overflow=0, pool_timeout=120)
    threads = create_engine(with_driver(stage.url, SYNC_DRIVERS), pool_timeout=120)
    if stage.database == "sqlite":
        for each in (engine.sync_engine, threads):
            event.listen(each, "connect", lambda c, _: c.execute("PRAGMA busy_timeout = 60000"))
    keys = Keys(stage.url, scope=user_of, policies=POLICIES)
    app, outbox = FastAPI(), Outbox()
    protect(app, keys)
    shop = Shop("", Counter(), [], threading.Event())
    shop.gate.set()
    Ours = Annotated[AsyncSession, Depends(keyed_session(engine))]
    Theirs = Annotated[Session, Depends(keyed_session(threads))]

    async def write(session: AsyncSession, name: str) -> None:
        shop.runs[name] += 1
        await session.execute(text("INSERT INTO thing VALUES (:name)"), {"name": name})

    @app.post("/orders", status_code=201)
    async def place(order: NewOrder, session: Ours, response: Response) -> dict[str, Any]:
        await write(session, order.name)
        published = outbox.publish(session, {"name": order.name}, type="placed", topic="orders")
        response.headers["Location"] = f"/orders/{order.name}"
        response.headers["Set-Cookie"] = "session=secret"
        return {"name": order.name, "message": published.id}

    @app.post("/orders/{id}/pay")
    async def pay(id: str, session: Ours, request: Request) -> dict[str, str]:
        await write(session, f"pay {id}")
        return {"charge": keyed_turn(request).key_for("charge")}

    @app.post("/in-threads")
    def in_threads(order: NewOrder, session: Theirs) -> dict[str, str]:
        shop.runs[order.name] += 1
        session.execute(text("INSERT INTO thing VALUES (:name)"), {"name": order.name})
        return {"name": order.name}

    @app.post("/conflict")
    @app.post("/impatient")
    async def slow(order: NewOrder, session: Ours) -> dict[str, str]:
        await write(session, order.name)
        import asyncio

        await asyncio.to_thread(shop.gate.wait, 120)
        return {"name": order.name}

    @app.post("/by-body")
    async def by_body(body: dict[str, Any], session: Ours) -> dict[str, Any]:
        await write(session, body["name"])
        return body

    @app.post("/commits")
    async def commits(order: NewOrder, session: Ours) -> dict[str, str]:
        await write(session, order.name)
        await session.commit()
        if order.note == "fail":
            raise HTTPException(500)
        return {"name": order.name}

    @app.post("/forgets-rollback")
    async def forgets(order: NewOrder, session: Ours) -> dict[str, str]:
        await write(session, "lost")
        await session.rollback()
        if order.note == "again":
            await write(session, order.name)
            await session.commit()
        return {"name": order.name}

    @app.post("/answers/{status}")
    async def answers(status: int, order: NewOrder, session: Ours) -> dict[str, str]:
        await write(session, order.name)
        if status == 418:
            raise IntegrityError("x", {}, Exception("broken"))
        raise HTTPException(status, detail=f"try {shop.runs[order.name]}")

    @app.post("/stream")
    async def stream(order: NewOrder, session: Ours) -> StreamingResponse:
        await write(session, order.name)

        async def parts() -> Any:
            for n in range(3):
                yield f"part {n}\n".encode()

        return StreamingResponse(parts(), media_type="text/plain", headers={"Location": "/s"})

    @app.post("/large")
    async def large(order: NewOrder, session: Ours) -> Response:
        await write(session, order.name)
        return Response(b"x" * 5000)

    @app.post("/background")
    async def background(order: NewOrder, session: Ours, tasks: BackgroundTasks) -> str:
        await write(session, order.name)
        tasks.add_task(lambda: shop.background.append(",".join(stage.things())))
        return order.name

    @app.post("/no-session")
    async def no_session(order: NewOrder) -> str:
        shop.runs[order.name] += 1
        return order.name

    with serve_asgi(app) as shop.address:
        yield shop
    keys.close()
    engine.sync_engine.dispose(close=False)
    threads.dispose()


@pytest.fixture
def shop(stage: Stage) -> Iterator[Shop]:
    with open_shop(stage) as shop:
        yield shop


def records(stage: Stage) -> list[tuple[Any, ...]]:
    key = "`key`" if stage.database == "mariadb" else "key"
    return stage.query(f"SELECT {key}, status, epoch FROM {{p}}idempotency_key ORDER BY {key}")


def kind(answer: httpx.Response) -> str:
    assert answer.headers["content-type"] == "application/problem+json"
    document = answer.json()
    assert document["status"] == answer.status_code
    return str(document["type"]).removeprefix("urn:postroom:problem:")


def test_the_same_request_again_gets_the_same_answer(shop: Shop, stage: Stage) -> None:
    first = shop.post("/orders", "k-1", {"name": "a", "note": "x"})
    assert first.status_code == 201
    assert "idempotent-replayed" not in first.headers
    again = shop.post("/orders", '"k-1"', {"note": "x", "name": "a"})
    assert (again.status_code, again.content) == (201, first.content)
    assert again.headers["idempotent-replayed"] == "true"
    assert again.headers["location"] == "/orders/a"
    assert again.headers["content-type"] == first.headers["content-type"]
    assert "set-cookie" in first.headers
    assert "set-cookie" not in again.headers
    assert (shop.runs["a"], stage.things()) == (1, ["a"])
    assert [m["id"] for m in stage.messages()] == [first.json()["message"]]
    assert records(stage) == [("k-1", "completed", 1)]


def test_another_request_with_the_key_is_refused(shop: Shop, stage: Stage) -> None:
    shop.post("/orders", "k", {"name": "a"})
    other = shop.post("/orders", "k", {"name": "b"})
    assert (other.status_code, kind(other)) == (422, "key-reused")
    shop.post("/conflict", "k", {"name": "c"})
    other = shop.post("/conflict", "k", {"name": "d"})
    assert (other.status_code, kind(other)) == (409, "key-reused")
    assert stage.things() == ["a", "c"]


def test_the_path_belongs_to_the_request(shop: Shop, stage: Stage) -> None:
    assert shop.post("/orders/1/pay", "k").status_code == 200
    assert kind(shop.post("/orders/2/pay", "k")) == "key-reused"
    assert stage.things() == ["pay 1"]


def test_a_key_for_a_call_is_the_same_at_every_attempt(shop: Shop) -> None:
    answer = shop.post("/orders/1/pay", "k")
    assert answer.json() == {"charge": "ada:POST%20/orders/{id}/pay:k:charge"}


def test_missing_and_impossible_keys(shop: Shop, stage: Stage) -> None:
    assert kind(shop.post("/orders", None, {"name": "a"})) == "key-missing"
    for key in ("x" * 256, '"x', ""):
        answer = shop.post("/orders", key, {"name": "a"})
        assert (answer.status_code, kind(answer)) == (400, "key-invalid")
    assert stage.things() == []
    assert shop.post("/orders/1/pay", None).status_code == 500, "there is no key to derive from"
    assert shop.post("/in-threads", None, {"name": "b"}).status_code == 200
    assert shop.post("/in-threads", None, {"name": "b"}).status_code == 200
    assert stage.things() == ["b", "b"]


def test_a_key_in_the_body(shop: Shop, stage: Stage) -> None:
    body = {"idempotency_key": "k", "name": "a"}
    first, again = shop.post("/by-body", None, body), shop.post("/by-body", "k", body)
    assert first.content == again.content
    assert kind(shop.post("/by-body", "j", body)) == "key-invalid"
    assert kind(shop.post("/by-body", None, {"name": "a"})) == "key-missing"
    assert kind(shop.post("/by-body", None, {"name": "a", "idempotency_key": 5})) == "key-invalid"
    assert stage.things() == ["a"]


def test_one_user_never_sees_another_s_answer(shop: Shop, stage: Stage) -> None:
    ada = shop.post("/orders", "k", {"name": "a"}, **{"X-User": "ada"})
    eve = shop.post("/orders", "k", {"name": "a"}, **{"X-User": "eve"})
    assert ada.json()["message"] != eve.json()["message"]
    assert "idempotent-replayed" not in eve.headers
    assert kind(shop.post("/orders", "k", {"name": "b"}, **{"X-User": "eve"})) == "key-reused"
    assert stage.things() == ["a", "a"]


def test_a_sync_route_in_a_thread(shop: Shop, stage: Stage) -> None:
    answers = [shop.post("/in-threads", "k", {"name": "a"}) for _ in range(3)]
    assert {answer.content for answer in answers} == {b'{"name":"a"}'}
    assert stage.things() == ["a"]


def test_refusals_that_last_are_kept_and_undo_the_work(shop: Shop, stage: Stage) -> None:
    first, again = (shop.post("/answers/404", "k", {"name": "a"}) for _ in range(2))
    assert first.json() == again.json() == {"detail": "try 1"}
    assert (first.status_code, again.status_code) == (404, 404)
    assert again.headers["idempotent-replayed"] == "true"
    assert stage.things() == []


@pytest.mark.parametrize("status", [409, 429, 500, 503, 418])
def test_refusals_that_pass_leave_nothing(shop: Shop, stage: Stage, status: int) -> None:
    for n in (1, 2):
        answer = shop.post(f"/answers/{status}", "k", {"name": "a"})
        assert answer.status_code == (500 if status == 418 else status)
        assert shop.runs["a"] == n
    assert (stage.things(), records(stage)) == ([], [])


def test_validation_comes_first_and_claims_nothing(shop: Shop, stage: Stage) -> None:
    assert shop.post("/orders", "k", {"nome": "a"}).status_code == 422
    assert records(stage) == []


def test_a_commit_in_the_route_does_not_end_the_transaction(shop: Shop, stage: Stage) -> None:
    assert shop.post("/commits", "k", {"name": "a", "note": "fail"}).status_code == 500
    assert (stage.things(), records(stage)) == ([], [])
    assert shop.post("/commits", "k", {"name": "a"}).status_code == 200
    assert stage.things() == ["a"]


@pytest.mark.parametrize("note", ["", "again"])
def test_a_rollback_in_the_route_is_no_success(shop: Shop, stage: Stage, note: str) -> None:
    assert shop.post("/forgets-rollback", "k", {"name": "a", "note": note}).status_code == 500
    assert (stage.things(), records(stage)) == ([], [])


@pytest.mark.parametrize(("path", "why"), [("/stream", "streamed"), ("/large", "too large")])
def test_a_tombstone_stands_for_what_is_not_kept(
    shop: Shop, stage: Stage, path: str, why: str
) -> None:
    first = shop.post(path, "k", {"name": "a"})
    assert first.content == (b"part 0\npart 1\npart 2\n" if path == "/stream" else b"x" * 5000)
    again = shop.post(path, "k", {"name": "a"})
    assert (again.status_code, kind(again)) == (409, "response-not-kept")
    assert why in again.json()["detail"]
    assert again.json()["original_status"] == 200
    assert again.headers["idempotent-replayed"] == "true"
    assert again.headers.get("location") == ("/s" if path == "/stream" else None)
    assert stage.things() == ["a"]


def test_background_work_begins_after_the_commit(shop: Shop) -> None:
    shop.post("/background", "k", {"name": "a"})
    shop.post("/background", "k", {"name": "a"})
    from helpers import eventually

    eventually(lambda: shop.background == ["a"], 60)


# SQLite waits for its file.
@pytest.mark.parametrize("stage", ["postgresql", "mariadb"], indirect=True)
def test_who_waits_too_long_is_told_so(shop: Shop, stage: Stage) -> None:
    shop.gate.clear()
    with ThreadPoolExecutor(1) as thread:
        first = thread.submit(shop.post, "/impatient", "k", {"name": "a"})
        from helpers import eventually

        eventually(lambda: shop.runs["a"] == 1, 60)
        second = shop.post("/impatient", "k", {"name": "a"})
        assert (second.status_code, kind(second)) == (409, "key-in-progress")
        assert int(second.headers["retry-after"]) >= 1
        shop.gate.set()
        assert first.result().status_code == 200
    assert shop.post("/impatient", "k", {"name": "a"}).content == first.result().content
    assert stage.things() == ["a"]


def test_a_hundred_at_once(shop: Shop, stage: Stage) -> None:
    """One is carried out, and all get its bytes."""
    with ThreadPoolExecutor(100) as threads:
        answers = list(threads.map(lambda _: shop.post("/orders", "k", {"name": "a"}), range(100)))
    assert Counter(answer.status_code for answer in answers) == {201: 100}
    assert len({answer.content for answer in answers}) == 1
    assert sum("idempotent-replayed" in answer.headers for answer in answers) == 99
    assert stage.things() == ["a"]
    assert len(stage.messages()) == 1


def test_a_route_that_goes_its_own_way_is_named(
    shop: Shop, caplog: pytest.LogCaptureFixture
) -> None:
    # A router's redirect has carried nothing out.
    assert shop.post("/no-session/", "k", {"name": "a"}).status_code == 307
    assert "key.unprotected" not in caplog.text
    assert shop.post("/no-session", "k", {"name": "a"}).status_code == 200
    assert "key.unprotected" in caplog.text


async def test_a_commit_that_is_refused_leaves_no_transaction_open(stages: Stages) -> None:
    """SQLAlchemy takes it for ended, so nobody else would end it."""
    stage = stages["sqlite"]
    engine = create_async_engine(with_driver(stage.url))
    turn = Turn(Asked(Name("ada", "POST /orders", "k"), "f" * 64, SAME))
    session = await turn.session_async(engine)
    await session.execute(text("INSERT INTO thing VALUES ('lost')"))
    await session.rollback()
    await session.execute(text("INSERT INTO thing VALUES ('a')"))
    with pytest.raises(WrongCall):
        await session.commit()
    stage.query("INSERT INTO thing VALUES ('b')")  # nobody has the file
    await turn.end_async()
    await engine.dispose()
    assert stage.things() == ["b"]


async def test_a_refusal_is_kept_though_a_message_was_queued(stage: Stage) -> None:
    """The session is the turn's alone: nobody else drops what the route published."""
    engine = create_async_engine(with_driver(stage.url))
    refusal = Answer(404, (("content-type", "text/plain"),), b"gone")
    turn = Turn(Asked(Name("ada", "POST /orders", "k"), "f" * 64, SAME))
    session = await turn.session_async(engine)
    await session.execute(text("INSERT INTO thing VALUES ('a')"))
    Outbox().publish(session, {"a": 1}, type="thing.v1", topic="things")
    assert await turn.settle_async(refusal) is None
    again = Turn(Asked(Name("ada", "POST /orders", "k"), "f" * 64, SAME))
    with pytest.raises(Answered) as told:
        await again.session_async(engine)
    await again.end_async()
    await engine.dispose()
    assert (told.value.answer.status, told.value.answer.body) == (404, b"gone")
    assert (stage.things(), stage.messages()) == ([], [])


async def test_an_engine_that_commits_by_itself_is_refused(stage: Stage) -> None:
    engine = create_async_engine(with_driver(stage.url), isolation_level="AUTOCOMMIT")
    asked = Asked(Name("ada", "POST /orders", "k"), "f" * 64, SAME)
    turn = Turn(asked)
    with pytest.raises(WouldCommitAlone, match="record of this request"):
        await turn.session_async(engine)
    await turn.end_async()
    await engine.dispose()
    assert records(stage) == []


def test_a_wait_that_was_cut_short_does_not_outlast_its_request(stages: Stages) -> None:
    """What was set for the session of MariaDB's is set back, also after it was too long."""
    stage = stages["mariadb"]
    url = with_driver(stage.url, SYNC_DRIVERS)
    engines = [create_engine(url, pool_size=1, max_overflow=0) for _ in range(2)]
    policy = Policy(mode="same_transaction", wait_seconds=1)
    first, second = (Turn(Asked(Name("ada", "x", "k"), "f" * 64, policy)) for _ in range(2))
    first.session(engines[0])
    with pytest.raises(Answered) as told:
        second.session(engines[1])
    assert told.value.answer.status == 409
    second.end()
    first.end()
    for engine in engines:
        with engine.connect() as connection:
            ((seconds,),) = connection.execute(text("SELECT @@session.innodb_lock_wait_timeout"))
        assert seconds > 1
        engine.dispose()


def test_the_openapi_shows_header_and_problems(shop: Shop) -> None:
    document = CLIENT.get(f"{shop.address}/openapi.json").json()
    place = document["paths"]["/orders"]["post"]
    [header] = [each for each in place["parameters"] if each["in"] == "header"]
    assert (header["name"], header["required"]) == ("Idempotency-Key", True)
    shown = json.dumps(place["responses"])
    for name in ("key-missing", "key-reused", "key-in-progress", "keys-unreachable"):
        assert f"urn:postroom:problem:{name}" in shown
    both = place["responses"]["422"]["content"]
    assert set(both) == {"application/json", "application/problem+json"}
