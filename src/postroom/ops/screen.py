"""What people see of `look`: tables and colours, on a page or on a live screen.

Nothing here asks anything: a state goes in, something to print comes out. Text of others (names,
errors) is always `Text`, so that it is never read as markup, and `shown`, so that a terminal does
nothing it says.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from postroom.ops.cli_common import shown

__all__ = ["age", "page", "screen", "span", "sparkline"]

SILENT_SECONDS = 15.0  # a worker beats every second
LATE_SECONDS, OLD_SECONDS = 10.0, 60.0
BARS = "▁▂▃▄▅▆▇█"
FIXED_LINES = 14  # of the live screen: all but the lines of workers and of destinations
DESTINATION_LINES = 6
NOTE_LINES = 4

State = Mapping[str, Any]


def age(seconds: float | None, nothing: str = "none") -> str:
    """A time span for people: `4.2 s`, `12 m`, `3 h`, `5 d`."""
    if seconds is None:
        return nothing
    for unit, size in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.1f} s"


def span(numbers: Iterable[int]) -> str:
    """Numbers as people write them: `0-3, 7`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def sparkline(samples: Sequence[float]) -> str:
    """A line of bars, the highest sample being the full height."""
    top = max(samples, default=0) or 1
    return "".join(BARS[min(len(BARS) - 1, int(value / top * len(BARS)))] for value in samples)


def page(state: State) -> RenderableType:
    """`postroom status`: everything, as long as it needs to be."""
    parts: list[RenderableType] = [_counts(state)]
    if state["destinations"]:
        parts += ["", _destinations(state["destinations"], None)]
    if state["consumers"]:
        parts += ["", _consumers(state), *_receiving(state)]
    if state["published"]:
        parts += ["", _workers(state, None), "", _lanes(state)]
    return Group(*parts)


