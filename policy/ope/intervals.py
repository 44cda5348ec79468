"""Intervals around an estimate: Student-t, and the bootstrap over whole episodes.

    interval = StudentT(level=0.9)
    interval = Bootstrap(np.random.default_rng(7), resamples=1000)

An estimate is a function of sums over episodes (`Sums`, `PerStepSums`), from which both intervals
are computed. The bootstrap weights each episode by how often it was drawn. The delta method gives
the standard error of a ratio of sums. Pure: randomness is passed as a Generator.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt
from scipy.special import stdtrit

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

# the size of the table of bootstrap counts: 8 MB of float64
CELLS = 1 << 20


class Resampled(Protocol):
    """An estimate that can be recomputed from weighted episodes."""

    @property
    def n(self) -> int:
        """The number of episodes."""

    def value(self, counts: FloatArray) -> FloatArray:
        """(b,) estimates; counts (b, n) says how often each episode is used. NaN: undefined."""

    def influence(self) -> FloatArray:
        """(n,) the influence of each episode on the estimate, with mean 0: value ~ truth + mean."""

    def weighed(self, by: FloatArray) -> Resampled:
        """The same estimate with each episode counted `by` (n,) times."""


@dataclass(frozen=True, eq=False)
class Sums:
    """mean(base) + sum(numerator) / sum(denominator); either part may be missing.

    With `by` (n,) the mean is weighted: sum(by base) / sum(by).
    """

    base: FloatArray | None = None  # (n,)
    numerator: FloatArray | None = None  # (n,)
    denominator: FloatArray | None = None  # (n,)
    by: FloatArray | None = None  # (n,)

    def weighed(self, by: FloatArray) -> Sums:
        numerator = None if self.numerator is None else by * self.numerator
        denominator = None if self.denominator is None else by * self.denominator
        return Sums(self.base, numerator, denominator, by)

    @property
    def n(self) -> int:
        column = self.numerator if self.base is None else self.base
        return 0 if column is None else int(column.size)

    def value(self, counts: FloatArray) -> FloatArray:
        total = np.zeros(counts.shape[0])
        if self.base is not None:
            if self.by is None:
                total += counts @ self.base / self.n
            else:
                total += counts @ (self.by * self.base) / (counts @ self.by)
        if self.numerator is not None and self.denominator is not None:
            total += _divided(counts @ self.numerator, counts @ self.denominator)
        return total

    def influence(self) -> FloatArray:
        """For a ratio R = N / D: (N_i - R D_i) / mean(D).

        Owen 2013, Monte Carlo theory, methods and examples, section 9.2 gives the standard error of
        a self-normalised mean in this form.
        """
        total = np.zeros(self.n)
        if self.base is not None:
            if self.by is None:
                total += self.base - self.base.mean()
            else:
                mean = (self.by @ self.base) / self.by.sum()
                total += self.by * (self.base - mean) / self.by.mean()
        if self.numerator is not None and self.denominator is not None:
            ratio = self.numerator.sum() / self.denominator.sum()
            total += (self.numerator - ratio * self.denominator) / self.denominator.mean()
        return total


@dataclass(frozen=True, eq=False)
class PerStepSums:
    """sum_t g^t (sum_i w_it r_it / sum_i w_it); an ended episode keeps its last weight, r = 0."""

    weights: FloatArray  # (S,) up to and including each step
    rewards: FloatArray  # (S,)
    lengths: IntArray  # (n,)
    gamma: float

    def weighed(self, by: FloatArray) -> PerStepSums:
        return replace(self, weights=self.weights * np.repeat(by, self.lengths))

    @property
    def n(self) -> int:
        return int(self.lengths.size)

    def denominators(self) -> FloatArray:
        """(T_max,) sum of the weights at each step."""
        return self._totals(np.ones(self.n))[1]

    def value(self, counts: FloatArray) -> FloatArray:
        discount = self._discount()
        values = np.empty(len(counts))
        for index, row in enumerate(counts):
            values[index] = discount @ _divided(*self._totals(row))
        return values

    def influence(self) -> FloatArray:
        numerators, denominators = self._totals(np.ones(self.n))
        means = numerators / denominators
        scale = self.n * self._discount() / denominators  # (T_max,)
        t = self._t()
        steps = scale[t] * self.weights * (self.rewards - means[t])
        ends = np.cumsum(self.lengths)
        alive = np.add.reduceat(steps, ends - self.lengths)
        # the kept weight's contribution at all steps from the episode's end to T_max, with reward 0
        later = np.append(np.cumsum((scale * means)[::-1])[::-1], 0.0)
        influence: FloatArray = alive - self.weights[ends - 1] * later[self.lengths]
        return influence

    def _totals(self, counts: FloatArray) -> tuple[FloatArray, FloatArray]:
        """(T_max,) numerators and denominators with each episode used counts (n,) times."""
        longest, t = int(self.lengths.max()), self._t()
        weights = self.weights * np.repeat(counts, self.lengths)
        last = self.weights[np.cumsum(self.lengths) - 1] * counts
        kept = np.cumsum(_binned(self.lengths, last, longest + 1))[:longest]
        numerators = _binned(t, weights * self.rewards, longest)
        return numerators, _binned(t, weights, longest) + kept

    def _t(self) -> IntArray:
        starts = np.cumsum(self.lengths) - self.lengths
        return np.arange(self.weights.size) - np.repeat(starts, self.lengths)

    def _discount(self) -> FloatArray:
        steps: FloatArray = np.arange(int(self.lengths.max()), dtype=np.float64)
        discount: FloatArray = self.gamma**steps
        return discount


@dataclass(frozen=True)
class StudentT:
    """value +- t(n - 1) * stderr. For a ratio, stderr is the delta method's.

    Args:
        level: confidence of the interval, between 0 and 1.
    """

    level: float = 0.95

    def __post_init__(self) -> None:
        _check_level(self.level)

    def around(
        self, sums: Resampled, value: float, stderr: float, starts: IntArray | None = None
    ) -> tuple[float, float]:
        """(low, high); unbounded if stderr is not finite (one unit).

        `starts`: the first episode of each unit; by default each episode is one.
        """
        if not np.isfinite(stderr):
            return -np.inf, np.inf
        units = sums.n if starts is None else len(starts)
        half = stderr * float(stdtrit(units - 1, 0.5 + self.level / 2))
        return value - half, value + half


@dataclass(frozen=True, eq=False)
class Bootstrap:
    """Percentiles of the estimate over resamples of whole episodes, drawn with replacement.

    Efron & Tibshirani 1993, An Introduction to the Bootstrap, chapter 13. Time: resamples * n. A
    resample without any weight has no ratio; it counts as -inf for the lower limit and as +inf for
    the upper one, so that the interval is not too narrow.

    Args:
        rng: draws the resamples.
        level: confidence of the interval, between 0 and 1.
        resamples: how many are drawn.
    """

    rng: np.random.Generator
    level: float = 0.95
    resamples: int = 1000

    def __post_init__(self) -> None:
        _check_level(self.level)
        if self.resamples < 1:
            raise ValueError(f"resamples: expected at least 1, got {self.resamples}")

    def around(
        self, sums: Resampled, value: float, stderr: float, starts: IntArray | None = None
    ) -> tuple[float, float]:
        """As `StudentT.around`; draws whole units."""
        if not np.isfinite(stderr):
            return -np.inf, np.inf
        begins = np.arange(sums.n) if starts is None else starts
        sizes = np.diff(np.append(begins, sums.n))
        at_once = max(1, CELLS // sums.n)
        chunks = [
            sums.value(
                np.repeat(
                    self._counts(min(at_once, self.resamples - done), len(sizes)), sizes, axis=1
                )
            )
            for done in range(0, self.resamples, at_once)
        ]
        values, tail = np.concatenate(chunks), (1 - self.level) / 2
        lowest = np.where(np.isnan(values), -np.inf, values)
        highest = np.where(np.isnan(values), np.inf, values)
        return (
            float(np.quantile(lowest, tail, method="lower")),
            float(np.quantile(highest, 1 - tail, method="higher")),
        )

    def _counts(self, rows: int, n: int) -> FloatArray:
        """(rows, n) how often each episode was drawn in each resample."""
        drawn = self.rng.integers(0, n, size=(rows, n)) + n * np.arange(rows)[:, None]
        counted = np.bincount(drawn.ravel(), minlength=rows * n)
        return counted.reshape(rows, n).astype(np.float64)


Interval = StudentT | Bootstrap


def _binned(bins: IntArray, values: FloatArray, size: int) -> FloatArray:
    return np.bincount(bins, values, size).astype(np.float64, copy=False)


def _divided(numerators: FloatArray, denominators: FloatArray) -> FloatArray:
    """The quotients; NaN where the denominator is 0."""
    undefined = np.full_like(numerators, np.nan)
    return np.divide(numerators, denominators, out=undefined, where=denominators > 0)


def _check_level(level: float) -> None:
    if not 0 < level < 1:
        raise ValueError(f"level: expected a share in (0, 1), got {level}")
