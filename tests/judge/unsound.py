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
    rng: Rng,
    taken: IntArray,
    rewards: FloatArray,
    policy: FloatArray = CANDIDATE,
    **more: Any,
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
    candidate = TargetPolicy(np.log(policy[taken]), np.broadcast_to(policy, (n, 4)))
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


def lying(name: str, share: FloatArray, *, each: int = 1) -> Case:
    """The first action is taken with another probability than the .25 that is logged.

    `share` (n,) has that probability. The candidate takes the first action with .25, so that the
    mean of its weights is 1, and mostly the second. That one earns as much as it takes for both
    policies to earn the same.
    """
    n = share.size
    policy, mean = np.array([0.25, 0.73, 0.01, 0.01]), float(share.mean())
    second = 0.9 * (mean - policy[0]) / (policy[1] - (1 - mean) / 3)
    means = np.array([0.9, second, 0.0, 0.0])

    def make(rng: Rng) -> tuple[Judged, TargetPolicy, Bar]:
        taken = np.where(rng.random(n) < share, 0, rng.integers(1, 4, size=n))
        rewards = (rng.random(n) < means[taken]).astype(np.float64)
        units = np.arange(n) // each if each > 1 else None
        apps = ["old" if i % 5 == 0 else "new" for i in range(n)]
        return judged(rng, taken, rewards, policy, units=units, tags={"app": apps})

    return Case(
        name=f"propensity .25 written, {name}, {n:,}",
        n=n,
        difference=0.0,
        make=make,
        reward_range=UNIT,
        exact=False,
        cause="propensities",
    )


def repeated(
    name: str, n: int, times: int, *, few: bool = False, share: float = 1.0, **more: Any
) -> Case:
    """A `share` of n episodes is in the log `times` times. With `few`, observations are of ten."""

    def make(rng: Rng) -> tuple[Judged, TargetPolicy, Bar]:
        counts = np.where(rng.random(n) < share, times, 1)
        rows = rng.permutation(np.repeat(np.arange(n), counts))
        flat = rng.integers(10, size=(n, 1)) if few else rng.normal(size=(n, 1))
        taken = rng.integers(4, size=n)
        return judged(rng, taken[rows], _coins(rng, n)[rows], flat=flat[rows].astype(np.float64))

    return Case(
        name=f"{name}, {n:,}",
        n=n * times,
        difference=0.0,
        make=make,
        reward_range=UNIT,
        **more,
    )


def falling(n: int, *, at: float | None = None) -> Case:
    """The first action earns .8 and falls to .35: evenly, or `at` this share of the log.

    All others earn .5. So the candidate was better, and is worse where the log ends.
    """

    def make(rng: Rng) -> tuple[Judged, TargetPolicy, Bar]:
        taken, when = rng.integers(4, size=n), np.arange(n) / n
        earned = 0.8 - 0.45 * (when if at is None else when >= at)
        means = np.where(taken == 0, earned, 0.5)
        return judged(rng, taken, (rng.random(n) < means).astype(np.float64))

    how = "evenly" if at is None else f"after {at:.0%}"
    return Case(
        name=f"an action falls from .8 to .35 {how}, {n:,}",
        n=n,
        difference=0.72 * (0.35 - 0.5),
        make=make,
        reward_range=UNIT,
        exact=False,
    )


def same_draw(n: int, each: int) -> Case:
    """A sound log: each user has one action, drawn once, in `each` episodes; users are units."""

    def make(rng: Rng) -> tuple[Judged, TargetPolicy, Bar]:
        taken = np.repeat(rng.integers(4, size=n // each), each)
        flat = np.repeat(rng.normal(size=(n // each, 1)), each, axis=0)
        units = np.arange(n) // each
        return judged(rng, taken, _coins(rng, n), flat=flat, units=units)

    return Case(
        name=f"one draw for each of {n // each:,} users equal, {n:,}",
        n=n,
        difference=0.0,
        make=make,
        reward_range=UNIT,
        sound=True,
    )


def _coins(rng: Rng, n: int) -> FloatArray:
    return (rng.random(n) < 0.5).astype(np.float64)


def unsound() -> Iterator[Case]:
    """All of them."""
    affected: tuple[Lost, ...] = ("one action", "one group", "all alike")
    for whose in affected:
        for n, share in ((4000, 0.015), (4000, 0.05), (20_000, 0.0075), (100_000, 0.005)):
            yield lost(n, share, whose)
    number = np.arange(20_000)
    yield lying("taken in 70 %", np.full(4000, 0.7))
    yield lying("taken in 70 %, users of 5", np.full(4000, 0.7), each=5)
    yield lying("taken in 30 %", np.full(20_000, 0.3))
    yield lying("taken in 45 % of a tenth", np.where(number >= 18_000, 0.45, 0.25))
    yield lying("taken in 40 % with a tag", np.where(number % 5, 0.25, 0.4))
    yield same_draw(40_000, 20)
    for times in (5, 20):
        known: dict[str, Any] = {"exact": False, "cause": "repeats"}
        yield repeated(f"each episode {times} times", 1000, times, **known)
        yield repeated(f"each of 10 contexts' {times} times", 1000, times, few=True, **known)
    yield repeated("a third three times", 5000, 3, share=1 / 3, exact=False, cause="repeats")
    yield repeated("10 contexts equal", 10_000, 1, few=True, sound=True)
    for n in (10_000, 20_000):
        yield falling(n)
        yield falling(n, at=0.7)
