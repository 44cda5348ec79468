"""Value models for the estimators that need q and v.

A model predicts the reward of an action for an observation: `fit`, then `q` of the actions taken
and `q_all` of all actions. With the target policy's probabilities (n, A) this gives the q and v of
`policy.ope.estimators`:

    model = LinearRewardModel(n_actions=4).fit(obs, actions, rewards)
    q, v = model.q(obs, actions), expected_value(model, obs, target_probs)

A model's predictions are too good for the rows that it was fitted on, and it predicts the reward of
a step without the following ones. `policy.ope.cross_fitting` scores every episode with a model
fitted on others, which for episodes of several steps includes the following rewards:

    fitted = cross_fit(
        lambda: LinearRewardModel(n_actions=4), obs, actions, rewards, target_probs,
        lengths=lengths, gamma=0.99, rng=np.random.default_rng(7),
    )
    episodes = Episodes.from_flat(rewards, lengths=lengths, q=fitted.q, v=fitted.v, ...)

Actions are those of a Discrete space. Needs only numpy.
"""

from __future__ import annotations

from typing import Protocol, Self

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

# the number of values in q_all at a time if only their mean is needed: 32 MB of float64
CELLS = 1 << 22


class RewardModel(Protocol):
    """The interface of a model; n rows, A actions."""

    def fit(self, obs: npt.ArrayLike, actions: npt.ArrayLike, rewards: npt.ArrayLike) -> Self:
        """Learn from obs (n, *obs), actions (n,) and rewards (n,); return the model itself."""

    def q(self, obs: npt.ArrayLike, actions: npt.ArrayLike) -> FloatArray:
        """(n,) expected reward of the given actions."""

    def q_all(self, obs: npt.ArrayLike) -> FloatArray:
        """(n, A) expected reward of every action."""


class SmoothedMeanRewardModel:
    """The mean reward of each action, shrunk towards a prior; the observation is not used.

    q(a) = (sum of rewards of a + prior_successes) / (number of a + prior_count), the mean of a Beta
    posterior if rewards are 0 or 1 (Gelman et al. 2013, Bayesian Data Analysis, eq. 2.6). Actions
    run from `start` to `start + n_actions - 1`, as in Discrete(n, start).
    """

    def __init__(
        self,
        n_actions: int,
        *,
        prior_successes: float = 0.0,
        prior_count: float = 1.0,
        start: int = 0,
    ) -> None:
        _check_n_actions(n_actions)
        if not prior_count > 0 or not np.isfinite(prior_successes):
            raise ValueError(
                "expected prior_count > 0 and a finite prior_successes, got "
                f"{prior_count} and {prior_successes}"
            )
        self.n_actions = n_actions
        self.start = start
        self.prior_successes = prior_successes
        self.prior_count = prior_count
        self._means: FloatArray | None = None  # (A,)

    def fit(self, obs: npt.ArrayLike, actions: npt.ArrayLike, rewards: npt.ArrayLike) -> Self:
        index = _action_index(actions, self.n_actions, self.start)
        reward = _numbers("rewards", rewards, (len(index),))
        _features(obs, len(index))
        counts = np.bincount(index, minlength=self.n_actions)
        totals = np.bincount(index, weights=reward, minlength=self.n_actions)
        self._means = (totals + self.prior_successes) / (counts + self.prior_count)
        return self

    def q(self, obs: npt.ArrayLike, actions: npt.ArrayLike) -> FloatArray:
        index = _action_index(actions, self.n_actions, self.start)
        _features(obs, len(index))
        return _fitted(self._means)[index]

    def q_all(self, obs: npt.ArrayLike) -> FloatArray:
        """(n, A), read-only: a single row repeated n times."""
        return np.broadcast_to(_fitted(self._means), (len(_features(obs)), self.n_actions))


