"""Charts as inline SVG: the reward over time with its versions and decisions, and small series.

    reward_chart(document["policies"][0], WIDE)

Colours are CSS variables of the page, so that light and dark are one drawing. A version has the
same colour in every chart.
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeAlias

from ingest.status.answers import moment, named
from storage.experience.reward_history import BEFORE, OTHERS

Json: TypeAlias = dict[str, Any]
Point: TypeAlias = tuple[float, float]

COLOURS = 8
_DAY = 86_400
_STEPS = (
    *(60, 300, 600, 1800, 3600, 7200, 14_400, 21_600, 43_200, _DAY),
    *(one * _DAY for one in (2, 7, 14, 30, 90, 365)),
)
MARKS = {"publish": "▲", "publish --canary": "◆", "promote": "●", "rollback": "◀"}
"""The command of a decision -> its mark in the time line."""


@dataclass(frozen=True)
class Frame:
    """The size of a drawing, its margins, and whether its points tell their numbers."""

    name: str
    width: int
    height: int
    left: int = 46
    right: int = 104
    top: int = 24
    bottom: int = 52
    told: bool = True

    @property
    def floor(self) -> int:
        return self.height - self.bottom

    @property
    def edge(self) -> int:
        return self.width - self.right


WIDE = Frame("wide", 1160, 330)
NARROW = Frame("narrow", 368, 270, left=38, right=62, told=False)


def colour(version: int) -> str:
    """The CSS colour of a version."""
    return {BEFORE: "var(--before)", OTHERS: "var(--others)"}.get(
        version, f"var(--v{version % COLOURS})"
    )


def short(version: int) -> str:
    """A version's label in a chart."""
    return {BEFORE: "rule before", OTHERS: "others"}.get(version, f"v{version}")


def number(value: float) -> str:
    """Three digits, and separators in large numbers."""
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.3g}"


def reward_chart(policy: Json, frame: Frame) -> str:
    """The large chart of a policy of the document; "" without data."""
    chart = policy["chart"]
    if not chart["lines"]:
        return ""
    scale = _Scale.of(chart, policy["versions"], frame)
    inside = "".join(
        (
            *_bands(chart, scale),
            *_grid(scale),
            *_bar(policy["versions"], scale),
            *(part for line in chart["lines"] for part in _line(line, chart["seconds"], scale)),
            *_ends(chart["lines"], scale),
            *_decisions(policy["decisions"], scale),
            *(_told(chart, scale) if frame.told else ()),
        )
    )
    label = f"{policy['name']}: {policy['measure']} over time, by version"
    return _svg(frame, inside, label)


def _svg(frame: Frame, inside: str, label: str) -> str:
    return (
        f'<svg class="{frame.name}" viewBox="0 0 {frame.width} {frame.height}" role="img" '
        f'aria-label="{html.escape(label)}">{inside}</svg>'
    )


