"""What the tests of the command line do over and over: publish, ask, and look at what arrived."""

import asyncio
import json
from typing import Any

import receivers
from commands import Here
from sqlalchemy.ext.asyncio import create_async_engine

from postroom import Draft, Outbox
from postroom.databases import migrate
from postroom.databases.urls import resolve


def publish(url: str, *drafts: Draft) -> list[str]:
    """Install the tables and commit messages; returns their ids."""

    async def work() -> list[str]:
        await migrate.install(url)
        target = resolve(url)
        engine = create_async_engine(target.url, connect_args=target.connect_args)
        async with engine.begin() as connection:
            published = await Outbox().publish_many_async(connection, drafts)
        await engine.dispose()
        return [one.id for one in published]

    return asyncio.run(work())


def draft(payload: str, key: str | None = "k") -> Draft:
    return Draft(payload={"is": payload}, type="note.v1", topic="notes", key=key)


def audited(url: str) -> list[Any]:
    """What the audit table holds."""

    async def work() -> list[Any]:
        target = resolve(url)
        engine = create_async_engine(target.url, connect_args=target.connect_args)
        table = "postroom.audit" if target.dialect == "postgresql" else "postroom_audit"
        async with engine.begin() as connection:
            rows = await connection.exec_driver_sql(f"SELECT who, what, subject, why FROM {table}")
            found = list(rows)
        await engine.dispose()
        return found

    return asyncio.run(work())


def said(here: Here, *arguments: str) -> Any:
    """What the command answers with --json; it must end well."""
    done = here(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout) if done.stdout else None


def arrived() -> list[str]:
    return [json.loads(message.payload)["is"] for message in receivers.received]


def refused(here: Here, code: int, *arguments: str) -> str:
    """What the command says when it refuses: one sentence on stderr, and this exit code."""
    done = here(*arguments)
    assert done.returncode == code, (done.stdout, done.stderr)
    assert done.stderr.count("\n") == 1, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr
