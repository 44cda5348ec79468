"""Logs on which the candidate was trained itself: fold policies judge their own rows.

The logs are those of tests.judge.segments. A training takes in each segment the action with the
highest mean reward of its rows, so a policy looks better on its own rows than it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from policy.ope.judgement import Bar, Judged, TargetPolicy
from tests.judge.cases import Case, _bernoulli
from tests.judge.segments import ACTIONS, SEGMENTS, segmented

BLOCKS = 5
How = Literal["held out", "blocks", "others"]
IntArray = npt.NDArray[np.int64]


def trained(data: Judged, rows: npt.NDArray[np.bool_] | slice) -> IntArray:
    """(SEGMENTS,) the action with the highest mean in each segment, of these rows."""
    assert data.taken is not None
    cells = data.flat.argmax(axis=1)[rows] * ACTIONS + data.taken[rows]
    counts = np.bincount(cells, minlength=SEGMENTS * ACTIONS) + 50.0  # shrunk to the mean
    sums = np.bincount(cells, data.rewards[rows], SEGMENTS * ACTIONS) + 50 * data.rewards.mean()
    best: IntArray = (sums / counts).reshape(SEGMENTS, ACTIONS).argmax(axis=1)
    return best


def fitted(name: str, n: int, gain: float, how: How, **more: object) -> Case:
    """n rows to train on and to judge by; a tenth of clicks, up to `gain` more are possible.

    With `others` as many new rows judge what was trained on all: the most that blocks could reach.
    """
    inner = segmented(name, n, 0.1, gain, _bernoulli)

    def make(rng: np.random.Generator) -> tuple[Judged, TargetPolicy, Bar]:
        data, _, bar = inner.make(rng)
        chosen = np.zeros(n, np.int64)
        judging = np.ones(n, np.bool_)
        if how == "others":
            best = trained(data, judging)
            data, _, bar = inner.make(rng)
            chosen = best[data.flat.argmax(axis=1)]
        segments = data.flat.argmax(axis=1)
        if how == "held out":
            judging = rng.random(n) < 0.3
            chosen = trained(data, ~judging)[segments]
        elif how == "blocks":
            block = np.arange(n) * BLOCKS // n
            judging = block > 0
            for number in range(1, BLOCKS):
                mine = block == number
                chosen[mine] = trained(data, block < number)[segments[mine]]
        probs = np.eye(ACTIONS)[chosen[judging]] * 0.95 + 0.01
        assert data.taken is not None
        taken = data.taken[judging]
        kept = replace(
            data,
            rewards=data.rewards[judging],
            lengths=data.lengths[judging],
            behaviour_logp=data.behaviour_logp[judging],
            flat=data.flat[judging],
            taken=taken,
        )
        return kept, TargetPolicy(np.log(probs[np.arange(taken.size), taken]), probs), bar

    # the best policy's gain; that of what is trained is less
    return Case(
        name=name,
        n=n,
        difference=0.1 * gain,
        make=make,
        reward_range=(0.0, 1.0),
        **more,  # type: ignore[arg-type]  # fields of Case
    )


def equal() -> Iterator[Case]:
    n = 10_000
    yield fitted(f"trained, {BLOCKS} blocks, equal, {n:,} rows", n, 0.0, "blocks")


def better() -> Iterator[Case]:
    n, gain = 50_000, 0.35
    yield fitted(f"trained, held out, {n:,} rows", n, gain, "held out", verdict="better")
    asked = {"verdict": "better", "least": 0.75}
    yield fitted(f"trained, {BLOCKS} blocks, {n:,} rows", n, gain, "blocks", **asked)
    yield fitted(f"trained, as many others, {n:,} rows", n, gain, "others", verdict="better")
