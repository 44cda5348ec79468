"""Whether a log has episodes more than once, under other ids.

    repeats = Repeats()
    repeats.add(fingerprints(judged), units=None)
    repeats.check().passed

A file that grows and is imported again, or a retry that makes a new id, repeats episodes; then
intervals are too narrow. Episodes are alike by chance as well, if few observations, actions and
rewards are possible. How often follows from the propensities. n is the number of episodes. Pure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from scipy.special import chdtrc

from policy.ope.diagnostics import Diagnostic
from policy.ope.propensities import ActionCells
from storage.wording import counted

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]
IntArray = npt.NDArray[np.int64]
Hashes = npt.NDArray[np.uint64]

ERROR = 1e-4
"""Of each of three tests, in a log without repeats."""
MOST_SHARE = 0.01
MOST_KEPT = 1 << 18  # episodes
LEAST_EXPECTED = 20.0  # events of an action in a context whose counts are tested
_ODD = 0x9E3779B97F4A7C15


class ToFingerprint(Protocol):
    """n episodes with S steps; `policy.ope.judgement.Judged`."""

    @property
    def rewards(self) -> FloatArray: ...
    @property
    def lengths(self) -> IntArray: ...
    @property
    def behaviour_logp(self) -> FloatArray: ...
    @property
    def flat(self) -> npt.NDArray[np.floating[Any]]: ...
    @property
    def taken(self) -> IntArray | None: ...
    @property
    def cells(self) -> ActionCells | None: ...
    @property
    def discrete(self) -> bool: ...
    @property
    def times(self) -> FloatArray | None: ...


@dataclass(frozen=True, eq=False)
class Fingerprints:
    """Hashes (n,) of episodes, and the probabilities of their actions."""

    context: Hashes  # of the first observation
    drawn: Hashes  # of all observations, actions and propensities
    whole: Hashes  # of these and the rewards
    times: Hashes  # when each began
    probability: FloatArray  # of all actions together; 0 for densities
    one_step: bool

    def taken(self, rows: BoolArray | IntArray) -> Fingerprints:
        """Some of the episodes."""
        return replace(self, **{name: getattr(self, name)[rows] for name in _ARRAYS})


_ARRAYS = ("context", "drawn", "whole", "times", "probability")


def fingerprints(data: ToFingerprint) -> Fingerprints:
    """The fingerprints of episodes. Equal ones differ with a probability of about 2^-64."""
    starts = np.cumsum(data.lengths) - data.lengths
    observed = _hashed(np.asarray(data.flat))
    acted = _hashed(np.asarray(data.behaviour_logp)[:, None])
    if data.taken is not None:
        acted = _mixed(acted, data.taken.astype(np.uint64))
    elif data.cells is not None:
        acted = _mixed(acted, _hashed(data.cells.numbers.astype(np.float64)))
    place = np.arange(data.rewards.size) - np.repeat(starts, data.lengths)
    drawn = _mixed(_mixed(observed, acted), place.astype(np.uint64))
    whole = _mixed(drawn, _hashed(np.asarray(data.rewards)[:, None]))
    times = np.zeros(starts.size) if data.times is None else data.times
    logp = np.add.reduceat(data.behaviour_logp, starts)
    return Fingerprints(
        context=observed[starts],
        drawn=np.add.reduceat(drawn, starts),
        whole=np.add.reduceat(whole, starts),
        times=_hashed(times[:, None]),
        probability=np.exp(np.minimum(logp, 0.0)) if data.discrete else np.zeros(starts.size),
        one_step=bool((data.lengths == 1).all()),
    )


class Repeats:
    """The fingerprints of a log's episodes, or of those with a share of all contexts."""

    def __init__(self) -> None:
        self._kept: list[tuple[Fingerprints, IntArray]] = []
        self._count, self._share = 0, 1.0
        self._by_unit, self._timed = False, True
        self._sampled: set[float] = set()

    def add(
        self,
        found: Fingerprints,
        units: IntArray | None,
        *,
        timed: bool = True,
        pass_prob: FloatArray | None = None,
    ) -> None:
        """Add n episodes with their units (n,). `timed`: whether their times are known.

        If `pass_prob` (n,) varies, actions are not logged as often as they are taken, and their
        counts are not tested.
        """
        self._by_unit |= units is not None
        if pass_prob is not None and pass_prob.size:
            self._sampled |= {float(pass_prob.min()), float(pass_prob.max())}
        self._timed &= timed
        given = np.zeros(found.whole.size, np.int64) if units is None else units
        self._keep(found, given)
        while self._count > MOST_KEPT:
            self._share /= 2
            held, self._kept, self._count = self._kept, [], 0
            for one, own in held:
                self._keep(one, own)

    def check(self) -> Diagnostic:
        """Whether more than 1 % of the episodes repeat earlier ones beyond what chance predicts."""
        if not self._count:
            if self._share < 1:
                return _diagnostic(
                    0.0, "not tested: too many episodes begin with equal observations"
                )
            return _diagnostic(0.0, "no episode is in the log twice")
        every = Fingerprints(
            **{
                name: np.concatenate([getattr(held, name) for held, _ in self._kept])
                for name in _ARRAYS
            },
            one_step=all(held.one_step for held, _ in self._kept),
        )
        units = np.concatenate([own for _, own in self._kept])
        if self._by_unit:  # what a unit repeats does not count more often
            key = _mixed(every.whole, units.astype(np.uint64))
            every = every.taken(np.sort(np.unique(key, return_index=True)[1]))
        n = every.whole.size
        if np.unique(every.context).size == n:  # so none of the following can be
            return _diagnostic(0.0, f"no episode of {n:,} begins like another one")
        if self._timed:
            at = replace(
                every,
                context=_mixed(every.context, every.times),
                whole=_mixed(every.whole, every.times),
            )
            repeated, excess = _beyond(at)
            if excess > MOST_SHARE * n:
                return _refused(
                    repeated, excess, n, "times, observations, actions and rewards", FILE
                )
        repeated, excess = _beyond(every)
        if excess > MOST_SHARE * n:
            return _refused(repeated, excess, n, "observations, actions and rewards", RETRY)
        if every.one_step and not self._by_unit and len(self._sampled) < 2:
            times = _dispersion(every)
            if times > 1 + MOST_SHARE:
                sentence = (
                    "the counts of actions near equal observations vary as if each episode was in "
                    f"the log {times:.1f} times: perhaps {FILE}, or "
                    f"{RETRY}; check and log each episode once"
                )
                return _diagnostic(1 - 1 / times, sentence, passed=False)
        sentence = (
            f"{counted(repeated, 'episode')} of {n:,} like an earlier one, as chance predicts"
        )
        return _diagnostic(max(0.0, excess) / n, sentence)

    def _keep(self, found: Fingerprints, units: IntArray) -> None:
        if self._share < 1:
            # other bits than those by which a dictionary or a sort would order
            chosen = (found.context * np.uint64(_ODD)) >> np.uint64(40) < self._share * 2**24
            found, units = found.taken(chosen), units[chosen]
        self._kept.append((found, units))
        self._count += units.size


