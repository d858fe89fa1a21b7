"""Life behind a pooler: clients that keep its servers moving, and a look at what they leave."""

import random
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import psycopg

LEAKED = (
    "SET default_transaction_isolation = 'serializable'",
    "SET enable_indexscan = off",
    "SET synchronous_commit = on",
    "SET statement_timeout = '30s'",
)


def connect(url: str, *, autocommit: bool = False) -> psycopg.Connection[Any]:
    """As an application connects through a pooler: nothing prepared."""
    return psycopg.connect(url, autocommit=autocommit, prepare_threshold=None)


@contextmanager
def stirred(
    url: str, *, clients: int = 4, pause_seconds: float = 0.004, leak: bool = False
) -> Iterator[None]:
    """Other clients, whose transactions change which server is next.

    `leak`: they also leave settings behind, as careless applications do.
    """
    over = threading.Event()

    def stir(seed: int) -> None:
        dice = random.Random(seed)
        with connect(url, autocommit=True) as client:
            if leak:
                for setting in LEAKED:
                    client.execute(setting)
            while not over.is_set():
                with client.transaction():
                    client.execute("SELECT pg_backend_pid()")
                    over.wait(dice.random() * pause_seconds)
                over.wait(dice.random() * pause_seconds)

    threads = [threading.Thread(target=stir, args=(n,)) for n in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


def servers(url: str, *, most: int = 8) -> dict[int, dict[str, Any]]:
    """What is set and prepared on the servers of a pool, by process."""
    found: dict[int, dict[str, Any]] = {}
    with ExitStack() as stack:
        for _ in range(most):  # each holds its server, so the next one gets another
            client = stack.enter_context(connect(url))
            row = client.execute(
                "SELECT pg_backend_pid(), current_setting('enable_seqscan'),"
                " current_setting('jit'), current_setting('idle_in_transaction_session_timeout'),"
                " (SELECT count(*) FROM pg_prepared_statements),"
                " (SELECT count(*) FROM pg_listening_channels())"
            ).fetchone()
            assert row is not None
            names = ("seqscan", "jit", "idle", "prepared", "listening")
            found[row[0]] = dict(zip(names, row[1:], strict=True))
    return found


UNTOUCHED = {"seqscan": "on", "jit": "on", "idle": "0", "prepared": 0, "listening": 0}
