"""Whole logged episodes as flat arrays, the input of the off-policy estimators.

    episodes = Episodes.from_flat(
        rewards, lengths=lengths, behaviour_logp=action_logp, target_logp=target_logp, ended=ended
    )
    episodes.n, episodes.excluded      # 118, {"abandoned": 2}

Pure: arrays in, arrays out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from storage.experience import endings
from storage.wording import counted

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
Endings = Sequence[str | None] | npt.NDArray[np.object_]

# how an episode may have ended; "unfinished" stands for null, an episode that has not
ENDINGS = (*endings.ENDINGS, "unfinished")
# the ends of these were not observed: their returns may be incomplete
NOT_WHOLE = (*endings.UNOBSERVED, "unfinished")
# a float32 log-softmax may give a logp of 1e-7 for a probability of 1
TOLERANCE = 1e-6
# the size of a table of episodes of similar length: 8 MB of float64
CELLS = 1 << 20


@dataclass(frozen=True, eq=False)
class Episodes:
    """Whole episodes, flat: the steps of the first, then those of the second, ...

    S is the number of steps of all n episodes. Create it with `from_flat`, `from_ragged` or
    `one_step`, which check their arguments.
    """

    rewards: FloatArray  # (S,)
    lengths: IntArray  # (n,) steps of each episode, >= 1
    behaviour_logp: FloatArray  # (S,) log propensity of the action taken; NaN = unknown
    target_logp: FloatArray | None = None  # (S,) of the same action; -inf = never taken
    q: FloatArray | None = None  # (S,) modelled value of the action taken
    v: FloatArray | None = None  # (S,) modelled value of the state under the target policy
    excluded: Mapping[str, int] = field(default_factory=dict)  # reason -> number of episodes
    # (n,) the unit of each episode; those of one unit are consecutive
    units: IntArray | None = None
    # (n,) in (0, 1], the probability that the episode was logged; None: 1
    pass_prob: FloatArray | None = None

    def __repr__(self) -> str:
        known = [
            name
            for name in ("target_logp", "q", "v", "units", "pass_prob")
            if getattr(self, name) is not None
        ]
        return (
            f"Episodes({counted(len(self.lengths), 'episode')}, "
            f"{counted(len(self.rewards), 'step')}; "
            f"with {', '.join(known) or 'rewards alone'}; excluded {dict(self.excluded)})"
        )

    @classmethod
    def from_flat(
        cls,
        rewards: npt.ArrayLike,
        *,
        lengths: npt.ArrayLike,
        behaviour_logp: npt.ArrayLike | None = None,
        target_logp: npt.ArrayLike | None = None,
        q: npt.ArrayLike | None = None,
        v: npt.ArrayLike | None = None,
        ended: Endings | None = None,
        leave_out: Sequence[str] = NOT_WHOLE,
        excluded: Mapping[str, int] | None = None,
        densities: bool = False,
        units: npt.ArrayLike | None = None,
        pass_prob: npt.ArrayLike | None = None,
    ) -> Episodes:
        """Check flat arrays (S,) and exclude the episodes that are not whole.

        `ended` is the ending of each of the n episodes (None: it has not ended, "unfinished");
        those whose ending is in `leave_out` are excluded and counted. `excluded` adds counts of
        episodes that the caller excluded before. `densities=True` allows logp above 0, as for
        densities of continuous actions. `units` (n,): consecutive episodes with the same integer
        are one sample for an interval. `pass_prob` (n,): the probability in (0, 1] that an episode
        was logged. Raises ValueError that names the episode and step of the first invalid number.
        """
        sizes = _lengths(lengths)
        total = int(sizes.sum())

        def column(name: str, given: npt.ArrayLike | None) -> FloatArray | None:
            return None if given is None else _column(name, given, total)

        behaviour = column("behaviour_logp", behaviour_logp)
        episodes = cls(
            _column("rewards", rewards, total),
            sizes,
            np.full(total, np.nan) if behaviour is None else behaviour,
            column("target_logp", target_logp),
            column("q", q),
            column("v", v),
            dict(excluded or {}),
            None if units is None else _units(units, sizes.size),
            None if pass_prob is None else _chances(pass_prob, sizes.size),
        )
        _check_numbers(episodes, np.inf if densities else TOLERANCE)
        return episodes if ended is None else _leave_out(episodes, ended, leave_out)

    @classmethod
    def from_ragged(
        cls,
        rewards: Sequence[npt.ArrayLike],
        *,
        behaviour_logp: Sequence[npt.ArrayLike] | None = None,
        target_logp: Sequence[npt.ArrayLike] | None = None,
        q: Sequence[npt.ArrayLike] | None = None,
        v: Sequence[npt.ArrayLike] | None = None,
        ended: Endings | None = None,
        leave_out: Sequence[str] = NOT_WHOLE,
        excluded: Mapping[str, int] | None = None,
        densities: bool = False,
    ) -> Episodes:
        """As `from_flat`, from one array (T_i,) per episode in each list."""
        sizes = [np.size(one) for one in rewards]

        def flat(name: str, given: Sequence[npt.ArrayLike] | None) -> FloatArray | None:
            return None if given is None else _concatenated(name, given, sizes)

        return cls.from_flat(
            _concatenated("rewards", rewards, sizes),
            lengths=np.asarray(sizes, dtype=np.int64),
            behaviour_logp=flat("behaviour_logp", behaviour_logp),
            target_logp=flat("target_logp", target_logp),
            q=flat("q", q),
            v=flat("v", v),
            ended=ended,
            leave_out=leave_out,
            excluded=excluded,
            densities=densities,
        )

    @classmethod
    def one_step(
        cls,
        rewards: npt.ArrayLike,
        *,
        behaviour_prob: npt.ArrayLike,
        target_prob: npt.ArrayLike,
        q: npt.ArrayLike | None = None,
        v: npt.ArrayLike | None = None,
        excluded: Mapping[str, int] | None = None,
    ) -> Episodes:
        """One-step episodes from probabilities (n,) of the action that was taken.

        `behaviour_prob` is in (0, 1], NaN if unknown; `target_prob` in [0, 1]. Raises ValueError.
        """
        n = np.size(rewards)
        behaviour = _column("behaviour_prob", behaviour_prob, n)
        target = _column("target_prob", target_prob, n)
        bad = (behaviour <= 0) | (behaviour > 1 + TOLERANCE)
        expected = "a probability in (0, 1], or nan if unknown"
        _refuse(bad, "behaviour_prob", behaviour, expected, np.ones(n, dtype=np.int64))
        bad = ~((target >= 0) & (target <= 1 + TOLERANCE))
        expected = "a probability in [0, 1]"
        _refuse(bad, "target_prob", target, expected, np.ones(n, dtype=np.int64))
        with np.errstate(divide="ignore"):
            target_logp = np.log(target)
        return cls.from_flat(
            rewards,
            lengths=np.ones(n, dtype=np.int64),
            behaviour_logp=np.log(behaviour),
            target_logp=target_logp,
            q=q,
            v=v,
            excluded=excluded,
        )

    @property
    def n(self) -> int:
        """The number of episodes."""
        return int(self.lengths.size)

    @property
    def starts(self) -> IntArray:
        """(n,) row of each episode's first step."""
        return np.cumsum(self.lengths) - self.lengths

    @property
    def t(self) -> IntArray:
        """(S,) index of each step in its episode, from 0."""
        return np.arange(self.rewards.size) - np.repeat(self.starts, self.lengths)

    def with_propensity(self) -> Episodes:
        """The episodes with a behaviour logp in every step; others are counted as `no_propensity`.

        Estimators that use importance weights call this themselves. Call it before `dm` or
        `v_behavior` to compare them with the others on the same episodes.
        """
        unknown = np.isnan(self.behaviour_logp)
        if not unknown.any():
            return self
        return self.without(np.logical_or.reduceat(unknown, self.starts), "no_propensity")

    def without(self, leave: BoolArray, reason: str) -> Episodes:
        """The episodes without those marked in `leave` (n,), which are counted under `reason`."""
        if not leave.any():
            return self
        rows = np.repeat(~leave, self.lengths)
        count = self.excluded.get(reason, 0) + int(leave.sum())
        return Episodes(
            self.rewards[rows],
            self.lengths[~leave],
            self.behaviour_logp[rows],
            None if self.target_logp is None else self.target_logp[rows],
            None if self.q is None else self.q[rows],
            None if self.v is None else self.v[rows],
            {**self.excluded, reason: count},
            None if self.units is None else self.units[~leave],
            None if self.pass_prob is None else self.pass_prob[~leave],
        )

    @property
    def unit_starts(self) -> IntArray:
        """The first episode of each unit (U,); without units every episode is one."""
        if self.units is None:
            return np.arange(self.n)
        return np.flatnonzero(np.append(True, np.diff(self.units) != 0))[: self.n]