class LinearRewardModel:
    """Ridge regression of the reward on the observation, one for each action.

    The coefficients of each action are shrunk towards a pooled model over all rows, b = argmin |r -
    X b|^2 + l2 |b|^2 (its intercept free): b_a = argmin |r_a - X_a b_a|^2 + l2 |b_a - b|^2. So an
    action that was rarely taken has values close to the pooled ones, and one never taken exactly
    these. Closed form, Hoerl & Kennard 1970, eq. 2.1. Features are scaled to unit variance first,
    so that l2 counts rows: with about l2 rows an action is half way from the pooled model to its
    own.
    """

    def __init__(self, n_actions: int, *, l2: float = 10.0, start: int = 0) -> None:
        _check_n_actions(n_actions)
        if not (l2 > 0 and np.isfinite(l2)):
            raise ValueError(f"l2: expected a finite number > 0, got {l2}")
        self.n_actions = n_actions
        self.start = start
        self.l2 = l2
        self._moments: _RowSums | None = None
        self._center = np.empty(0)  # (F,)
        self._scale = np.empty(0)  # (F,)
        self._coefficients: FloatArray | None = None  # (A, F + 1), the intercept last

    def fit(self, obs: npt.ArrayLike, actions: npt.ArrayLike, rewards: npt.ArrayLike) -> Self:
        self._moments = None
        return self.add(obs, actions, rewards).solved()

    def add(self, obs: npt.ArrayLike, actions: npt.ArrayLike, rewards: npt.ArrayLike) -> Self:
        """Add rows to the stored sums; `solved` then gives what `fit` gives for all of them.

        Memory is A (F + 1)^2 numbers, independent of the number of rows.
        """
        index = _action_index(actions, self.n_actions, self.start)
        reward = _numbers("rewards", rewards, (len(index),))
        features = _features(obs, len(index))
        if self._moments is None:
            if len(index) == 0:
                raise ValueError("expected at least one row to fit, got none")
            self._moments = _RowSums(features, self.n_actions)
        self._moments.add(features, index, reward)
        return self

    def solved(self) -> Self:
        """Fit to all rows that were added, and return the model itself."""
        if self._moments is None:
            raise ValueError("this model has not been fitted yet: call fit(obs, actions, rewards)")
        self._center, self._scale, grams, sides = self._moments.standardised()
        penalty = self.l2 * np.eye(grams.shape[1])
        free = penalty.copy()
        free[-1, -1] = 0.0
        pooled = np.linalg.solve(grams.sum(axis=0) + free, sides.sum(axis=0))
        # both sides are 0 for an action without rows
        self._coefficients = pooled + np.linalg.solve(
            grams + penalty, (sides - grams @ pooled)[:, :, None]
        ).squeeze(2)
        return self

    def q(self, obs: npt.ArrayLike, actions: npt.ArrayLike) -> FloatArray:
        index = _action_index(actions, self.n_actions, self.start)
        rows = _fitted(self._coefficients)[index]
        return _row_dots(self._design(self._known(obs, len(index))), rows)

    def q_all(self, obs: npt.ArrayLike) -> FloatArray:
        coefficients = _fitted(self._coefficients)
        values: FloatArray = self._design(self._known(obs)) @ coefficients.T
        return values

    def _design(self, features: FloatArray) -> FloatArray:
        """(n, F + 1): scaled features and a column of ones."""
        return _with_ones((features - self._center) / self._scale)

    def _known(self, obs: npt.ArrayLike, rows: int | None = None) -> FloatArray:
        features = _features(obs, rows)
        if features.shape[1] != len(self._center):
            raise ValueError(
                f"obs: expected {len(self._center)} numbers a row, as in fit, "
                f"got {features.shape[1]}"
            )
        return features


class _RowSums:
    """Sums over rows by action: Z^T Z (A, F + 1, F + 1) and Z^T r (A, F + 1).

    Z are features minus the mean of the first rows, divided by their spread, and a column of ones,
    so that sums of squares keep their precision if a mean is far from 0.
    """

    def __init__(self, first: FloatArray, actions: int) -> None:
        self._shift = first.mean(axis=0)
        self._width = _spread(first.std(axis=0), self._shift)
        size = first.shape[1] + 1
        self._grams = np.zeros((actions, size, size))
        self._sides = np.zeros((actions, size))

    def add(self, features: FloatArray, index: IntArray, reward: FloatArray) -> None:
        design = _with_ones((features - self._shift) / self._width)
        order = np.argsort(index, kind="stable")
        ends = np.cumsum(np.bincount(index, minlength=len(self._grams)))
        for action, rows in enumerate(np.split(order, ends[:-1])):
            if rows.size:
                own = design[rows]
                self._grams[action] += own.T @ own
                self._sides[action] += own.T @ reward[rows]

    def standardised(self) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
        """(center (F,), scale (F,), grams, sides) for features scaled to mean 0 and variance 1."""
        total = self._grams.sum(axis=0)
        count = total[-1, -1]
        mean = total[-1, :-1] / count
        variance = np.maximum(np.diagonal(total)[:-1] / count - mean**2, 0.0)
        # a constant column carries no information: its centred values are 0 at any scale
        wide = np.sqrt(variance)
        scale = np.where(wide > 1e-7, wide, 1.0)
        change = np.diag(np.append(1 / scale, 1.0))
        change[:-1, -1] = -mean / scale
        center = self._shift + mean * self._width
        return (
            center,
            _spread(scale * self._width, center),
            change @ self._grams @ change.T,
            self._sides @ change.T,
        )


