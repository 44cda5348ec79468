"""Logs whose truth is known, and the permitted verdicts: the table of `make judge`.

One step: four actions, logged uniformly; the candidate takes the first with .97. The bar is the
logging policy ("log") or one that takes the second with .97 ("rival"). Several steps: two actions,
logged uniformly; the candidate takes the first with .62, or .97. n counts judged episodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from policy.ope.judgement import Bar, Judged, TargetPolicy
from policy.ope.margins import Margin

FloatArray = npt.NDArray[np.float64]
Against = Literal["log", "rival"]
Draw = Callable[[np.random.Generator, FloatArray], FloatArray]
NO_MARGIN = Margin()

CANDIDATE = np.array([0.97, 0.01, 0.01, 0.01])
RIVAL = np.array([0.01, 0.97, 0.01, 0.01])
UNIFORM = np.full(4, 0.25)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A kind of log, and the required shares of verdicts."""

    name: str
    n: int
    difference: float  # the candidate's value minus the bar's, and minus the margin
    make: Callable[[np.random.Generator], tuple[Judged, TargetPolicy, Bar]]
    reward_range: tuple[float, float] | None
    sound: bool = False  # no check may reject it
    normal: bool = False  # Student's assumptions hold, so its coverage is checked, too
    verdict: str = ""  # the verdict that betting must reach with the share `least`
    least: float = 0.0
    exact: bool = True  # whether an interval with a range has to contain the difference
    cause: str = ""  # the check that has to refuse the log
    margin: Margin = NO_MARGIN


def _one_step(
    name: str,
    n: int,
    base: float,
    candidate: float,
    draw: Draw,
    reward_range: tuple[float, float] | None,
    against: Against = "log",
    **more: object,
) -> Case:
    """The bar's value is `base`, the candidate's `candidate`; all other actions are alike."""
    bar = UNIFORM if against == "log" else RIVAL
    first, others = np.linalg.solve(
        [[CANDIDATE[0], 1 - CANDIDATE[0]], [bar[0], 1 - bar[0]]], [candidate, base]
    )
    means = np.array([first, others, others, others])

    def make(rng: np.random.Generator) -> tuple[Judged, TargetPolicy, Bar]:
        taken = rng.integers(4, size=n)
        data = Judged(
            rewards=draw(rng, means[taken]),
            lengths=np.ones(n, np.int64),
            behaviour_logp=np.full(n, np.log(0.25)),
            flat=rng.normal(size=(n, 1)),
            taken=taken,
        )
        policies = [
            TargetPolicy(np.log(p[taken]), np.broadcast_to(p, (n, 4))) for p in (CANDIDATE, bar)
        ]
        return data, policies[0], Bar(against, None if against == "log" else policies[1])

    return Case(
        name=f"{name}, {against}",
        n=n,
        difference=candidate - base,
        make=make,
        reward_range=reward_range,
        **more,  # type: ignore[arg-type]  # fields of Case
    )


def _steps(
    name: str, n: int, steps: int, effect: float, first: float = 0.62, **more: object
) -> Case:
    """Reward is 1 with .5 + effect after the first action, with .5 - effect after the other."""
    probs = np.array([first, 1 - first])

    def make(rng: np.random.Generator) -> tuple[Judged, TargetPolicy, Bar]:
        taken = rng.integers(2, size=n * steps)
        mean = 0.5 + effect * np.where(taken == 0, 1, -1)
        data = Judged(
            rewards=(rng.random(n * steps) < mean).astype(np.float64),
            lengths=np.full(n, steps, np.int64),
            behaviour_logp=np.full(n * steps, np.log(0.5)),
            flat=np.zeros((n * steps, 1)),
            taken=taken,
        )
        candidate = TargetPolicy(np.log(probs[taken]), np.broadcast_to(probs, (n * steps, 2)))
        return data, candidate, Bar("log")

    return Case(
        name=name,
        n=n,
        difference=steps * effect * (2 * first - 1),
        make=make,
        reward_range=(0.0, 1.0),
        **more,  # type: ignore[arg-type]  # fields of Case
    )


