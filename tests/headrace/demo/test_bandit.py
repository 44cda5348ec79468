"""`headrace demo`, the real log: the comparison of the two logs' intervals."""

from __future__ import annotations

from typing import Any

from headrace.demo.bandit import overlapping


def estimates(**intervals: list[float | None]) -> list[dict[str, Any]]:
    return [{"name": name, "interval": interval} for name, interval in intervals.items()]


def test_overlap_is_judged_by_estimator() -> None:
    """The intervals must overlap; None means unbounded; dm is excluded."""
    first = estimates(ips=[0.0, 1.0], dr=[0.0, 1.0], snips=[None, 0.1], dm=[0.0, 0.1])
    second = estimates(ips=[1.0, 2.0], dr=[1.1, 2.0], snips=[0.0, None], dm=[5.0, 6.0])
    assert overlapping(first, second) == {"ips": True, "dr": False, "snips": True}
    assert overlapping(second, first) == {"ips": True, "dr": False, "snips": True}
