"""The episodes that a candidate is judged by, read from shards in blocks; others are counted.

    log = JudgedLog(spec, Reserve(0.3), trained_on=[lineage, ...])
    for block in log.blocks(selection, on_progress):   # whole episodes with propensities
        ...
    log.excluded                                     # reason -> episodes, once all are read

Episodes are in the order of their ordinals. So in one stream, episodes of an earlier look come
before new ones, as an interval for several looks requires.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from policy.data.log_selection import LogSelection
from policy.data.schemas import require_fit
from policy.inference.finite import LARGEST, NOT_FINITE, not_finite
from policy.inference.numpy_policy import NumpyPolicy
from policy.inference.preprocessors import columns_of
from policy.inference.spec import PolicySpec
from policy.judging.fold_policies import ALL_SEEN, RowsSeen
from policy.judging.tag_repeats import TagRepeats
from policy.ope.reward_ends import RewardEnds
from policy.progress import Progress
from storage.declarations.dropped_steps import Lost, dropped_steps
from storage.declarations.late_rewards import LateReward, late_rewards
from storage.experience.endings import UNOBSERVED
from storage.experience.range_set import RangeSet
from storage.experience.sample_batch import (
    ACTION_LOGP,
    AGENT_ID,
    EPISODE_ORDINAL,
    EPS_ID,
    ORDINAL,
    REWARDS,
    STREAM,
    SampleBatch,
    T,
)
from storage.reading.holdout import TAGS, Reserve, tag_names, tag_values
from storage.reading.ledger import Ledger
from storage.spaces.descriptors import Discrete
from storage.wording import counted

Lineage = Mapping[str, RangeSet]
BoolArray = npt.NDArray[np.bool_]
IntArray = npt.NDArray[np.int64]

PASS_PROB, TIME = "pass_prob", "ts"
JUDGED_BY = ("judged_by", "bar_by")
"""Columns with the number of the policy that judges a row (policy.judging.fold_policies): of the
weights to judge, and of the bar."""
_COLUMNS = (
    EPS_ID,
    "obs",
    "actions",
    REWARDS,
    ACTION_LOGP,
    AGENT_ID,
    "ended",
    PASS_PROB,
    TAGS,
    TIME,
)

CERTAIN_LOGP = -1e-12
"""Above it the propensity counts as 1: the logging policy could not choose another action."""
BLOCK_ROWS = 1 << 16
BLOCK_CELLS = 1 << 22  # numbers of a block's observations


@dataclass(frozen=True, eq=False)
class JudgedBlock:
    """n complete episodes with propensities; their S steps follow each other."""

    steps: SampleBatch
    flat: npt.NDArray[np.float32]  # (S, D) observations
    lengths: IntArray  # (n,)
    names: list[str]  # (n,) the name of each episode's unit
    untagged: int  # episodes without the tag whose values are the units
    other_tags: set[str]  # the names of the tags that these have
    times: npt.NDArray[np.float64]  # (n,) the client's time of the first step, microseconds
    tags: Mapping[str, list[str | None]]  # name -> values (n,)
    lost: BoolArray  # (n,) abandoned or broken; their rewards are the default
    certain: SampleBatch  # steps with propensity 1; their episodes are left out
    capped: int  # steps whose rewards were above the cap
    excluded: Mapping[str, int]  # reason -> episodes

    @property
    def starts(self) -> IntArray:
        return np.cumsum(self.lengths) - self.lengths

    @property
    def pass_prob(self) -> npt.NDArray[np.float64]:
        """(n,) the probability that each episode was logged."""
        return np.asarray(self.steps[PASS_PROB], np.float64)[self.starts]


class JudgedLog:
    """Selects the episodes to judge by, and counts all episodes while they are read."""

    def __init__(
        self,
        spec: PolicySpec,
        reserve: Reserve,
        trained_on: Sequence[RowsSeen],
        reward_default: float = 0.0,
        *,
        before: Lineage | None = None,
        cap: float = math.inf,
        cap_from: Lineage | None = None,
    ) -> None:
        """`trained_on`: of the judged policy and of its bar. Episodes that all policies of one of
        them have seen are left out, as are those `before`.

        `reward_default`: the return of an abandoned or broken episode, as in a canary. Rewards
        count up to `cap`; the episodes that it was taken from (`cap_from`) are left out.
        """
        self.reserve, self._spec, self._trained_on = reserve, spec, trained_on
        self._default = reward_default
        self._before, self.cap, self._cap_from = before or {}, cap, cap_from or {}
        self.earned = RewardEnds()  # by all steps, judged or not
        self.capped = self.steps = 0  # judged steps that earned more than the cap; all of them
        self.episodes = self.candidates = 0  # judged by; these and those with certain steps
        self.excluded: Counter[str] = Counter()  # reason -> episodes
        self.not_read: dict[str, int] = {}  # reason -> steps
        self.skipped: dict[str, str] = {}  # damaged shard -> reason
        self.rows: dict[str, list[int]] = {}  # stream -> first and last ordinal judged by
        self.shard_rows = 0  # steps of all episodes in the shards
        self.dropped = Lost(0, 0)  # dropped by clients, as they reported it to the collectors
        self.late: Counter[LateReward] = Counter()  # rewards that came too late
        self.one_step = True
        self.sampled = 0  # episodes with pass_prob < 1
        self.lost = 0  # abandoned or broken ones among the episodes
        self.tag_repeats = TagRepeats()
        self.untagged = 0  # episodes without the tag whose values are the units
        self._other_tags: set[str] = set()
        self._chances = (1.0, 0.0)  # the smallest and the largest pass_prob
        self._units: dict[str, int] = {}

    @property
    def torn(self) -> bool:
        """Whether episodes have different pass_prob, and a unit has several episodes."""
        several = self._chances[0] < self._chances[1]
        return several and bool(self._units) and len(self._units) < self.episodes

    def blocks(self, selection: LogSelection, on_progress: Progress) -> Iterator[SampleBatch]:
        """Read batches of logged episodes; pass each to `prepared`, then its result to `note`."""
        rows = 0
        self.dropped = dropped_steps(selection.root)
        self.late = late_rewards(selection.root, selection.policy_id)
        size = self._spec.flattener.size
        with selection.reader(
            mode="episodes",
            batch_size=rows_of_block(size),
            select=self._judged_rows,
            incomplete=True,
            columns=tuple(dict.fromkeys((*_COLUMNS, *self.reserve.columns))),
        ) as reader:
            for batch in reader:
                if reader.spaces is not None:
                    require_fit(reader.spaces, (self._spec.observation, self._spec.action))
                rows += batch.count
                on_progress("reading", rows, None)
                yield batch
            selection.count_other_schemas(reader)
            self.not_read = {
                ("not_held_out" if why == "select" else why): n
                for why, n in reader.stats.excluded.items()
            }
            self.skipped = dict(reader.stats.excluded_shards)
        self.shard_rows = rows + sum(self.not_read.values())

    def _judged_rows(self, batch: SampleBatch) -> BoolArray:
        """(N,) whether each row is reserved; notes all rewards."""
        self.earned.add(np.minimum(np.asarray(batch[REWARDS], np.float64), self.cap))
        return self.reserve.rows(batch)

    def prepared(self, steps: SampleBatch, policies: Sequence[NumpyPolicy] = ()) -> JudgedBlock:
        """Select the episodes to judge by from a batch. Safe to call from several threads.

        Episodes whose observations overflow in one of the `policies` are left out, too.
        """
        spec = self._spec
        lengths = lengths_of(steps)
        for name, seen in zip(JUDGED_BY, self._trained_on, strict=False):
            steps[name] = seen.chosen(steps, lengths)
        left_out = {"before_live": self._before, "first_tenth": self._cap_from}
        steps, lengths, excluded = _usable(steps, lengths, left_out)
        odd = _any(_not_finite(steps, spec, policies), lengths)
        steps, lengths, gone = _without(steps, lengths, odd)
        if gone:
            excluded[NOT_FINITE] = gone
        certain = np.zeros(steps.count, np.bool_)
        if not isinstance(spec.action, Discrete) or spec.action.n > 1:
            certain = np.asarray(steps[ACTION_LOGP] >= CERTAIN_LOGP) & spec.layout.is_discrete
        left = steps.take(certain)
        steps, lengths, gone = _without(steps, lengths, _any(certain, lengths))
        if gone:
            excluded["certain"] = gone
        earned = np.asarray(steps[REWARDS], np.float64)
        steps[REWARDS] = np.minimum(earned, self.cap)
        heads = steps.take(np.cumsum(lengths) - lengths)
        lost = np.isin(steps["ended"][np.cumsum(lengths) - 1], UNOBSERVED)
        steps = self._with_default(steps, lengths, lost)
        untagged = heads.take(~self.reserve.tagged(heads))
        return JudgedBlock(
            steps=steps,
            flat=spec.flattener.columns(columns_of(spec.observation, "obs", steps)),
            lengths=lengths,
            names=self.reserve.units(heads),
            untagged=untagged.count,
            other_tags=tag_names(untagged) if untagged.count else set(),
            times=np.asarray(heads[TIME], np.float64),
            tags=tag_values(heads),
            lost=lost,
            certain=left,
            capped=int((earned > self.cap).sum()),
            excluded=excluded,
        )

    def _with_default(self, steps: SampleBatch, lengths: IntArray, lost: BoolArray) -> SampleBatch:
        """The steps, with the default as the return of the lost episodes (n,)."""
        if not lost.any():
            return steps
        rewards = np.where(np.repeat(lost, lengths), 0.0, steps[REWARDS])
        rewards[(np.cumsum(lengths) - 1)[lost]] = self._default
        return SampleBatch({**steps, REWARDS: rewards})

    def note(self, block: JudgedBlock) -> IntArray | None:
        """Count a block. Returns the number of each episode's unit (n,), or None without units."""
        self.episodes += len(block.lengths)
        self.steps, self.capped = self.steps + block.steps.count, self.capped + block.capped
        self.untagged, self.lost = self.untagged + block.untagged, self.lost + int(block.lost.sum())
        self._other_tags |= block.other_tags
        if not self.reserve.cluster:
            self.tag_repeats.add(block.tags)
        self.excluded.update(block.excluded)
        self.candidates += len(block.lengths) + block.excluded.get("certain", 0)
        if not block.lengths.size:
            return None
        self.one_step &= bool((block.lengths == 1).all())
        streams = block.steps[STREAM].astype(str)
        for stream in np.unique(streams):
            ordinals = block.steps[ORDINAL][streams == stream]
            first, last = self.rows.get(str(stream), [2**63 - 1, -1])
            self.rows[str(stream)] = [
                min(first, int(ordinals.min())),
                max(last, int(ordinals.max())),
            ]
        chances, (low, high) = block.pass_prob, self._chances
        self.sampled += int((chances < 1).sum())
        self._chances = min(low, float(chances.min())), max(high, float(chances.max()))
        if not self.reserve.cluster:
            return None
        known = self._units
        return np.array([known.setdefault(name, len(known)) for name in block.names], np.int64)

    def require_tag(self) -> None:
        """Raise ValueError, with the known tags, if no judged episode has the cluster's."""
        if self.episodes and self.untagged == self.episodes:
            self.reserve.require_tag(self._other_tags)

    def left_out(self) -> str:
        """The counts of what was not used, as text."""
        counts = [f"{why}: {counted(n, 'episode')}" for why, n in self.excluded.items() if n]
        words = {"time": "outside the period", "other_policy": "of other policies"}
        counts += [
            f"{counted(n, 'step')} {words[why]}" if why in words else f"{why}: {counted(n, 'step')}"
            for why, n in self.not_read.items()
            if n
        ]
        return ", ".join([*counts, *self.skipped.values()]) or "none were found"


