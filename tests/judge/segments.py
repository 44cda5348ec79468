"""Logs of ten user segments, as of a shop: most choices are the old ones, a fifth are explored.

Five actions. The logging policy takes the segment's old choice in 80 % of the episodes, and in the
others any action alike. The candidate takes another action in 4 of the 10 segments. Observations
are the segments, one number each.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
from scipy.special import ndtr

from policy.ope.judgement import Bar, Judged, TargetPolicy
from tests.judge.cases import UNIT, Case, Draw, _bernoulli, _steps

FloatArray = npt.NDArray[np.float64]

SEGMENTS, ACTIONS, CHANGED = 10, 5, 4
OLD, EXPLORED = 0.84, 0.04  # the probabilities of the old choice and of each other action


def segmented(
    name: str,
    n: int,
    base: float,
    gain: float,
    draw: Draw,
    limits: tuple[float, float] | None = UNIT,
    **more: object,
) -> Case:
    """The logging policy earns `base` on average, the candidate `base` * (1 + `gain`).

    `draw` takes the mean of each episode's reward.
    """
    share = CHANGED / SEGMENTS
    rise = gain / (share - share * EXPLORED * (1 + gain))  # of the new choice, in its segments
    plain = base / (1 + share * EXPLORED * rise)
    old = np.arange(SEGMENTS) % ACTIONS
    new = np.where(np.arange(SEGMENTS) < CHANGED, (old + 1) % ACTIONS, old)

    def make(rng: np.random.Generator) -> tuple[Judged, TargetPolicy, Bar]:
        segment = rng.integers(SEGMENTS, size=n)
        explored = rng.random(n) < 0.2
        taken = np.where(explored, rng.integers(ACTIONS, size=n), old[segment])
        chosen = taken == new[segment]
        means = plain * (1 + rise * (chosen & (segment < CHANGED)))
        probs = np.full((n, ACTIONS), EXPLORED)
        probs[np.arange(n), old[segment]] = OLD
        data = Judged(
            rewards=draw(rng, means),
            lengths=np.ones(n, np.int64),
            behaviour_logp=np.log(probs[np.arange(n), taken]),
            flat=np.eye(SEGMENTS)[segment],
            taken=taken,
        )
        greedy = np.eye(ACTIONS)[new[segment]]
        with np.errstate(divide="ignore"):
            return data, TargetPolicy(np.log(chosen.astype(np.float64)), greedy), Bar("log")

    return Case(
        name=name,
        n=n,
        difference=base * gain,
        make=make,
        reward_range=limits,
        **more,  # type: ignore[arg-type]  # fields of Case
    )


BUYERS, TYPICAL, SPREAD = 0.05, 20.0, 1.5


def revenue(cap: float = np.inf) -> float:
    """The mean of an episode: E min(A, c) = E[A] P(z < d - s) + c P(z > d), d = log(c / m) / s."""
    whole = TYPICAL * float(np.exp(SPREAD**2 / 2))
    if cap == np.inf:
        return BUYERS * whole
    d = float(np.log(cap / TYPICAL)) / SPREAD
    return BUYERS * (whole * float(ndtr(d - SPREAD)) + cap * float(ndtr(-d)))


def money(cap: float = np.inf) -> Draw:
    """Most buy nothing; the others pay amounts of a lognormal distribution, counted up to a cap."""

    def draw(rng: np.random.Generator, means: FloatArray) -> FloatArray:
        amounts = TYPICAL * np.exp(SPREAD * rng.normal(size=means.size))
        bought = rng.random(means.size) < BUYERS * means / revenue(cap)
        return np.where(bought, np.minimum(amounts, cap), 0.0)

    return draw


def equal() -> Iterator[Case]:
    n = 15_000
    yield segmented(f"clicks .05 by segment equal, {n:,}", n, 0.05, 0.0, _bernoulli, sound=True)
    cap = 50.0
    yield segmented(f"money up to 50 equal, {n:,}", n, revenue(cap), 0.0, money(cap), None)
    n = 150_000
    name = f"money up to 50 equal, {n:,}"
    yield segmented(name, n, revenue(cap), 0.0, money(cap), None, sound=True)


def richer() -> Iterator[Case]:
    n = 150_000
    for cap in (50.0, 100.0):
        yield segmented(
            f"money up to {cap:g} +30 %, {n:,}",
            n,
            revenue(cap),
            0.3,
            money(cap),
            None,
            verdict="better",
            least=0.90,
            sound=True,
        )
    # without a cap nothing can be told, and the check says why
    yield segmented(
        f"money +30 %, {n:,}",
        n,
        revenue(),
        0.3,
        money(),
        None,
        verdict="cannot tell",
        cause="heavy_tails",
    )


def promised() -> Iterator[Case]:
    """The cases in which the judge must decide as often as release 0.1.0 did."""
    for n in (15_000, 150_000):
        for rate in (0.05, 0.02):
            for gain in (0.1, 0.3):
                name = f"clicks {rate:g} +{gain:.0%}, {n:,}"
                yield segmented(name, n, rate, gain, _bernoulli, verdict="better")
    for n in (1000, 10_000):
        yield _steps(f"10 steps +8 %, {n:,}", n, 10, 1 / 6, verdict="better")
