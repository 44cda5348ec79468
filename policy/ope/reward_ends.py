"""The least and the most reward of a log, held against the declared range of a step's reward.

The range is a promise about every step, so a reward outside it disproves the promise, whether or
not its episode is judged. A range much wider than the rewards is no error, but costs power: each
number of a bound counts as if the next one could be at its limit.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from policy.ope.diagnostics import Diagnostic, at_most, rewards_in_range

Range = tuple[float, float]
MANY_TIMES = 10.0
"""A range this many times as wide as the rewards is named."""


class RewardEnds:
    """The rewards of all steps that were added: the least, the most, and those outside a range."""

    def __init__(self, limits: Range | None = None) -> None:
        self.limits = limits
        self.least, self.most, self.outside = math.inf, -math.inf, 0

    def add(self, rewards: npt.NDArray[np.float64]) -> None:
        self.least = float(rewards.min(initial=self.least))
        self.most = float(rewards.max(initial=self.most))
        if self.limits is not None:
            low, high = self.limits
            self.outside += int(((rewards < low) | (rewards > high)).sum())

    def times(self) -> float:
        """How many times as wide as the rewards the range is; 1 without one, or a single reward."""
        if self.limits is None or not self.least < self.most:
            return 1.0
        return (self.limits[1] - self.limits[0]) / (self.most - self.least)

    def checks(self) -> list[Diagnostic]:
        """Whether the range holds and, as a note, whether it is many times too wide."""
        if self.limits is None:
            return []
        found = [rewards_in_range(self.outside, (self.least, self.most), self.limits)]
        times = self.times()
        if times >= MANY_TIMES and not self.outside:
            found.append(at_most("wide_range", times, None, self.sentence(), "chosen here: 10"))
        return found

    def sentence(self) -> str:
        low, high = self.limits or (-math.inf, math.inf)
        return (
            f"the declared range, {low:g} to {high:g}, is {self.times():,.0f} times as wide as the "
            f"rewards of the log, {self.least:g} to {self.most:g}"
        )