def rows_of_block(size: int) -> int:
    """The rows of a block of observations with `size` numbers."""
    return max(1, min(BLOCK_ROWS, BLOCK_CELLS // max(1, size)))


def lengths_of(steps: SampleBatch) -> IntArray:
    """(n,) the number of rows of each episode or track; the rows of one follow each other."""
    begins = np.zeros(steps.count, np.bool_)
    begins[:1] = True
    for name in (STREAM, EPISODE_ORDINAL, AGENT_ID):
        begins[1:] |= steps[name][1:] != steps[name][:-1]
    return np.diff(np.append(np.flatnonzero(begins), steps.count))


def _usable(
    steps: SampleBatch,
    lengths: npt.NDArray[np.int64],
    left_out: Mapping[str, Lineage],
) -> tuple[SampleBatch, npt.NDArray[np.int64], dict[str, int]]:
    """(steps, lengths) of the usable episodes, and the number of others by their first reason.

    `left_out`: reason -> the ordinals that it excludes.
    """
    last = np.cumsum(lengths) - 1
    first = last - lengths + 1
    ended, t = steps["ended"][last], steps[T]
    reasons: dict[str, npt.NDArray[np.bool_]] = {
        "in_lineage": np.any([steps[by][first] == ALL_SEEN for by in JUDGED_BY if by in steps], 0),
        **{why: _any(_contained(steps, rows), lengths) for why, rows in left_out.items()},
        "incomplete": (t[first] != 0) | (t[last] != lengths - 1),
        "unfinished": np.array([word is None for word in ended], np.bool_),
        "no_propensity": _any(np.isnan(steps[ACTION_LOGP]), lengths),
    }
    leave, excluded = np.zeros(len(lengths), np.bool_), {}
    for reason, episodes in reasons.items():
        number = int((episodes & ~leave).sum())
        if number:
            excluded[reason] = number
        leave |= episodes
    steps, lengths, _ = _without(steps, lengths, leave)
    return steps, lengths, excluded


def _not_finite(
    steps: SampleBatch, spec: PolicySpec, policies: Sequence[NumpyPolicy]
) -> npt.NDArray[np.bool_]:
    """(S,) whether a step has numbers beyond float32, or a policy computes such from it.

    The weights 1 / propensity and 1 / pass_prob are such numbers, too, but 1 / density is not.
    """
    found = not_finite(steps, (REWARDS,), "obs", "actions", ACTION_LOGP)
    found |= steps[PASS_PROB] < 1 / LARGEST
    if spec.layout.is_discrete:
        found |= steps[ACTION_LOGP] < -math.log(LARGEST)
    for policy in policies:
        observed = columns_of(policy.spec.observation, "obs", steps)
        found |= ~policy.where_finite(policy.flatten(observed))
    return found


def _without(
    steps: SampleBatch, lengths: npt.NDArray[np.int64], leave: npt.NDArray[np.bool_]
) -> tuple[SampleBatch, npt.NDArray[np.int64], int]:
    """(steps, lengths) without the episodes marked in `leave` (n,), and the number of these."""
    if not leave.any():
        return steps, lengths, 0
    return steps.take(np.repeat(~leave, lengths)), lengths[~leave], int(leave.sum())


def _contained(steps: SampleBatch, ordinals: Lineage) -> npt.NDArray[np.bool_]:
    """(S,) whether each row's ordinal is among these."""
    found = np.zeros(steps.count, np.bool_)
    streams, ledger = steps[STREAM].astype(str), Ledger(ordinals)
    for stream in ordinals:
        rows = streams == stream
        found[rows] |= ledger.contains(stream, steps[ORDINAL][rows])
    return found


def _any(marked: npt.NDArray[np.bool_], lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """(n,) whether any step of the episode is marked (S,)."""
    if not lengths.size:
        return np.zeros(0, np.bool_)
    return np.logical_or.reduceat(marked, np.cumsum(lengths) - lengths)