def _spread(spread: FloatArray, center: FloatArray) -> FloatArray:
    """The divisors of features: 1 for columns that are constant except for rounding."""
    found: FloatArray = np.where(spread > 1e-12 * np.abs(center), spread, 1.0)
    return found


def _with_ones(features: FloatArray) -> FloatArray:
    return np.column_stack([features, np.ones(len(features))])


class CandidateRewardModel:
    """Ridge regression of the reward on features of the state and of the chosen candidate.

    One model for all candidates: its features are the products of [s; 1] and [c; 1] for a state s
    and a candidate's features c. Observations are flat, (n, S + A F + A): the state, F features of
    each of A candidates, and the action mask.
    """

    def __init__(self, n_actions: int, width: int, *, l2: float = 10.0, start: int = 0) -> None:
        _check_n_actions(n_actions)
        self.n_actions, self.width, self.start = n_actions, width, start
        self._model = LinearRewardModel(1, l2=l2)

    def fit(self, obs: npt.ArrayLike, actions: npt.ArrayLike, rewards: npt.ArrayLike) -> Self:
        chosen = self._chosen(obs, actions)
        self._model.fit(chosen, np.zeros(len(chosen), np.int64), rewards)
        return self

    def q(self, obs: npt.ArrayLike, actions: npt.ArrayLike) -> FloatArray:
        return self._model.q_all(self._chosen(obs, actions))[:, 0]

    def q_all(self, obs: npt.ArrayLike) -> FloatArray:
        states, items = self._split(obs)
        found = np.empty(items.shape[:2])
        for place in range(self.n_actions):
            found[:, place] = self._model.q_all(_products(states, items[:, place]))[:, 0]
        return found

    def _chosen(self, obs: npt.ArrayLike, actions: npt.ArrayLike) -> FloatArray:
        index = _action_index(actions, self.n_actions, self.start)
        states, items = self._split(obs)
        return _products(states, items[np.arange(len(index)), index])

    def _split(self, obs: npt.ArrayLike) -> tuple[FloatArray, FloatArray]:
        """States (n, S), and candidates (n, A, F)."""
        flat, numbers = _features(obs), self.n_actions * self.width
        state = flat.shape[1] - numbers - self.n_actions
        if state < 0:
            raise ValueError(
                f"obs: expected {numbers + self.n_actions} or more numbers a row, those of "
                f"candidates and mask, got {flat.shape[1]}"
            )
        items = flat[:, state : state + numbers].reshape(-1, self.n_actions, self.width)
        return flat[:, :state], items


def _products(states: FloatArray, items: FloatArray) -> FloatArray:
    """(n, (S + 1) (F + 1) - 1): all products of [s; 1] and [c; 1], without the constant."""
    both = _with_ones(states)[:, :, None] * _with_ones(items)[:, None, :]
    return both.reshape(len(states), -1)[:, :-1]


class BoundedRewardModel:
    """Another model, clipped to limits: by default those of the rewards that it was fitted on.

    For observations far from the others a linear model predicts values beyond all rewards, and one
    such value can outweigh a whole log. The clipped model gives both q and its expectation, so
    that a doubly robust estimate stays unbiased; clipping only q would bias it.
    """

    def __init__(self, model: RewardModel, limits: tuple[float, float] | None = None) -> None:
        self._model = model
        self._limits = limits
        self._given = limits is not None

    def fit(self, obs: npt.ArrayLike, actions: npt.ArrayLike, rewards: npt.ArrayLike) -> Self:
        self._model.fit(obs, actions, rewards)
        if not self._given:
            column = np.asarray(rewards, np.float64)
            self._limits = float(column.min()), float(column.max())
        return self

    def q(self, obs: npt.ArrayLike, actions: npt.ArrayLike) -> FloatArray:
        return self._bounded(self._model.q(obs, actions))

    def q_all(self, obs: npt.ArrayLike) -> FloatArray:
        return self._bounded(self._model.q_all(obs))

    def _bounded(self, values: FloatArray) -> FloatArray:
        return values if self._limits is None else np.clip(values, *self._limits)