def running_sums(values: FloatArray, lengths: IntArray) -> FloatArray:
    """(S,) sums from each episode's start; values (S,), lengths (n,).

    Computed in tables of episodes of similar length. One running sum over all S, minus its value at
    the start, would be shorter, but -inf (a probability of 0) and rounding in one episode would
    affect the following ones.
    """
    if values.size == lengths.size:
        return values
    order = np.argsort(lengths, kind="stable")
    sizes, starts = lengths[order], (np.cumsum(lengths) - lengths)[order]
    sums, begin = np.empty_like(values), 0
    while begin < sizes.size:
        shortest = int(sizes[begin])
        end = min(
            begin + max(1, CELLS // shortest),
            int(np.searchsorted(sizes, 2 * shortest, side="right")),
        )
        columns = np.arange(int(sizes[end - 1]))
        inside = columns < sizes[begin:end, None]
        rows = (starts[begin:end, None] + columns)[inside]
        table = np.zeros(inside.shape)
        table[inside] = values[rows]
        sums[rows] = np.cumsum(table, axis=1)[inside]
        begin = end
    return sums


def _column(name: str, given: npt.ArrayLike, total: int, of: str = "a step") -> FloatArray:
    try:
        column = np.asarray(given, dtype=np.float64)
    except (TypeError, ValueError) as problem:
        raise ValueError(f"{name}: expected numbers, one {of}: {problem}") from problem
    if column.shape != (total,):
        raise ValueError(f"{name}: expected shape ({total},), one number {of}, got {column.shape}")
    return column


def _units(given: npt.ArrayLike, n: int) -> IntArray:
    units = np.asarray(given)
    if units.shape != (n,) or (n and units.dtype.kind not in "iu"):
        raise ValueError(
            f"units: expected integers ({n},), one an episode, got {units.dtype} of shape "
            f"{units.shape}"
        )
    begins = np.flatnonzero(np.append(True, units[1:] != units[:-1])[:n])
    again = np.ones(begins.size, dtype=np.bool_)
    again[np.unique(units[begins], return_index=True)[1]] = False
    if again.any():
        episode = int(begins[again.argmax()])
        raise ValueError(
            f"units: expected the episodes of a unit to follow each other, got {units[episode]} "
            f"again in episode {episode}"
        )
    return units.astype(np.int64)


def _chances(given: npt.ArrayLike, n: int) -> FloatArray:
    chances = _column("pass_prob", given, n, "an episode")
    bad = ~((chances > 0) & (chances <= 1 + TOLERANCE))
    _refuse(bad, "pass_prob", chances, "a probability in (0, 1]", np.ones(n, dtype=np.int64))
    return chances


def _lengths(given: npt.ArrayLike) -> IntArray:
    lengths = np.asarray(given)
    if lengths.ndim != 1 or (lengths.size and lengths.dtype.kind not in "iu"):
        raise ValueError(
            f"lengths: expected integers (n,), got {lengths.dtype} of shape {lengths.shape}"
        )
    if lengths.size and lengths.min() < 1:
        raise ValueError(
            f"lengths: expected at least 1 step, got {lengths.min()} for episode "
            f"{int(lengths.argmin())}; leave it out and count it with excluded={{'empty': ...}}"
        )
    return lengths.astype(np.int64)


def _concatenated(name: str, given: Sequence[npt.ArrayLike], sizes: Sequence[int]) -> FloatArray:
    if len(given) != len(sizes):
        raise ValueError(f"{name}: expected {len(sizes)} episodes, got {len(given)}")
    columns = []
    for episode, (one, size) in enumerate(zip(given, sizes, strict=True)):
        columns.append(_column(f"{name} of episode {episode}", one, size))
    return np.concatenate(columns) if columns else np.empty(0)


def _check_numbers(episodes: Episodes, highest_logp: float) -> None:
    """Raise ValueError for the first number that no estimator can use."""
    behaviour, target = episodes.behaviour_logp, episodes.target_logp
    behaviour_is_bad = np.isinf(behaviour) | (behaviour > highest_logp)
    lengths = episodes.lengths
    _refuse(
        behaviour_is_bad,
        "behaviour_logp",
        behaviour,
        "the log of a probability in (0, 1], or nan if unknown",
        lengths,
    )
    if target is not None:
        target_is_bad = np.isnan(target) | np.isposinf(target) | (target > highest_logp)
        expected = "the log of a probability in [0, 1]"
        _refuse(target_is_bad, "target_logp", target, expected, lengths)
    for name in ("rewards", "q", "v"):
        column = getattr(episodes, name)
        if column is not None:
            _refuse(~np.isfinite(column), name, column, "a finite number", lengths)


def _refuse(
    bad: BoolArray, name: str, column: FloatArray, expected: str, lengths: IntArray
) -> None:
    if not bad.any():
        return
    row = int(bad.argmax())
    episode = int(np.searchsorted(np.cumsum(lengths), row, side="right"))
    step = row - int(lengths[:episode].sum())
    raise ValueError(
        f"{name}: expected {expected}, got {column[row]} in episode {episode}, step {step}"
    )


def _leave_out(
    episodes: Episodes,
    ended: Sequence[str | None] | npt.NDArray[np.object_],
    reasons: Sequence[str],
) -> Episodes:
    unknown = [word for word in reasons if word not in ENDINGS]
    if unknown:
        raise ValueError(f"leave_out: expected words of {ENDINGS}, got {unknown}")
    words = np.array(ended, dtype=object)
    if words.shape != (episodes.n,):
        raise ValueError(f"ended: expected {episodes.n} words, one an episode, got {words.shape}")
    # a data frame may contain NaN instead of None; NaN differs from itself
    words[(words == np.array(None)) | (words != words)] = "unfinished"
    strange = ~np.isin(words, np.array(ENDINGS, dtype=object))
    if strange.any():
        episode = int(strange.argmax())
        raise ValueError(
            f"ended: expected one of {ENDINGS[:-1]} or None, got {words[episode]!r} "
            f"in episode {episode}"
        )
    for reason in reasons:
        gone = words == reason
        episodes, words = episodes.without(gone, reason), words[~gone]
    return episodes
