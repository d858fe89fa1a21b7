"""A process that uses its keys, and then forks: `forking.py URL`. Prints what its children saw."""

import json
import os
import sys
import time
from typing import Any

from postroom.errors import PostroomError
from postroom.idempotency import SHARED, Keys, Policy, idempotent

CALLS = 60
USERS = ("ada", "eve")
SHORT = Policy(lease_seconds=1, wait_seconds=0)

keys = Keys(sys.argv[1], scope=SHARED)


@idempotent("echo", key="key", scope="user", keys=keys)
def echo(user: str, key: str) -> dict[str, str]:
    return {"secret of": user}


@idempotent("slow", key="key", keys=keys, policy=SHORT)
def slow(key: str, seconds: float) -> int:
    time.sleep(seconds)
    return 1


def child(work: Any, pipe: int) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            said = work()
        except BaseException as error:
            said = repr(error)
        os.write(pipe, (json.dumps(said) + "\n").encode())
        os._exit(0)
    return pid


def others_secrets(user: str) -> int:
    return sum(echo(user, "k") != {"secret of": user} for _ in range(CALLS))


def main() -> None:
    for user in USERS:
        echo(user, "k")
    slow("warm", 0)  # there is a thread for leases now
    reading, writing = os.pipe()
    pids = [child(lambda user=user: others_secrets(user), writing) for user in USERS]
    pids.append(child(lambda: slow("long", 3), writing))
    time.sleep(2)
    try:
        kept: object = slow("long", 3)
    except PostroomError as error:
        kept = type(error).__name__
    for user in USERS:
        echo(user, "k")  # what the parent has is still of use
    for pid in pids:
        os.waitpid(pid, 0)
    os.close(writing)
    with os.fdopen(reading) as said:
        print(json.dumps({"children": sorted(map(json.loads, said), key=str), "meanwhile": kept}))


if __name__ == "__main__":
    main()
