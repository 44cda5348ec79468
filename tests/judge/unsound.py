"""Logs that are not what they claim to be: cases of `make judge`.

Each has a candidate that is as good as its bar, and a fault that makes it look better or worse.
"Better" and "worse" may each come in at most 2.5 % of the logs. A case with a `cause` is refused by
that check.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from policy.ope.judgement import Bar, Judged, TargetPolicy
from tests.judge.cases import CANDIDATE, UNIT, Case

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
Rng = np.random.Generator
Lost = Literal["one action", "one group", "all alike"]


def judged(
    rng: Rng, taken: IntArray, rewards: FloatArray, **more: Any
) -> tuple[Judged, TargetPolicy, Bar]:
    """A log of one step of four actions with propensity .25, the candidate, and the bar."""
    n = taken.size
    given: dict[str, Any] = {
        "rewards": rewards,
        "lengths": np.ones(n, np.int64),
        "behaviour_logp": np.full(n, np.log(0.25)),
        "flat": rng.normal(size=(n, 1)),
        "taken": taken,
        **more,
    }
    candidate = TargetPolicy(np.log(CANDIDATE[taken]), np.broadcast_to(CANDIDATE, (n, 4)))
    return Judged(**given), candidate, Bar("log")


def lost(n: int, share: float, whose: Lost) -> Case:
    """Three of four episodes earn 1; failures of one action, of a group or of all are lost."""

    def make(rng: Rng) -> tuple[Judged, TargetPolicy, Bar]:
        taken, group = rng.integers(4, size=n), rng.random(n) < 0.25
        fails = rng.random(n) < 0.25
        affected = {"one action": taken == 0, "one group": group, "all alike": taken >= 0}[whose]
        rate = share / (0.25 * (1.0 if whose == "all alike" else 0.25))
        gone = affected & fails & (rng.random(n) < rate)
        flat = np.stack([rng.normal(size=n), group], axis=1)
        return judged(rng, taken, 1.0 - fails, flat=flat, lost=gone)

    return Case(
        name=f"lost {share:.2%}, failures of {whose}, {n:,}",
        n=n,
        difference=0.0,
        make=make,
        reward_range=UNIT,
        exact=False,
        cause="lost_by_action" if whose == "one action" else "",
    )


def unsound() -> Iterator[Case]:
    """All of them."""
    affected: tuple[Lost, ...] = ("one action", "one group", "all alike")
    for whose in affected:
        for n, share in ((4000, 0.015), (4000, 0.05), (20_000, 0.0075), (100_000, 0.005)):
            yield lost(n, share, whose)
