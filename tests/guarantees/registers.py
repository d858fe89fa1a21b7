"""What clerks were asked, through which door, and what came of it, seen from outside."""

import json
import os
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from worlds import World

EACH = 2 if os.environ.get("POSTROOM_SWEEP") == "full" else 1
# How a request is carried out at each door. Flask has a decorator (`same`) and a middleware, which
# gives a session too (`keyed`); Django has no async transactions; whoever calls a function may
# commit though it failed (`caught`). What is `refused` was done before, and is undone.
MODES = {
    "asgi": ("same", "refused", "external", "resume"),
    "wsgi": ("same", "refused", "external", "resume"),
    "flask": ("same", "refused", "keyed", "external", "resume"),
    "django": ("same", "refused", "external", "resume"),
    "django_async": ("external", "resume"),
    "function": ("same", "caught", "external", "resume"),
    "function_async": ("same", "caught", "external", "resume"),
}
IN_ONE = ("same", "keyed", "caught")
ROUNDS = 3  # in which a successor asks for everything again


def requests(door: str) -> list[tuple[str, str]]:
    """The mode and the key of each."""
    return [(mode, f"{mode}-{n}") for n in range(EACH) for mode in MODES[door]]


class Register:
    """One door, the clerks behind it, and the files they write."""

    def __init__(self, world: "World", door: str) -> None:
        self.world = world
        self.door = door
        self.effects = world.folder / f"effects-{world._runs}"
        self.answers = world.folder / f"answers-{world._runs}"

    def start(self, failpoints: str = "", log: Any = None, rounds: int = 1) -> Any:
        environment = {"POSTROOM_FAILPOINTS": failpoints} if failpoints else {}
        if log is not None:
            environment["POSTROOM_FAILPOINTS_LOG"] = str(log)
        files = {"effects": str(self.effects), "answers": str(self.answers)}
        return self.world._start("clerk", environment, door=self.door, **files, rounds=rounds)

    def judge(self) -> None:
        """Each request carried out once, and answered alike whenever it was: every attempt has a
        number of its own, so that the answer of another would be noticed."""
        asked = requests(self.door)
        tables = self.world.tables
        column = "`key`" if tables.kind == "mariadb" else "key"
        numbers = {str(id): n for id, n in tables.query("SELECT id, n FROM business")}
        done = [key for mode, key in asked if mode not in ("external", "refused")]
        _alike("changes", numbers, done)
        messages = tables.query(f"SELECT {column}, payload FROM {{p}}outbox")
        said = [(key, json.loads(bytes(payload))["n"]) for key, payload in messages]
        _alike("messages", said, numbers.items())
        numbers |= self._judge_effects() | self._refusals()
        query = f"SELECT {column}, status, response_body FROM {{p}}idempotency_key"
        stored = [(key, status, _number(body)) for key, status, body in tables.query(query)]
        _alike("answers kept", stored, [(key, "completed", numbers[key]) for _, key in asked])
        _alike("answers given", self._told(), numbers.items())

    def _refusals(self) -> dict[str, int]:
        """The numbers of those that were refused. A refusal that could not be kept is given all the
        same, so the first may have been another; the last ones are alike."""
        numbers: dict[str, int] = {}
        for mode, key in requests(self.door):
            if mode == "refused":
                lines = [body for k, status, body in self._lines() if (k, status) == (key, 410)]
                (numbers[key],) = {_number(body) for body in lines[-ROUNDS:]}
        return numbers

    def _lines(self) -> list[tuple[str, int, str]]:
        return [json.loads(line) for line in self.answers.read_text().splitlines()]

    def _told(self) -> set[tuple[str, Any]]:
        """What clients were answered; a refusal is none, as they ask again."""
        told = set()
        for key, status, body in self._lines():
            assert status in (200, 409, 410, 500, 503), (key, status, body)
            if status == 200:
                told.add((key, _number(body)))
        return told | set(self._refusals().items())

    def _judge_effects(self) -> dict[str, int]:
        """The numbers of those that were carried out elsewhere."""
        lines = [json.loads(line) for line in self.effects.read_text().splitlines()]
        times = Counter(key for key, _, _ in lines)
        for mode, key in requests(self.door):
            # A call may be made twice in `resume`, under one key that its receiver knows.
            most = {"external": 1, "resume": 2}.get(mode, 0)
            assert min(most, 1) <= times[key] <= most, f"{key} was done {times[key]} times"
        assert len({(key, card) for key, card, _ in lines}) == len(times), lines
        return {key: n for key, _, n in lines if key.startswith("external")}


def _number(answer: Any) -> Any:
    """The number in an answer; None: it has none."""
    return None if answer is None else json.loads(answer)["n"]


def _alike(what: str, found: Iterable[Any], wanted: Iterable[Any]) -> None:
    have, want = Counter(list(found)), Counter(list(wanted))
    assert have == want, f"{what}: {list(have - want)}, not {list(want - have)}"
