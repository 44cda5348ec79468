"""Values of actions under a target policy, for estimators that need q and v: `cross_fit`.

Every step is scored by a model (policy.ope.value_models) that was fitted on other episodes. For
one-step episodes it is fitted to the reward. For longer ones it is fitted repeatedly (fitted Q
evaluation): to the reward of each step plus the previous fit's value of the next one under the
target policy.

`EarlierScores` scores one-step decisions by models that were fitted on earlier rows only, as
required by a bound that is computed several times, or that bets on one row after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from policy.ope.value_models import (
    BoundedRewardModel,
    LinearRewardModel,
    RewardModel,
    expected_value,
)

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]
IntArray = npt.NDArray[np.int64]

MOST_FITS = 200
CLOSE = 1e-3  # of the largest target: smaller changes end the iteration
FIRST_ROWS = 64  # they are scored without a model


class CrossFitted(NamedTuple):
    """The result of `cross_fit` for S rows."""

    q: FloatArray  # (S,) of the action taken
    v: FloatArray  # (S,) expected under the target policy
    fold: IntArray  # (S,) the fold whose model scored the row; that model was fitted on the others


def cross_fit(
    make_model: Callable[[], RewardModel],
    obs: npt.ArrayLike,
    actions: npt.ArrayLike,
    rewards: npt.ArrayLike,
    target_probs: npt.ArrayLike,
    *,
    rng: np.random.Generator,
    lengths: npt.ArrayLike | None = None,
    terminated: npt.ArrayLike | None = None,
    gamma: float = 1.0,
    folds: int = 5,
) -> CrossFitted:
    """Score every row with a model fitted on the other folds' episodes.

    Chernozhukov et al. 2018, Double/debiased machine learning, definition 3.2; for episodes of
    several steps with Le, Voloshin & Yue 2019, Batch policy learning under constraints, algorithm
    3. obs (S, *obs), actions and rewards (S,), target_probs (S, A). `lengths` (n,) are the lengths
    of the episodes, in order (default: each row is one), whose rows are never in several folds.
    `make_model` returns a new model.

    `terminated` (n,): whether the episode ended with its last step (default: all). Otherwise its
    continuation is unknown, and the last step is excluded from the fit. The number of fits is the
    length of the longest episode, as each fit looks one step further ahead. Values are clipped to
    what that many steps can earn, because fits to their own values may diverge. Raises ValueError
    for shapes that do not fit.
    """
    taken = np.asarray(actions)
    sizes = np.ones(len(taken), np.int64) if lengths is None else np.asarray(lengths)
    last = _last(sizes, len(taken))
    fits = min(int(sizes.max()), MOST_FITS) if gamma else 1
    known = np.ones(len(taken), np.bool_)
    if terminated is not None and fits > 1:
        known[last] = np.asarray(terminated, np.bool_)
    given = (np.asarray(obs), taken, np.asarray(rewards), np.asarray(target_probs))
    steps = _Steps(*given, last, known)
    fold = _folds(sizes, folds, rng)
    q, v = np.empty(len(fold)), np.empty(len(fold))
    for number in range(folds):
        inside = fold == number
        model = _fit(make_model, steps.only(~inside), gamma, fits)
        mine = steps.only(inside)
        q[inside] = model.q(mine.obs, mine.actions)
        v[inside] = expected_value(model, mine.obs, mine.probs)
    return CrossFitted(q, v, fold)


class EarlierScores:
    """q and v of one-step decisions by a linear model of earlier rows, block by block.

    The first 64 rows have no model: q and v are the mean of the rewards before them (of none: 0),
    or without limits the mean of all 64. Each later stretch is as long as all rows before it, whose
    model scores it. So the scores do not depend on later rows, as required by a bound that is
    computed several times. Values are clipped to the limits, or without limits to the range of
    rewards that the model has seen. Karampatziakis, Mineiro & Ramdas 2021, section 5.2, with
    predictable control variates.
    """

    def __init__(self, actions: int, limits: tuple[float, float] | None) -> None:
        self._sums = LinearRewardModel(actions)
        self._limits, self._seen = limits, (np.inf, -np.inf)
        self._model: BoundedRewardModel | None = None
        # the number of rows at which the next model is fitted
        self._rows, self._total, self._due = 0, 0.0, FIRST_ROWS

    def scored(
        self,
        obs: npt.NDArray[np.floating[Any]],
        actions: IntArray,
        rewards: FloatArray,
        targets: Sequence[FloatArray],
    ) -> tuple[FloatArray, list[FloatArray]]:
        """Score the next n rows: (q of the actions taken (n,), v (n,) of each target).

        obs (n, *obs), actions int64 (n,) counted from 0, rewards (n,), probabilities (n, A) of each
        target.
        """
        n = len(actions)
        q, values = np.empty(n), [np.empty(n) for _ in targets]
        begin = 0
        while begin < n:
            rows = slice(begin, min(n, begin + self._due - self._rows))
            if self._model is None:
                q[rows] = self._start(rewards[rows])
                for v in values:
                    v[rows] = q[rows]
            else:
                q[rows] = self._model.q(obs[rows], actions[rows])
                for v, probs in zip(values, targets, strict=True):
                    v[rows] = expected_value(self._model, obs[rows], probs[rows])
            self._learn(obs[rows], actions[rows], rewards[rows])
            begin = rows.stop
        return q, values

    def _start(self, rewards: FloatArray) -> FloatArray:
        if self._limits is None:
            return np.full(len(rewards), rewards.mean())
        counts = self._rows + np.arange(len(rewards))
        sums = self._total + np.cumsum(rewards) - rewards
        means: FloatArray = sums / np.maximum(counts, 1)
        return np.clip(means, *self._limits)

    def _learn(
        self, obs: npt.NDArray[np.floating[Any]], actions: IntArray, rewards: FloatArray
    ) -> None:
        self._sums.add(obs, actions, rewards)
        low, high = self._seen
        self._seen = min(low, float(rewards.min())), max(high, float(rewards.max()))
        self._rows, self._total = self._rows + len(actions), self._total + float(rewards.sum())
        if self._rows == self._due:
            self._model = BoundedRewardModel(self._sums.solved(), self._limits or self._seen)
            self._due *= 2


@dataclass(frozen=True)
class _Steps:
    """S steps, episodes one after the other."""

    obs: npt.NDArray[np.generic]
    actions: npt.NDArray[np.generic]
    rewards: FloatArray
    probs: FloatArray
    last: BoolArray  # (S,) whether it is the last step of its episode
    known: BoolArray  # (S,) whether it is known what follows: a step or the end

    def __post_init__(self) -> None:
        for name in ("obs", "rewards", "probs"):
            found = getattr(self, name).shape
            if found[:1] != self.actions.shape[:1]:
                raise ValueError(f"{name}: expected {len(self.actions)} rows, got {found}")

    def only(self, chosen: BoolArray) -> _Steps:
        """The chosen rows, which have to be whole episodes."""
        return _Steps(
            self.obs[chosen],
            self.actions[chosen],
            self.rewards[chosen],
            self.probs[chosen],
            self.last[chosen],
            self.known[chosen],
        )


def _fit(
    make_model: Callable[[], RewardModel], steps: _Steps, gamma: float, fits: int
) -> RewardModel:
    low, high = _attainable(steps.rewards, gamma, fits)
    obs, actions = steps.obs[steps.known], steps.actions[steps.known]
    targets = steps.rewards
    model = make_model().fit(obs, actions, targets[steps.known])
    for _ in range(fits - 1):
        following = np.roll(expected_value(model, steps.obs, steps.probs), -1)
        following[steps.last] = 0.0
        before, targets = targets, np.clip(steps.rewards + gamma * following, low, high)
        if np.abs(targets - before).max() <= CLOSE * np.abs(targets).max():
            break
        model = make_model().fit(obs, actions, targets[steps.known])
    return model


def _attainable(rewards: FloatArray, gamma: float, steps: int) -> tuple[float, float]:
    """The smallest and largest return of an episode of 1 to `steps` steps."""
    weight = float(np.sum(gamma ** np.arange(steps)))
    least, most = float(rewards.min()), float(rewards.max())
    return min(least, least * weight), max(most, most * weight)


def _last(sizes: IntArray, total: int) -> BoolArray:
    if sizes.ndim != 1 or sizes.sum() != total or (sizes < 1).any():
        raise ValueError(
            f"lengths: expected to sum to {total} rows, 1 or more each, got {sizes.tolist()!r:.200}"
        )
    last = np.zeros(total, np.bool_)
    last[np.cumsum(sizes) - 1] = True
    return last


def _folds(sizes: IntArray, folds: int, rng: np.random.Generator) -> IntArray:
    """(S,) fold of each row: episodes are assigned at random, equally many to each fold."""
    if not 2 <= folds <= len(sizes):
        raise ValueError(f"folds: expected 2 to {len(sizes)}, the number of episodes, got {folds}")
    return np.repeat(rng.permutation(np.arange(len(sizes)) % folds), sizes)
