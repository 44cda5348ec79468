"""What a history of rewards says: means with intervals, differences, series, and where it fell."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

from storage.experience.reward_history import (
    BEFORE,
    LEVELS,
    NOTHING,
    OTHERS,
    Measure,
    Moments,
    RewardHistory,
)

NORMAL = 1.959964
"""The 97.5 % quantile of the standard normal distribution."""
FEWEST = 30
"""The fewest values of each version for which a difference is shown."""
SURE, SCANNED = 3.0, 4.0
"""Standard errors from which a difference needs attention: between two versions, which are compared
at each look; between two periods, which are the most different of many."""
MOST_GROUPS, FEWEST_GROUPS, PER_GROUP = 120, 12, 100
"""Points of a chart at most and at least, and values per point if there are enough points."""
MOST_LINES = 7
THIN = 0.05
"""Share of a line's largest n below which a point is not shown."""

Json: TypeAlias = dict[str, Any]
Series: TypeAlias = Mapping[int, Mapping[int, Moments]]
"""Group -> version -> moments."""


class Apart(NamedTuple):
    """Of two means: with its 95 % interval, and as a number of standard errors."""

    value: float
    low: float
    high: float
    errors: float

    def __str__(self) -> str:
        return f"{self.value:+.3g} [{self.low:+.3g}, {self.high:+.3g}]"


def difference(mine: Moments, other: Moments) -> Apart | None:
    """The difference of two means; None with fewer than `FEWEST` values of one."""
    if min(mine.n, other.n) < FEWEST:
        return None
    value = mine.mean - other.mean
    error = math.sqrt(mine.variance / mine.n + other.variance / other.n)
    radius = NORMAL * error
    errors = value / error if error else math.copysign(math.inf, value) if value else 0.0
    return Apart(value, value - radius, value + radius, errors)


def interval(found: Moments) -> Json:
    """n, mean, low and high; None for what is unknown."""
    if not found.n:
        return {"n": 0, "mean": None, "low": None, "high": None}
    known = found.n > 1
    radius = NORMAL * math.sqrt(found.variance / found.n) if known else 0.0
    low, high = (found.mean - radius, found.mean + radius) if known else (None, None)
    return {"n": found.n, "mean": found.mean, "low": low, "high": high}


def measure_of(history: RewardHistory) -> Measure:
    """Rewards if each episode has one step, otherwise returns, once there are any."""
    steps = sum(one.rewards.n for one in history.totals.values())
    episodes = sum(one.returns.n for one in history.totals.values())
    return "returns" if episodes and steps > 1.01 * episodes else "rewards"


UNITS: Mapping[Measure, tuple[str, str]] = {
    "rewards": ("reward per decision", "decision"),
    "returns": ("return per episode", "episode"),
}
"""Measure -> its name, and what its n counts."""


def since(history: RewardHistory, version: int) -> int | None:
    """The second from which a version's steps are known."""
    for (seconds, _), level in zip(LEVELS, history.levels, strict=True):
        acted = [slot for slot, cells in level.items() if version in cells]
        if acted and min(acted) > min(level):  # or its first slot may have been dropped
            return max(history.begin or 0, min(acted) * seconds)
    return history.begin if version in history.totals else None


def level_of(history: RewardHistory, version: int | None) -> int:
    """The level to be shown: all of three days, or else a version and as long before it."""
    began = None if version is None else since(history, version)
    for at, (seconds, _) in enumerate(LEVELS):
        level = history.levels[at]
        if history.is_whole(at):
            return at
        first, last = min(level) * seconds, max(level) * seconds
        if at and began is not None and began - first >= last - began:
            return at
    return len(LEVELS) - 1


def fell(history: RewardHistory, measure: Measure, version: int, at: int) -> Json | None:
    """Where a version's mean changed most, if it did: `since`, `earlier`, `later`, `difference`."""
    level = history.levels[at]
    own = [
        (slot, cells[version].of(measure))
        for slot, cells in sorted(level.items())
        if version in cells
    ]
    total, earlier = NOTHING, NOTHING
    for _, one in own:
        total = total.plus(one)
    worst: Json | None = None
    for slot, one in own:
        later = total.plus(Moments(-earlier.n, -earlier.sum, -earlier.squares))
        found = difference(later, earlier)
        if found is not None and (
            worst is None or abs(found.errors) > abs(worst["difference"].errors)
        ):
            seconds = slot * LEVELS[at][0]
            worst = {"since": seconds, "earlier": earlier, "later": later, "difference": found}
        earlier = earlier.plus(one)
    if worst is None or abs(worst["difference"].errors) < SCANNED:
        return None
    return worst