FILE = "a file that grew was imported again without --name"
RETRY = "a retry made new ids (or one draw serves all episodes of a user: --cluster)"


def _refused(repeated: int, excess: float, n: int, what: str, cause: str) -> Diagnostic:
    sentence = (
        f"{counted(repeated, 'episode')} of {n:,} repeat an earlier one under another id, with the "
        f"same {what}; chance predicts {repeated - excess:,.0f}: perhaps {cause}; check and log "
        "each episode once"
    )
    return _diagnostic(excess / n, sentence, passed=False)


def _diagnostic(value: float, sentence: str, *, passed: bool = True) -> Diagnostic:
    return Diagnostic(
        name="repeats",
        value=value,
        threshold=MOST_SHARE,
        passed=passed,
        sentence=sentence,
        source="chosen here, beyond chance at 1 in 10,000 for each test (Freedman 1975)",
    )


def _beyond(given: Fingerprints) -> tuple[int, float]:
    """(episodes that repeat an earlier one, how many more than predicted; 0 if chance explains it).

    Given the earlier episodes with the same observation, the actions of one of them come again with
    a probability of at most the sum of theirs. By Freedman 1975, theorem 1.6, a sum of n such
    events is above the sum of these probabilities by x, with the variance v, with a probability of
    at most exp(-x^2 / (2 v + 2 x / 3)).
    """
    order = np.argsort(given.context, kind="stable")
    context = given.context[order]
    begins = np.append(True, context[1:] != context[:-1])
    group = np.cumsum(begins) - 1
    new_draw = _first(group, given.drawn[order])
    again = ~_first(group, given.whole[order])
    sums = np.cumsum(np.where(new_draw, given.probability[order], 0.0))
    before = np.append(0.0, sums[:-1])
    chance = np.clip(before - before[begins][group], 0.0, 1.0)
    excess, variance = float((again - chance).sum()), float((chance * (1 - chance)).sum())
    log = math.log(1 / ERROR)
    sure = log / 3 + math.sqrt(log**2 / 9 + 2 * variance * log)
    return int(again.sum()), excess if excess > sure else min(excess, 0.0)


