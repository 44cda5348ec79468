"""Returns, rewards and propensities by version, as sums for the metrics.

`VersionMetrics` counts parts on the shard writer's thread, not on the event loop. Sums start at
zero with each start of the collector. The latest `VERSIONS` versions of each policy are kept; a
scrape shows only those with a role, so the number of series does not grow with the versions.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from storage.experience.episode import Part
from storage.experience.part_columns import PartColumns

VERSIONS = 16
"""Versions kept per policy: the live one, the previous one, a canary, and some that act late."""
OPEN = 10_000
"""The maximum number of incomplete episodes whose returns are summed; the oldest are dropped."""

MEASURES = ("episode_return", "step_reward", "action_propensity")


class Moments(msgspec.Struct, frozen=True):
    """The number n of values, their sum, and the sum of their squares."""

    n: int = 0
    sum: float = 0.0
    squares: float = 0.0

    @property
    def mean(self) -> float:
        return self.sum / self.n if self.n else float("nan")

    @property
    def variance(self) -> float:
        """The sample variance (denominator n - 1); nan for fewer than two values."""
        if self.n < 2:
            return float("nan")
        return max(0.0, self.squares - self.sum**2 / self.n) / (self.n - 1)

    def with_all(self, values: npt.NDArray[np.float64]) -> Moments:
        return Moments(
            self.n + values.size,
            self.sum + float(values.sum()),
            self.squares + float(values @ values),
        )


class VersionMetrics:
    """Moments by policy, version and measure. One thread calls `note`; any may call `of`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: dict[str, OrderedDict[int, dict[str, Moments]]] = {}
        self._open: OrderedDict[tuple[str, int, str], tuple[int, float]] = OrderedDict()

    def note(self, stream: str, parts: Sequence[Part | PartColumns]) -> None:
        """Count the steps of parts, and the returns of the episodes that end with them."""
        by_policy: dict[str, list[Part]] = {}
        for part in parts:
            own = by_policy.setdefault(part.policy_id, [])
            if isinstance(part, Part):
                own.append(part)
            elif (np.frombuffer(part.policy_version, np.int64) >= 0).any():
                own += part.parts()
        for policy_id, own in by_policy.items():
            if own:
                self._note(stream, policy_id, own)

    def _note(self, stream: str, policy_id: str, parts: Sequence[Part]) -> None:
        rewards = np.frombuffer(b"".join([part.rewards for part in parts]), np.float64)
        logp = np.frombuffer(b"".join([part.action_logp for part in parts]), np.float64)
        versions = np.frombuffer(b"".join([part.policy_version for part in parts]), np.int64)
        steps = np.array([part.steps for part in parts])
        starts = np.cumsum(steps) - steps
        earned = np.add.reduceat(rewards, starts)
        ended: dict[int, list[float]] = {}
        for part, version, sum_ in zip(
            parts, versions[starts].tolist(), earned.tolist(), strict=True
        ):
            first, total = self._go_on(stream, part, version, sum_)
            if part.ended is not None and first >= 0:
                ended.setdefault(first, []).append(total)
        with self._lock:
            for version in np.unique(versions).tolist():
                if version < 0:
                    continue
                mine = versions == version
                propensities = np.exp(logp[mine & ~np.isnan(logp)])
                self._add(policy_id, version, "step_reward", rewards[mine])
                self._add(policy_id, version, "action_propensity", propensities)
            for version, returns in ended.items():
                self._add(policy_id, version, "episode_return", np.array(returns))

    def _go_on(self, stream: str, part: Part, version: int, earned: float) -> tuple[int, float]:
        """(version of the episode's first step, its return so far); version -1 if it is unknown.

        An episode counts for the version of its first step, as in a canary's arms.
        """
        if part.part == 0 and part.ended is not None:
            return version, earned
        name = stream, part.episode_ordinal, part.agent_id
        known = (version, 0.0) if part.part == 0 else self._open.pop(name, (-1, 0.0))
        total = known[0], known[1] + earned
        if part.ended is None and known[0] >= 0:
            self._open[name] = total
            if len(self._open) > OPEN:
                self._open.popitem(last=False)
        return total

    def _add(
        self, policy_id: str, version: int, measure: str, values: npt.NDArray[np.float64]
    ) -> None:
        known = self._found.setdefault(policy_id, OrderedDict())
        own = known.setdefault(version, {})
        known.move_to_end(version)
        own[measure] = own.get(measure, Moments()).with_all(values)
        if len(known) > VERSIONS:
            known.popitem(last=False)

    def of(self, policy_id: str, version: int | None) -> dict[str, Moments]:
        """measure -> moments of a version; zeros if it has not acted."""
        with self._lock:
            versions = self._found.get(policy_id, OrderedDict())
            known = versions.get(-1 if version is None else version, {})
            return {measure: known.get(measure, Moments()) for measure in MEASURES}
