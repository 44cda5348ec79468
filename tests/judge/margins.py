"""Candidates that differ from their bar by just the margin, and by more; ranges that do not fit.

By a margin of 0.02 or 10 % a candidate has to be better by at least that; by a negative one, not
worse by more. At the margin "better" and "worse" are both wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from policy.ope.judgement import Bar, Judged, TargetPolicy
from policy.ope.margins import Margin
from tests.judge.cases import COST, UNIT, Against, Case, _bernoulli, _failures, _one_step, _steps


def beyond(case: Case, margin: str, amount: float, **more: object) -> Case:
    """A case by a margin, which is `amount` of reward."""
    return replace(
        case,
        name=f"{case.name}, margin {margin}",
        difference=case.difference - amount,
        margin=Margin.parse(margin),
        **more,  # type: ignore[arg-type]  # fields of Case
    )


def at_margin() -> Iterator[Case]:
    """The candidate is better or worse than its bar by just the margin."""
    bars: tuple[Against, Against] = ("log", "rival")
    for bar in bars:
        for sign, word in ((1, "+"), (-1, "-")):
            new = 0.5 + sign * 0.05
            coins = _one_step(f"binary .5 {word}10 %, 3,000", 3000, 0.5, new, _bernoulli, UNIT, bar)
            for margin in (f"{sign * 0.05:g}", f"{sign * 10}%"):
                sound = bar == "log"
                yield beyond(coins, margin, sign * 0.05, sound=sound, normal=sound)
        name = "failures .03 a tenth less, 10,000"
        fails = _one_step(name, 10_000, -0.03, -0.027, _failures, COST, bar)
        yield beyond(fails, "10%", 0.003)
    for sign, word in ((1, "+"), (-1, "-")):
        steps = _steps(f"10 steps {word}8 %, 1,000", 1000, 10, sign / 6)
        for margin in (f"{sign * 0.4:g}", f"{sign * 8}%"):
            yield beyond(steps, margin, sign * 0.4)


def decided() -> Iterator[Case]:
    """Differences beyond the margin that betting has to detect."""
    n = 10_000
    equal = _one_step(f"binary .5 equal, {n:,}", n, 0.5, 0.5, _bernoulli, UNIT)
    better = _one_step("binary .5 +40 %, 1,000", 1000, 0.5, 0.7, _bernoulli, UNIT)
    for margin in ("-0.05", "-10%"):
        yield beyond(equal, margin, -0.05, verdict="better", least=0.90)
    for margin in ("0.05", "10%"):
        yield beyond(equal, margin, 0.05, verdict="worse", least=0.90)
        yield beyond(better, margin, 0.05, verdict="better", least=0.90)


def ranges() -> Iterator[Case]:
    """Ranges that are wider than the rewards, or exclude some."""
    wide = _one_step("binary .5 +40 %, 1,000", 1000, 0.5, 0.7, _bernoulli, (0.0, 1000.0))
    yield replace(wide, name=f"{wide.name}, range 0..1000", verdict="cannot tell", least=0.95)
    inside = _one_step("binary .5 equal, 1,000", 1000, 0.5, 0.5, _bernoulli, UNIT)

    def make(rng: np.random.Generator) -> tuple[Judged, TargetPolicy, Bar]:
        data, candidate, bar = inside.make(rng)
        data.rewards[rng.integers(inside.n)] = 2.0
        return data, candidate, bar

    yield replace(
        inside, name=f"{inside.name}, one reward of 2", make=make, cause="rewards_outside_range"
    )