def _first(group: IntArray, hashes: Hashes) -> BoolArray:
    """(n,) whether a hash is the first of its kind in its group, in the given order."""
    key = _mixed(hashes, group.astype(np.uint64))
    found = np.zeros(key.size, np.bool_)
    found[np.unique(key, return_index=True)[1]] = True
    return found


def _dispersion(given: Fingerprints) -> float:
    """How many times as large the variance of counts is as that of independent draws, or 1.

    Pearson 1900: the sum of (m - n p)^2 / (n p) over the actions of a context has a chi-squared
    distribution. It counts contexts whose actions' probabilities are all known: their sum is 1.
    """
    contexts, where = np.unique(given.context, return_inverse=True)
    draws = _mixed(given.drawn, where.astype(np.uint64))
    _, first, counts = np.unique(draws, return_index=True, return_counts=True)
    place, p = where[first], given.probability[first]
    size = np.bincount(where, minlength=contexts.size)
    total = np.bincount(place, p, contexts.size)
    expected = size[place] * p
    least = np.full(contexts.size, np.inf)
    np.minimum.at(least, place, expected)
    known = (np.abs(total - 1) < 1e-4) & (least >= LEAST_EXPECTED)
    chosen = known[place]
    statistic = float(((counts - expected)[chosen] ** 2 / expected[chosen]).sum())
    freedom = int(chosen.sum() - known.sum())
    if freedom < 1 or chdtrc(freedom, statistic) > ERROR:
        return 1.0
    return statistic / freedom


def _hashed(rows: npt.NDArray[Any]) -> Hashes:
    """(n,) hashes of rows (n, D), by a random linear function of their bits."""
    kind = np.uint32 if rows.dtype == np.float32 else np.uint64
    bits = np.ascontiguousarray(rows if kind is np.uint32 else rows.astype(np.float64)).view(kind)
    factors = np.random.default_rng(7).integers(1, 2**63, size=rows.shape[1] + 1, dtype=np.uint64)
    total = np.full(len(rows), factors[-1], np.uint64)
    for column, factor in zip(bits.T, factors[:-1] * 2 + 1, strict=True):
        total += _scrambled(column.astype(np.uint64) * factor)
    return _scrambled(total)


def _mixed(one: Hashes, other: Hashes) -> Hashes:
    return _scrambled(one * np.uint64(_ODD) + _scrambled(other))


def _scrambled(numbers: Hashes) -> Hashes:
    """Steele, Lea & Flood 2014, SplitMix: figure 16, the finalizer."""
    found = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    found = (found ^ (found >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return found ^ (found >> np.uint64(31))
