"""The pictures of the page on performance, drawn as SVG from the figures of a run."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from math import log10
from pathlib import Path

from bench.figures import Figures

__all__ = ["draw"]

INK, FAINT, GRID = "#1f2933", "#5b6875", "#e3e8ee"
OURS, THEIRS, UNORDERED = "#0b7285", "#8899a6", "#c3ccd5"
WIDTH = 760
FONT = "font-family='-apple-system,Segoe UI,Helvetica,Arial,sans-serif'"


def draw(found: dict[str, Figures], folder: Path) -> list[Path]:
    """Draw what was measured; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    panels = [
        (title, found[name].numbers["rates"])
        for name, title in (
            ("drain", "to a receiver that says yes at once"),
            ("nats", "to NATS JetStream"),
            ("hot-key", "to NATS JetStream, half of all messages on one key"),
        )
        if name in found
    ]
    if panels:
        path = folder / "throughput.svg"
        path.write_text(_bars("Messages a second", panels))
        written.append(path)
    if "backlog" in found:
        path = folder / "backlog.svg"
        path.write_text(_line(found["backlog"].numbers["millis_by_backlog"]))
        written.append(path)
    return written


def _bars(title: str, panels: list[tuple[str, dict[str, float]]]) -> str:
    """One panel below the other, each with its own scale, the fastest on top."""
    parts: list[str] = []
    y = 64
    for name, rates in panels:
        parts.append(_text(24, y, name, size=14, weight=600))
        y += 16
        most = max(rates.values())
        for system, rate in sorted(rates.items(), key=lambda pair: -pair[1]):
            length = max(2.0, 340 * rate / most)
            colour = OURS if system.startswith("postroom") else THEIRS
            if "no order" in system:
                colour = UNORDERED
            parts.append(_text(282, y + 13, _short(system), anchor="end"))
            parts.append(
                f"<rect x='292' y='{y}' width='{length:.1f}' height='18' rx='3' fill='{colour}'/>"
            )
            parts.append(_text(300 + length, y + 13, f"{rate:,.0f}", colour=INK))
            y += 25
        y += 28
    legend = [(OURS, "Postroom"), (THEIRS, "strict order, or a limit"), (UNORDERED, "no order")]
    x = 380
    for colour, name in legend:
        parts.append(f"<rect x='{x}' y='22' width='12' height='12' rx='2' fill='{colour}'/>")
        parts.append(_text(x + 17, 32, name, colour=FAINT, size=12))
        x += 40 + 7 * len(name)
    return _svg(title, y - 10, parts)


def _line(times: dict[int, float]) -> str:
    """Time for a batch against the backlog, on a logarithmic axis of messages."""
    left, right, top, bottom = 70, WIDTH - 50, 70, 270
    sizes = sorted(times)
    low, high = log10(sizes[0]), log10(sizes[-1])
    most = max(times.values()) * 1.6
    parts: list[str] = []

    def place(size: int) -> tuple[float, float]:
        share = (log10(size) - low) / (high - low)
        return left + share * (right - left), bottom - times[size] / most * (bottom - top)

    for step in range(5):
        y = bottom - (bottom - top) * step / 4
        parts.append(f"<line x1='{left}' x2='{right}' y1='{y}' y2='{y}' stroke='{GRID}'/>")
        parts.append(_text(left - 10, y + 4, f"{most * step / 4:.1f}", anchor="end", colour=FAINT))
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(place, sizes))
    parts.append(f"<polyline points='{points}' fill='none' stroke='{OURS}' stroke-width='2.5'/>")
    for size in sizes:
        x, y = place(size)
        parts.append(f"<circle cx='{x:.1f}' cy='{y:.1f}' r='4.5' fill='{OURS}'/>")
        parts.append(_text(x, y - 12, f"{times[size]:.2f}", anchor="middle"))
        parts.append(_text(x, bottom + 22, f"{size:,}", anchor="middle", colour=FAINT))
    parts.append(_text((left + right) / 2, bottom + 46, "messages pending", anchor="middle"))
    return _svg("Milliseconds to read 1,000 messages", bottom + 66, parts)


def _short(system: str) -> str:
    return system.partition(" (")[0]


def _text(
    x: float,
    y: float,
    words: str,
    *,
    anchor: str = "start",
    colour: str = INK,
    size: int = 13,
    weight: int = 400,
) -> str:
    return (
        f"<text x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}' fill='{colour}' "
        f"font-size='{size}' font-weight='{weight}'>{escape(words)}</text>"
    )


def _svg(title: str, height: float, parts: Iterable[str]) -> str:
    head = f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {height:.0f}' {FONT}>"
    ground = f"<rect width='{WIDTH}' height='{height:.0f}' rx='8' fill='#ffffff'/>"
    lines = [head, f"<title>{escape(title)}</title>", ground]
    lines += [_text(24, 34, title, size=17, weight=700), *parts, "</svg>"]
    return "\n".join(lines) + "\n"