def users(name: str, n: int, each: int, *, known: bool = True, **more: object) -> Case:
    """n episodes, `each` of one user, for whom the first action is worth .95 or .05, at random.

    All actions earn .5 on average. Unless each episode's user is `known`, each episode is a unit.
    """

    def make(rng: np.random.Generator) -> tuple[Judged, TargetPolicy, Bar]:
        taken, unit = rng.integers(4, size=n), np.arange(n) // each
        taste = rng.choice([-0.45, 0.45], size=n // each)[unit]
        data = Judged(
            rewards=_bernoulli(rng, 0.5 + taste * (taken == 0)),
            lengths=np.ones(n, np.int64),
            behaviour_logp=np.full(n, np.log(0.25)),
            flat=rng.normal(size=(n, 1)),
            taken=taken,
            units=unit if known else None,
        )
        candidate = TargetPolicy(np.log(CANDIDATE[taken]), np.broadcast_to(CANDIDATE, (n, 4)))
        return data, candidate, Bar("log")

    return Case(
        name=name,
        n=n,
        difference=0.0,
        make=make,
        reward_range=(0.0, 1.0),
        **more,  # type: ignore[arg-type]  # fields of Case
    )


def _bernoulli(rng: np.random.Generator, means: FloatArray) -> FloatArray:
    return (rng.random(means.size) < means).astype(np.float64)


def _failures(rng: np.random.Generator, means: FloatArray) -> FloatArray:
    return -(rng.random(means.size) < -means).astype(np.float64)


def _gaussian(rng: np.random.Generator, means: FloatArray) -> FloatArray:
    return means + rng.normal(size=means.size)


def _pareto(shape: float, sign: int) -> Draw:
    def draw(rng: np.random.Generator, means: FloatArray) -> FloatArray:
        return sign * rng.pareto(shape, means.size)

    return draw


UNIT, COST = (0.0, 1.0), (-1.0, 0.0)


def equal_or_worse() -> Iterator[Case]:
    """Nothing here may be called better in more than 2.5 % of repetitions."""
    against: tuple[Against, Against] = ("log", "rival")
    for bar in against:
        yield _one_step(
            "binary .5 equal, 1,000", 1000, 0.5, 0.5, _bernoulli, UNIT, bar, sound=True, normal=True
        )
        yield _one_step("Gaussian equal, 1,000", 1000, 0, 0, _gaussian, None, bar, normal=True)
        for rate, n in ((0.002, 1000), (0.03, 1000), (0.002, 10_000), (0.01, 10_000)):
            name = f"failures {rate:g} equal, {n:,}"
            yield _one_step(name, n, -rate, -rate, _failures, COST, bar)
        yield _one_step(
            "failures .03 equal, 10,000", 10_000, -0.03, -0.03, _failures, COST, bar, sound=True
        )
        yield _one_step("failures .03 worse, 3,000", 3000, -0.03, -0.036, _failures, COST, bar)
        yield _one_step("clicks .004 equal, 10,000", 10_000, 0.004, 0.004, _bernoulli, UNIT, bar)
        for shape in (1.5, 2.5):
            for sign, word in ((1, "gains"), (-1, "costs")):
                mean = sign / (shape - 1)
                name = f"Pareto {shape} {word} equal, 10,000"
                yield _one_step(name, 10_000, mean, mean, _pareto(shape, sign), None, bar)
    yield users("users of 20 equal, 10,000", 10_000, 20, sound=True, normal=True)
    yield _steps("10 steps equal, 1,000", 1000, 10, 0.0)
    yield _steps("10 steps equal, 10,000", 10_000, 10, 0.0, sound=True, normal=True)
    yield _steps("10 steps worse by 5 %, 10,000", 10_000, 10, -0.104)
    yield _steps("50 steps equal, 2,000", 2000, 50, 0.0)


def power() -> Iterator[Case]:
    """Differences that betting has to detect, and ones that it cannot; the same for `worse`."""
    bars: tuple[Against, Against] = ("log", "rival")
    for bar in bars:
        # The targets apply to the logging policy's bar; a rival is shown for comparison.
        share = 1.0 if bar == "log" else 0.0
        for name, n, base, new, draw, limits, least in (
            ("binary .5 +40 %, 1,000", 1000, 0.5, 0.7, _bernoulli, UNIT, 0.95),
            ("binary .5 +10 %, 10,000", 10_000, 0.5, 0.55, _bernoulli, UNIT, 0.90),
            ("binary .5 +10 %, 3,000", 3000, 0.5, 0.55, _bernoulli, UNIT, 0.45),
            ("failures .03 halved, 10,000", 10_000, -0.03, -0.015, _failures, COST, 0.85),
            ("clicks .004 tripled, 10,000", 10_000, 0.004, 0.012, _bernoulli, UNIT, 0.95),
        ):
            sound = limits == UNIT and base == 0.5
            yield _one_step(
                name,
                n,
                base,
                new,
                draw,
                limits,
                bar,
                verdict="better",
                least=least * share,
                sound=sound,
                normal=sound,
            )
        for name, n, base, new, draw, limits, least in (
            ("binary .5 -40 %, 1,000", 1000, 0.5, 0.3, _bernoulli, UNIT, 0.95),
            ("binary .5 -10 %, 10,000", 10_000, 0.5, 0.45, _bernoulli, UNIT, 0.90),
            ("binary .5 -10 %, 3,000", 3000, 0.5, 0.45, _bernoulli, UNIT, 0.45),
            ("failures .015 doubled, 10,000", 10_000, -0.015, -0.03, _failures, COST, 0.85),
            ("clicks .012 to a third, 10,000", 10_000, 0.012, 0.004, _bernoulli, UNIT, 0.95),
        ):
            yield _one_step(
                name, n, base, new, draw, limits, bar, verdict="worse", least=least * share
            )
    yield _steps("10 steps +24 %, 10,000", 10_000, 10, 0.5, verdict="better", least=0.95)
    yield _steps("10 steps -24 %, 10,000", 10_000, 10, -0.5, verdict="worse", least=0.95)
    # It is better: by four matched clicks more than ten. A test that knew both rates would tell in
    # three logs of ten; "better" is not wrong here, but has to be rare.
    yield _one_step(
        "clicks .004 +40 %, 10,000",
        10_000,
        0.004,
        0.0056,
        _bernoulli,
        UNIT,
        verdict="cannot tell",
        least=0.90,
    )
    yield _steps(
        "50 steps, .97 of +94 %, 2,000", 2000, 50, 0.5, 0.97, verdict="cannot tell", least=0.95
    )
    # Not required, but detected: on this side the bound needs no limit on the weights.
    yield _steps("50 steps +24 %, 2,000", 2000, 50, 0.5, verdict="better")