# --- series for charts --------------------------------------------------------------------------


def chart(history: RewardHistory, measure: Measure, at: int, canary: int | None) -> Json:
    """The series of a level, as the document has them: lines, bands, and small series."""
    level, width = history.levels[at], LEVELS[at][0]
    if not level:
        return {"seconds": width, "begin": 0, "end": 0, "lines": [], "bands": [], "small": []}
    count = max(level) - min(level) + 1
    values = sum(cell.of(measure).n for cells in level.values() for cell in cells.values())
    groups = min(MOST_GROUPS, max(FEWEST_GROUPS, values // PER_GROUP))
    each = math.ceil(count / groups)
    shown = _shown(level, canary)

    def grouped(which: Measure) -> dict[int, dict[int, Moments]]:
        found: dict[int, dict[int, Moments]] = {}
        for slot, cells in sorted(level.items()):
            group = found.setdefault(slot // each, {})
            for version, cell in cells.items():
                name = version if version in shown else OTHERS
                if (one := cell.of(which)).n:
                    group[name] = group.get(name, NOTHING).plus(one)
        return found

    series, seconds = grouped(measure), each * width
    lines = [
        {"version": version, "points": _points(series, version, seconds)}
        for version in sorted({one for cells in series.values() for one in cells})
    ]
    return {
        "seconds": seconds,
        "begin": min(series) * seconds,
        "end": (max(series) + 1) * seconds,
        "lines": lines,
        "bands": _bands(series, seconds, canary),
        "small": _small(grouped("rewards"), grouped("returns"), grouped("propensities"), seconds),
    }


def _points(series: Series, version: int, seconds: int) -> list[list[Any]]:
    """[second, n, mean, low, high] of a line, without times in which it hardly acted."""
    found = {group: cells[version] for group, cells in series.items() if version in cells}
    most = max(one.n for one in found.values())
    return [
        [group * seconds, *interval(one).values()]
        for group, one in found.items()
        if one.n > THIN * most
    ]


def _small(steps: Series, episodes: Series, chances: Series, seconds: int) -> list[Json]:
    """What surrounds the reward: decisions a minute, steps an episode, the mean propensity."""

    def summed(group: Mapping[int, Moments]) -> Moments:
        total = NOTHING
        for one in group.values():
            total = total.plus(one)
        return total

    rates = [(at, summed(group).n * 60 / seconds) for at, group in steps.items()]
    rates = rates[:-1] or rates  # the last one may go on
    lengths = [(at, summed(steps[at]).n / n) for at in episodes if (n := summed(episodes[at]).n)]
    means = [(at, mean.mean) for at, group in chances.items() if (mean := summed(group)).n]
    found = (
        ("decisions", "a minute", rates),
        ("steps", "an episode", lengths if any(value > 1.01 for _, value in lengths) else []),
        ("mean propensity", "", means),
    )
    return [
        {"name": name, "unit": unit, "points": [[at * seconds, value] for at, value in points]}
        for name, unit, points in found
        if points
    ]


def _shown(level: Mapping[int, Mapping[int, Any]], canary: int | None) -> set[int]:
    """The versions with a line of their own: the latest ones."""
    known = sorted({one for cells in level.values() for one in cells if one >= 0})
    return {BEFORE, *known[-MOST_LINES:], *([] if canary is None else [canary])}


def _bands(series: Series, seconds: int, canary: int | None) -> list[Json]:
    """The times during which one version acted most, apart from a canary."""
    bands: list[Json] = []
    for group, cells in series.items():
        acting = {version: one.n for version, one in cells.items() if version != canary}
        if not acting:
            continue
        version = max(acting, key=lambda one: acting[one])
        if bands and bands[-1]["version"] == version:
            bands[-1]["end"] = (group + 1) * seconds
        else:
            if bands:
                bands[-1]["end"] = group * seconds
            bands.append(
                {"version": version, "begin": group * seconds, "end": (group + 1) * seconds}
            )
    return bands