def expected_value(
    model: RewardModel, obs: npt.ArrayLike, target_probs: npt.ArrayLike
) -> FloatArray:
    """(n,) sum_a target_probs[i, a] q(obs_i, a); target_probs (n, A), each row sums to 1."""
    features = np.asarray(obs)
    probs = _probabilities(target_probs, len(features))
    at_once = max(1, CELLS // max(1, probs.shape[1]))
    values = np.empty(len(features))
    for begin in range(0, len(features), at_once):
        rows = slice(begin, begin + at_once)
        q_all = model.q_all(features[rows])
        if q_all.shape != probs[rows].shape:
            raise ValueError(
                f"target_probs: expected {q_all.shape[1]} probabilities a row, one an action, "
                f"got {probs.shape[1]}"
            )
        values[rows] = _row_dots(probs[rows], q_all)
    return values


def _action_index(actions: npt.ArrayLike, n_actions: int, start: int) -> IntArray:
    """(n,) actions counted from 0."""
    taken = np.asarray(actions)
    if taken.ndim != 1 or taken.dtype.kind not in "iu":
        raise ValueError(
            "actions: expected those of a Discrete space, integers (n,), got "
            f"{taken.dtype} of shape {taken.shape}; other action spaces are not supported here"
        )
    index = taken.astype(np.int64) - start
    bad = (index < 0) | (index >= n_actions)
    if bad.any():
        row = int(bad.argmax())
        raise ValueError(
            f"actions: expected {start} to {start + n_actions - 1}, got {taken[row]} in row {row}"
        )
    return index


def _features(obs: npt.ArrayLike, rows: int | None = None) -> FloatArray:
    """(n, F): each observation flattened."""
    given = np.asarray(obs)
    if given.ndim == 0 or given.dtype.kind not in "biuf":
        raise ValueError(
            f"obs: expected numbers (n, ...), got {given.dtype} of shape {given.shape}; flatten "
            "Dict and Tuple observations first"
        )
    if rows is not None and len(given) != rows:
        raise ValueError(f"obs: expected {rows} rows, got {len(given)}")
    width = int(np.prod(given.shape[1:]))
    return _numbers("obs", given.reshape(len(given), width), (len(given), width))


def _numbers(name: str, given: npt.ArrayLike, shape: tuple[int, ...]) -> FloatArray:
    column = np.asarray(given, dtype=np.float64)
    if column.shape != shape:
        raise ValueError(f"{name}: expected shape {shape}, got {column.shape}")
    bad = ~np.isfinite(column)
    if bad.any():
        row = int(np.unravel_index(int(bad.argmax()), shape)[0])
        raise ValueError(f"{name}: expected finite numbers, got {column[row]} in row {row}")
    return column


def _probabilities(given: npt.ArrayLike, rows: int) -> FloatArray:
    probs = np.asarray(given, dtype=np.float64)
    if probs.ndim != 2 or len(probs) != rows:
        raise ValueError(f"target_probs: expected shape ({rows}, A), got {probs.shape}")
    # 1e-5: a float32 softmax over many actions
    bad = ~((probs >= 0).all(axis=1) & (np.abs(probs.sum(axis=1) - 1) < 1e-5))
    if bad.any():
        row = int(bad.argmax())
        raise ValueError(
            f"target_probs: expected numbers >= 0 that sum to 1, got a sum of {probs[row].sum()} "
            f"and a minimum of {probs[row].min()} in row {row}"
        )
    return probs


def _row_dots(left: FloatArray, right: FloatArray) -> FloatArray:
    dots: FloatArray = np.einsum("ij,ij->i", left, right)
    return dots


def _fitted(values: FloatArray | None) -> FloatArray:
    if values is None:
        raise ValueError("this model has not been fitted yet: call fit(obs, actions, rewards)")
    return values


def _check_n_actions(n_actions: int) -> None:
    if n_actions < 1:
        raise ValueError(f"n_actions: expected at least 1, got {n_actions}")