@dataclass(frozen=True)
class _Scale:
    """Seconds and rewards to pixels."""

    frame: Frame
    begin: float
    end: float
    low: float
    high: float

    @classmethod
    def of(cls, chart: Json, versions: Json, frame: Frame) -> _Scale:
        """Room for all means and for most intervals."""
        points = [point for line in chart["lines"] for point in line["points"]]
        most = max(one[1] for one in points)
        means = [one[2] for one in points if one[1] >= min(30, most / 5)]
        means += [one["mean"] for one in versions.values() if one["n"]]
        lows = sorted(one[3] for one in points if one[3] is not None)
        highs = sorted(one[4] for one in points if one[4] is not None)
        low = min([*means, *lows[len(lows) // 5 :][:1]])
        high = max([*means, *highs[-1 - len(highs) // 5 :][:1]])
        room = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
        return cls(frame, chart["begin"], chart["end"], low - room, high + room)

    def x(self, seconds: float) -> float:
        share = (seconds - self.begin) / max(1.0, self.end - self.begin)
        inner = self.frame.edge - self.frame.left
        return self.frame.left + min(1.0, max(0.0, share)) * inner

    def y(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        inner = self.frame.floor - self.frame.top
        return self.frame.floor - min(1.0, max(0.0, share)) * inner


def _bands(chart: Json, scale: _Scale) -> Iterator[str]:
    frame = scale.frame
    free = 0.0
    for band in chart["bands"]:
        left, right = scale.x(band["begin"]), scale.x(band["end"])
        fill = colour(band["version"])
        yield (
            f'<g style="fill:{fill}"><rect x="{left:.1f}" y="{frame.top}" '
            f'width="{right - left:.1f}" height="{frame.floor - frame.top}" class="band"/>'
            f'<rect x="{left:.1f}" y="{frame.top - 4}" width="{right - left:.1f}" height="4"/></g>'
        )
        text = short(band["version"])
        if left >= free and right - left > 8 * len(text):
            yield f'<text x="{left + 2:.1f}" y="{frame.top - 8}" class="b">{text}</text>'
            free = left + 8 * len(text) + 6


def _grid(scale: _Scale) -> Iterator[str]:
    frame = scale.frame
    for value in _ticks(scale.low, scale.high, 4):
        y = scale.y(value)
        yield (
            f'<path class="grid" d="M{frame.left} {y:.1f}H{frame.edge}"/>'
            f'<text x="{frame.left - 6}" y="{y + 4:.1f}" class="e">{number(value)}</text>'
        )
    span, places = scale.end - scale.begin, 7 if frame.told else 3
    step = next((one for one in _STEPS if span / one <= places), _STEPS[-1])
    at = scale.begin - scale.begin % step + step
    free = 0.0
    while at <= scale.end:
        x = scale.x(at)
        text = _time(at, step)
        if x >= free and x - 4 * len(text) > frame.left and x + 4 * len(text) < frame.width:
            yield f'<path class="grid" d="M{x:.1f} {frame.floor}v4"/>'
            yield f'<text x="{x:.1f}" y="{frame.floor + 17}" class="m">{text}</text>'
            free = x + 8 * len(text)
        at += step
    yield f'<path class="axis" d="M{frame.left} {frame.floor}H{frame.edge}"/>'


def _ticks(low: float, high: float, most: int) -> list[float]:
    """Round numbers between two others."""
    rough = (high - low) / most
    size = 10.0 ** _floor_log10(rough)
    step = next(size * one for one in (1, 2, 5, 10) if size * one >= rough)
    first = -int(-low // step)
    return [round(n * step, 12) for n in range(first, first + most + 2) if n * step <= high]


def _floor_log10(value: float) -> int:
    return int(f"{value:e}".partition("e")[2])


def _time(seconds: float, step: int) -> str:
    """A time in UTC, as exact as the steps of the axis."""
    at = datetime.fromtimestamp(seconds, UTC)
    if step >= _DAY or at.hour == at.minute == 0:
        return at.strftime("%Y-%m" if step > 30 * _DAY else "%d %b")
    return at.strftime("%H:%M")


def _bar(versions: Json, scale: _Scale) -> Iterator[str]:
    """What the live version has to beat: a dashed line over the whole time."""
    bar = versions.get("previous") or versions.get("before")
    if bar and bar["n"]:
        y, frame, shade = scale.y(bar["mean"]), scale.frame, colour(bar["version"])
        yield (
            f'<path class="bar" style="stroke:{shade}" d="M{frame.left} {y:.1f}H{frame.edge}"/>'
            f'<text x="{frame.left + 4}" y="{y - 5:.1f}" class="b" style="fill:{shade}">'
            f"{named(bar['version'])} {number(bar['mean'])}</text>"
        )


def _runs(points: Sequence[Sequence[float]], seconds: int) -> Iterator[list[Sequence[float]]]:
    """The points without gaps between them."""
    run: list[Sequence[float]] = []
    for point in points:
        if run and point[0] - run[-1][0] > 3 * seconds:
            yield run
            run = []
        run.append(point)
    if run:
        yield run


def _line(line: Json, seconds: int, scale: _Scale) -> Iterator[str]:
    """Means with their intervals: a line with an area, and points where there are few."""
    points = line["points"]
    shade = colour(line["version"])
    yield f'<g style="color:{shade}">'
    for run in _runs(points, seconds):
        places = [(scale.x(one[0] + seconds / 2), scale.y(one[2])) for one in run]
        sure = [one for one in run if one[3] is not None]
        if len(run) > 2:
            if len(sure) > 2:
                above = [(scale.x(one[0] + seconds / 2), scale.y(one[4])) for one in sure]
                below = [(scale.x(one[0] + seconds / 2), scale.y(one[3])) for one in sure]
                yield f'<polygon class="area" points="{_places([*above, *reversed(below)])}"/>'
            yield f'<polyline class="line" points="{_places(places)}"/>'
        else:
            for one in sure:
                x = scale.x(one[0] + seconds / 2)
                yield (
                    f'<path class="err" d="M{x:.1f} {scale.y(one[3]):.1f}V{scale.y(one[4]):.1f}"/>'
                )
        if len(points) <= 40 or len(run) <= 2:
            radius = 4 if len(run) <= 2 else 2.5
            yield "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}"/>' for x, y in places)
    yield "</g>"


def _places(points: Sequence[Point]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def _ends(lines: Sequence[Json], scale: _Scale) -> Iterator[str]:
    """Each line's name and its mean at the right edge, one below the other."""
    drawn = [line for line in lines if line["points"]]
    found = sorted(
        ((scale.y(line["points"][-1][2]), line) for line in drawn), key=lambda one: one[0]
    )
    free = float(scale.frame.top)
    most = scale.frame.floor - 13.0 * (len(found) - 1)
    for y, line in found:
        at = max(free, min(y + 4, most))
        free, most = at + 13, most + 13
        points = line["points"]
        value = number(sum(one[1] * one[2] for one in points) / sum(one[1] for one in points))
        name, shade = short(line["version"]).removeprefix("rule "), colour(line["version"])
        text = f"{name} {value}" if scale.frame.told else name
        yield (
            f'<text x="{scale.frame.edge + 6}" y="{at:.1f}" class="b" '
            f'style="fill:{shade}">{text}</text>'
        )


def _decisions(decisions: Sequence[Json], scale: _Scale) -> Iterator[str]:
    """The time line under the chart: a mark for each decision, named where there is room."""
    frame = scale.frame
    y, free = frame.height - 8, 0.0
    for one in decisions:
        seconds = one["decided"] / 1e6
        if seconds < scale.begin:
            continue
        x, command = scale.x(seconds), one["command"]
        refused = command == "publish" and "not published" in one["outcome"]
        kind = "bad" if command == "rollback" else "dim" if refused else ""
        if not refused:
            yield f'<path class="when {kind}" d="M{x:.1f} {frame.top}V{frame.height - 20}"/>'
        told = f"{moment(seconds)} {command}: {one['outcome']}"
        mark = MARKS.get(command, "■")
        words = f" {command}" if x >= free and not refused and frame.told else ""
        yield (
            f'<text x="{x - 5:.1f}" y="{y}" class="mark {kind}">'
            f"<title>{html.escape(told)}</title>{mark}{words}</text>"
        )
        free = x + (20 + 7 * len(command) if words else 10)


def _told(chart: Json, scale: _Scale) -> Iterator[str]:
    """The numbers of each time, shown where the pointer is."""
    found: dict[float, list[str]] = {}
    for line in chart["lines"]:
        for at, n, mean, low, high in line["points"]:
            about = "" if low is None else f" [{number(low)}, {number(high)}]"
            found.setdefault(at, []).append(
                f"{named(line['version'])}: {number(mean)}{about}, n = {n:,}"
            )
    width = scale.x(scale.begin + chart["seconds"]) - scale.frame.left
    for at, texts in sorted(found.items()):
        text = html.escape("\n".join([moment(at), *texts]))
        yield (
            f'<rect class="hit" x="{scale.x(at):.1f}" y="{scale.frame.top}" '
            f'width="{width:.1f}" height="{scale.frame.floor - scale.frame.top}">'
            f"<title>{text}</title></rect>"
        )


def sparkline(points: Sequence[Sequence[float]], label: str) -> str:
    """A small series without axes; up to two points are points."""
    width, height = 160, 34
    begin, end = points[0][0], points[-1][0]
    values = [point[1] for point in points]
    low, high = min(0.0, *values), max(values) if max(values) > min(0.0, *values) else 1.0
    places = [
        (
            4 + (at - begin) / max(1.0, end - begin) * (width - 8),
            height - 4 - (value - low) / (high - low) * (height - 8),
        )
        for at, value in points
    ]
    drawn = f'<polyline class="line" points="{_places(places)}"/>' if len(places) > 2 else ""
    few = places if len(places) <= 2 else []
    drawn += "".join(f'<path class="dot" d="M{x:.1f} {y:.1f}h0"/>' for x, y in few)
    return (
        f'<svg class="spark" viewBox="0 0 {width} {height}" preserveAspectRatio="none" role="img" '
        f'aria-label="{html.escape(label)}">{drawn}</svg>'
    )
