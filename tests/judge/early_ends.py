"""Logs of episodes with up to ten steps, most of which end before.

Two actions, logged uniformly; the candidate takes the first with .62. It earns 1 with .5 +
`effect`, the other one with .5 - `effect`, and each ends the episode with its own probability.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from policy.ope.judgement import Bar, Judged, TargetPolicy
from tests.judge.cases import COST, UNIT, Case

STEPS = 10
FIRST, UNIFORM = np.array([0.62, 0.38]), np.array([0.5, 0.5])


def early(
    name: str,
    n: int,
    effect: float,
    ends: tuple[float, float] = (0.15, 0.15),
    *,
    costs: bool = False,
    **more: object,
) -> Case:
    """n episodes; with `costs` each reward is 1 less."""
    means = 0.5 + effect * np.array([1, -1]) - costs
    chances = np.array(ends)

    def make(rng: np.random.Generator) -> tuple[Judged, TargetPolicy, Bar]:
        taken = rng.integers(2, size=(n, STEPS))
        over = rng.random((n, STEPS)) < chances[taken]
        over[:, -1] = True
        lengths = over.argmax(axis=1) + 1
        here = np.arange(STEPS) < lengths[:, None]
        acted = taken[here]
        data = Judged(
            rewards=(rng.random(acted.size) < means[acted] + costs) - float(costs),
            lengths=lengths,
            behaviour_logp=np.full(acted.size, np.log(0.5)),
            flat=np.zeros((acted.size, 1)),
            taken=acted,
        )
        probs = np.broadcast_to(FIRST, (acted.size, 2))
        return data, TargetPolicy(np.log(FIRST[acted]), probs), Bar("log")

    def value(policy: np.ndarray) -> float:
        going_on = float(policy @ (1 - chances))
        return float(policy @ means) * sum(going_on**t for t in range(STEPS))

    return Case(
        name=name,
        n=n,
        difference=value(FIRST) - value(UNIFORM),
        make=make,
        reward_range=COST if costs else UNIT,
        **more,  # type: ignore[arg-type]  # fields of Case
    )


def equal() -> Iterator[Case]:
    for n in (1000, 10_000):
        yield early(f"early ends equal, {n:,}", n, 0.0, sound=n == 10_000)
        yield early(f"early ends of costs equal, {n:,}", n, 0.0, costs=True, sound=n == 10_000)


def different() -> Iterator[Case]:
    n = 10_000
    yield early(f"early ends +24 %, {n:,}", n, 0.5, verdict="better", least=0.95)
    yield early(f"early ends -24 %, {n:,}", n, -0.5, verdict="worse", least=0.95)
    yield early(
        f"early ends of costs, less, {n:,}", n, 0.5, costs=True, verdict="better", least=0.95
    )
    yield early(
        f"early ends of costs, more, {n:,}", n, -0.5, costs=True, verdict="worse", least=0.95
    )
    # the first action ends more of its episodes, and so earns less
    yield early(f"earlier ends, {n:,}", n, 0.0, (0.3, 0.1), verdict="worse")