def screen(
    state: State,
    *,
    title: str,
    rates: Mapping[str, float],
    backlog: Sequence[float],
    height: int | None,
    error: str | None = None,
) -> RenderableType:
    """`postroom status --watch`: what matters most, in so many lines."""
    parts: list[RenderableType] = [Text(title, style="bold", no_wrap=True, overflow="ellipsis")]
    parts.append(Text(shown(error), style="bold red") if error else Text(""))
    parts += [_flow(state, rates, backlog), Text("")]
    room = None if height is None else max(2, height - FIXED_LINES)
    if down := state["destinations"]:
        share = 4 if state["consumers"] else 2
        most = None if room is None else min(DESTINATION_LINES, max(1, (room - 3) // share))
        parts += [_destinations(down, most), Text("")]
        if room is not None:
            room = max(2, room - min(len(down), most or len(down)) - 3)
    if count := len(state["consumers"]):
        rows = notes = None
        if room is not None:
            rest = 2 if state["published"] else 0  # lines that workers need
            rows = min(count, max(1, (room - rest - 3) // (2 if rest else 1)))
            notes = min(NOTE_LINES, max(0, room - rest - 3 - rows))
            room = max(2, room - rows - 3 - min(notes, len(_notes(state))))
        parts += [_consumers(state, rows, notes), Text("")]
    if state["published"]:
        parts.append(_workers(state, room))
    return Group(*parts)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", show_header=bool(columns))
    for column in columns:
        table.add_column(column, overflow="ellipsis", no_wrap=True)
    return table


def _counted(state: State, name: str) -> str:
    more = "+" if state[name] >= state["count_limit"] else ""
    return f"{state[name]:,}{more}"


def _aged(seconds: float | None) -> Text:
    waited = seconds or 0
    style = "red" if waited > OLD_SECONDS else "yellow" if waited > LATE_SECONDS else ""
    return Text(age(seconds), style=style)


def _holding(state: State) -> str:
    by_dead = f" ({state['blocked_keys']:,} by a dead letter)" if state["blocked_keys"] else ""
    return f"{_counted(state, 'held_keys')}{by_dead}"


def _counts(state: State) -> RenderableType:
    table = _table()
    table.columns.clear()
    table.add_column(justify="right", min_width=8)
    table.add_column()
    table.add_column()
    for name, what, alarming in (
        ("pending", "to be sent", False),
        ("held", "waiting behind a failure or a dead letter", False),
        ("delayed", "not due yet", False),
        ("dead", "dead letters that need a person", True),
    ):
        style = ("red" if alarming else "yellow") if state[name] and name != "delayed" else ""
        table.add_row(Text(_counted(state, name), style=style), name, what)
    ages = Text.assemble("oldest pending: ", _aged(state["oldest_pending_seconds"]))
    ages.append(", held: ").append_text(_aged(state["oldest_held_seconds"]))
    ages.append(", delayed and overdue: ").append_text(_aged(state["overdue_delayed_seconds"]))
    return Group(table, ages, Text(f"held keys: {_holding(state)}"))


def _flow(state: State, rates: Mapping[str, float], backlog: Sequence[float]) -> RenderableType:
    """Rates on the left, backlog and ages on the right."""
    table = Table.grid(padding=(0, 2))
    for justify in ("left", "right", "left", "right", "left", "left"):
        table.add_column(justify=justify, no_wrap=True)

    def rate(name: str, alarm: str) -> Text:
        value = rates.get(f"{name}_per_second", 0.0)
        return Text(f"{value:,.1f}/s", style=alarm if value else "")

    def many(name: str, alarm: str) -> Text:
        return Text(_counted(state, name), style=alarm if state[name] else "")

    oldest, held, overdue = (
        _aged(state[name])
        for name in ("oldest_pending_seconds", "oldest_held_seconds", "overdue_delayed_seconds")
    )
    table.add_row(
        *("delivered", rate("delivered", "green"), "pending", many("pending", "")),
        *(Text("oldest "), oldest),
    )
    table.add_row(
        *("failed", rate("held", "yellow"), "held", many("held", "yellow")),
        *(Text("oldest "), held),
    )
    table.add_row(
        *("dead", rate("dead", "red"), "delayed", many("delayed", "")),
        *(Text("overdue"), overdue),
    )
    letters = Text(f"{_counted(state, 'dead')}", style="red" if state["dead"] else "")
    table.add_row("", "", "dead letters", letters, Text("held keys"), Text(_holding(state)))
    line = Text.assemble("backlog  ", (sparkline(backlog), "cyan"), "  ", _trend(backlog))
    return Group(table, line)


def _trend(backlog: Sequence[float]) -> str:
    """Where the backlog went in the last ten looks."""
    if len(backlog) < 2:
        return ""
    before, now = backlog[max(0, len(backlog) - 10)], backlog[-1]
    if now > before * 1.02:
        return "growing"
    return "shrinking" if now < before * 0.98 else "steady"


def _destinations(down: Sequence[Mapping[str, Any]], most: int | None) -> RenderableType:
    """On a screen a line each, which may cut the broker's own words; on a page they wrap."""
    lines: list[RenderableType] = [Text("destinations that are down", style="bold")]
    by_name: dict[str, list[Mapping[str, Any]]] = {}
    for each in down:
        by_name.setdefault(str(each.get("name")), []).append(each)
    for name, told in list(by_name.items())[:most]:
        first = min(told, key=lambda each: each.get("retry_in_seconds") or 0)
        line = Text() if most is None else Text(no_wrap=True, overflow="ellipsis")
        line.append(shown(name), style="red")
        line.append(f"  next try {age(first.get('retry_in_seconds'), 'soon')}")
        line.append(shown(f"  {', '.join(str(each['worker']) for each in told)}"))
        line.append("\n  " if most is None else "  ")
        line.append(shown(f"{first.get('error_code')}: {first.get('error')}"))
        lines.append(line)
    return _with_rest(Group(*lines), len(by_name), most)


def _workers(state: State, most: int | None) -> RenderableType:
    """Relays with their lanes; lanes without an owner and paused lanes in lines of their own."""
    table = _table("worker", "seen", "lanes", "lease", "in flight", "delivered")
    lanes: dict[str | None, list[Mapping[str, Any]]] = {}
    for lane in state["lanes"]:
        lanes.setdefault(lane["owner"], []).append(lane)
    relays = [worker for worker in state["workers"] if worker["kind"] == "relay"]
    for place, worker in enumerate(relays):
        own = lanes.pop(worker["incarnation"], [])
        if most is not None and place >= most:
            continue
        report = worker["report"] or {}
        table.add_row(
            Text(shown(worker["name"])),
            _seen(worker["seen_seconds_ago"]),
            Text(span(lane["lane"] for lane in own) or "none"),
            _lease(own),
            Text(f"{report.get('in_flight', 0):,}"),
            Text(f"{report.get('delivered', 0):,}"),
        )
    parts: list[RenderableType] = [_with_rest(table, len(relays), most)]
    if not relays:
        parts = [Text("no worker has said that it lives", style="yellow")]
    nobody = [lane["lane"] for lane in lanes.pop(None, [])]
    gone = [lane["lane"] for own in lanes.values() for lane in own]
    if nobody:
        style = "red" if state["pending"] or state["held"] else "yellow"
        parts.append(Text(f"nobody works lanes {span(nobody)}", style=style))
    if gone:
        parts.append(Text(f"lanes {span(gone)} belong to no registered worker", style="yellow"))
    if paused := [lane["lane"] for lane in state["lanes"] if lane["paused"]]:
        parts.append(Text(f"paused: lanes {span(paused)}", style="yellow"))
    return Group(*parts)


def _seen(seconds: float) -> Text:
    return Text(age(seconds), style="red" if seconds > SILENT_SECONDS else "green")


def _consumers(state: State, most: int | None = None, notes: int | None = None) -> RenderableType:
    """A line for each consumer, and beneath them what is wrong with any."""
    columns = ("consumer", "seen", "received", "handled", "waiting", "held keys", "dead", "lag")
    table = _table(*columns, "sources")
    for column in table.columns[2:8]:
        column.justify = "right"
    # Where it is narrow, names are cut and numbers are not.
    table.columns[0].no_wrap = table.columns[8].no_wrap = False
    for one in state["consumers"][:most]:
        sources = [each["source"] for each in one["sources"]]
        table.add_row(
            Text(shown(one["consumer"])),
            _seen(one["seen_seconds_ago"]),
            _rate(one["received_per_second"]),
            _rate(one["handled_per_second"]),
            _many(one["waiting"], state["count_limit"], "yellow"),
            _many(one["held_keys"], state["count_limit"], "yellow"),
            _many(one["dead"], state["count_limit"], "red"),
            Text("" if one["lag"] is None else f"{one['lag']:,}"),
            Text(shown(sources[0]) if len(sources) == 1 else str(len(sources) or "none")),
        )
    wrong = _notes(state)
    if notes is not None:
        wrong = wrong[:notes]
        for note in wrong:
            note.no_wrap, note.overflow = True, "ellipsis"
    return Group(_with_rest(table, len(state["consumers"]), most), *wrong)


def _notes(state: State) -> list[Text]:
    """What needs a look in consumers, a line each."""
    notes: list[Text] = []
    for one in state["consumers"]:
        name = shown(one["consumer"])
        if not one["alive"]:
            seen = age(one["seen_seconds_ago"])
            notes.append(Text(f"{name} is not alive: last seen {seen} ago", style="red"))
        if one["trouble"]:
            notes.append(Text(f"{name}: {shown(one['trouble'])}", style="red"))
        if one["blocked_keys"]:
            keys = f"{one['blocked_keys']:,} of its held keys"
            notes.append(Text(f"{name}: {keys} wait behind a dead letter", style="yellow"))
    return notes


def _receiving(state: State) -> list[Text]:
    """Which process receives from which sources, where a line of the table cannot hold them."""
    lines = []
    for one in state["consumers"]:
        workers: dict[str, list[str]] = {}
        for each in one["sources"]:
            workers.setdefault(each["worker"], []).append(each["source"])
        if len(one["sources"]) > 1:
            lines += [
                Text(shown(f"{worker} receives from {', '.join(sources)}"))
                for worker, sources in workers.items()
            ]
    return lines


def _rate(value: float) -> Text:
    return Text(f"{value:,.0f}/s" if value >= 100 else f"{value:,.1f}/s")


def _many(number: int, limit: int, alarm: str) -> Text:
    return Text(f"{number:,}{'+' if number >= limit else ''}", style=alarm if number else "")


def _lease(lanes: Sequence[Mapping[str, Any]]) -> Text:
    """The lease that ends first."""
    left = [lane["lease_seconds"] for lane in lanes if lane["lease_seconds"] is not None]
    if not left:
        return Text("")
    return Text(f"{min(left):.0f} s") if min(left) > 0 else Text("over", style="red")


def _with_rest(table: RenderableType, count: int, most: int | None) -> RenderableType:
    if most is None or count <= most:
        return table
    return Group(table, Text(f"… and {count - most} more", style="dim"))


def _lanes(state: State) -> RenderableType:
    """Lanes of one owner share a line."""
    table = _table("lanes", "worked by", "epoch", "lease", "")
    alike: dict[tuple[Any, bool], list[Mapping[str, Any]]] = {}
    for lane in state["lanes"]:
        alike.setdefault((lane["owner"], lane["paused"]), []).append(lane)
    for (owner, paused), lanes in alike.items():
        owner = lanes[0]["owner_name"] or owner
        table.add_row(
            span(lane["lane"] for lane in lanes),
            Text(shown(owner or "nobody"), style="" if owner else "yellow"),
            span({lane["epoch"] for lane in lanes}),
            _lease(lanes),
            Text("paused" if paused else "", style="yellow"),
        )
    return table
