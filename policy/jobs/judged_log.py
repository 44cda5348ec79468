"""The episodes that a candidate is judged by, read from shards, and why the others are not.

log = read_log(root, policy_id, spec, reserve=Reserve(0.3), trained_on=[lineage, ...])
log.lengths, log.excluded            # whole episodes with propensities; reason -> episodes

Episodes stand in the order in which the collector received their last step: what was judged before
comes before what is new, as a bound needs that is looked at several times. The episodes of a unit
(storage.reading.shard_reader.Reserve) stand together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from policy.inference.preprocessors import columns_of
from policy.inference.spec import PolicySpec
from policy.progress import Progress
from storage.declarations.dropped_steps import Lost, dropped_steps
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
    concat_samples,
)
from storage.reading.ledger import Ledger, Ranges
from storage.reading.shard_reader import Reserve, ShardReader
from storage.spaces.descriptors import Discrete

__all__ = ["CERTAIN_LOGP", "JudgedLog", "read_log"]

Lineage = Mapping[str, RangeSet]

PASS_PROB, RECEIVED = "pass_prob", "received_ts"
_COLUMNS = (
    EPS_ID, "obs", "actions", REWARDS, ACTION_LOGP, AGENT_ID, "ended", PASS_PROB, RECEIVED,
)  # fmt: skip

CERTAIN_LOGP = -1e-12
"""Above it a propensity is 1: the logging policy did not choose, and no other action was possible.
"""


@dataclass(frozen=True, eq=False)
class JudgedLog:
    """Whole episodes with propensities: their steps one behind the other, S in all."""

    steps: SampleBatch
    flat: npt.NDArray[np.float32]  # (S, D) observations
    lengths: npt.NDArray[np.int64]  # (n,)
    units: npt.NDArray[np.int64]  # (n,) which unit an episode is of
    reserve: Reserve
    certain: SampleBatch  # the steps of probability 1, which are left out with their episodes
    certain_flat: npt.NDArray[np.float32]
    candidates: int  # whole episodes with propensities, those with certain steps too
    excluded: Mapping[str, int]  # why -> episodes
    not_read: Mapping[str, int]  # why -> steps
    skipped: Mapping[str, str]  # damaged shard -> why
    pass_prob: npt.NDArray[np.float64]  # (n,) that an episode was logged
    shard_rows: int  # steps of all episodes in the shards, judged by or not
    dropped: Lost  # what clients did not log, as they told the collectors of this root

    @property
    def one_step(self) -> bool:
        return bool((self.lengths == 1).all())

    @property
    def rows(self) -> dict[str, list[int]]:
        """Stream -> first and last ordinal that is judged by."""
        found: dict[str, list[int]] = {}
        if self.steps.count:
            streams = self.steps[STREAM].astype(str)
            for stream in np.unique(streams):
                ordinals = self.steps[ORDINAL][streams == stream]
                found[str(stream)] = [int(ordinals.min()), int(ordinals.max())]
        return found

    def left_out(self) -> str:
        """What was not used, in words."""
        counts = [f"{why}: {n} episodes" for why, n in self.excluded.items() if n]
        counts += [f"{why}: {n} steps" for why, n in self.not_read.items() if n]
        return ", ".join([*counts, *self.skipped.values()]) or "none were found"


def read_log(
    root: Path | str,
    policy_id: str,
    spec: PolicySpec,
    *,
    reserve: Reserve,
    trained_on: Sequence[Lineage],
    manifest: Mapping[str, Ranges] | None,
    since: int | None,
    until: int | None,
    retry_for: float,
    on_progress: Progress,
) -> JudgedLog:
    """The reserved episodes of the log, in memory.

    `trained_on`: lineages (stream -> ordinals) of policies; none of their episodes is judged by.
    """

    batches: list[SampleBatch] = []
    rows = 0
    with ShardReader(
        root,
        policy_id=policy_id,
        select=reserve.rows,
        ordinals=manifest,
        since=since,
        until=until,
        columns=tuple(dict.fromkeys((*_COLUMNS, *reserve.columns))),
        retry_for=retry_for,
    ) as reader:
        for batch in reader:
            batches.append(batch)
            rows += batch.count
            on_progress("reading", rows, None)
        not_read = {
            ("other_split" if why == "select" else why): n
            for why, n in reader.stats.excluded.items()
        }
        skipped = dict(reader.stats.excluded_shards)
    rows += sum(not_read.values())
    dropped = dropped_steps(Path(root))
    if not batches:
        none = np.empty((0, spec.flattener.size), np.float32)
        empty, lengths = SampleBatch(), np.empty(0, np.int64)
        return JudgedLog(
            empty,
            none,
            lengths,
            lengths,
            reserve,
            empty,
            none,
            0,
            {},
            not_read,
            skipped,
            np.empty(0),
            rows,
            dropped,
        )
    steps, lengths = _by_episode(concat_samples(batches), reserve)
    steps, lengths, excluded = _usable(steps, lengths, trained_on)
    candidates = len(lengths)
    certain = np.zeros(steps.count, np.bool_)
    if not isinstance(spec.action, Discrete) or spec.action.n > 1:
        certain = np.asarray(steps[ACTION_LOGP] >= CERTAIN_LOGP) & spec.layout.is_discrete
    left = steps.take(certain)
    steps, lengths, gone = _without(steps, lengths, _any(certain, lengths))
    if gone:
        excluded["certain"] = gone
    return JudgedLog(
        steps=steps,
        flat=_flat(spec, steps),
        lengths=lengths,
        units=_numbered(reserve.units(steps.take(np.cumsum(lengths) - lengths))),
        reserve=reserve,
        certain=left,
        certain_flat=_flat(spec, left),
        candidates=candidates,
        excluded=excluded,
        not_read=not_read,
        skipped=skipped,
        shard_rows=rows,
        dropped=dropped,
        pass_prob=np.asarray(steps[PASS_PROB], np.float64)[np.cumsum(lengths) - lengths],
    )


def _flat(spec: PolicySpec, steps: SampleBatch) -> npt.NDArray[np.float32]:
    return spec.flattener.columns(columns_of(spec.observation, "obs", steps))


def _numbered(names: list[str]) -> npt.NDArray[np.int64]:
    """Equal names by equal numbers, in order of their first appearance."""
    numbers: dict[str, int] = {}
    return np.array([numbers.setdefault(name, len(numbers)) for name in names], np.int64)


def _by_episode(steps: SampleBatch, reserve: Reserve) -> tuple[SampleBatch, npt.NDArray[np.int64]]:
    """(steps by episode and t, length of each episode), episodes as they were received, after the
    others of their unit."""
    keys = [
        np.unique(steps[STREAM].astype(str), return_inverse=True)[1],
        steps[EPISODE_ORDINAL],
        np.unique(steps[AGENT_ID].astype(str), return_inverse=True)[1],
    ]
    order = np.lexsort((steps[T], *reversed(keys)))
    first = np.zeros(steps.count, np.bool_)
    first[0] = True
    for key in keys:
        first[1:] |= np.diff(key[order]) != 0
    starts = np.flatnonzero(first)
    lengths = np.diff(np.append(starts, steps.count))
    received = np.maximum.reduceat(steps[RECEIVED][order], starts)
    place = np.argsort(received, kind="stable")
    units = _numbered(reserve.units(steps.take(order[starts[place]])))
    place = place[np.argsort(units, kind="stable")]
    begins = np.repeat(starts[place], lengths[place])
    ends = np.cumsum(lengths[place])
    within = np.arange(steps.count) - np.repeat(ends - lengths[place], lengths[place])
    return steps.take(order[begins + within]), lengths[place]


def _usable(
    steps: SampleBatch, lengths: npt.NDArray[np.int64], trained_on: Sequence[Lineage]
) -> tuple[SampleBatch, npt.NDArray[np.int64], dict[str, int]]:
    """The episodes that estimators can use, and why the others cannot be: one reason each."""
    last = np.cumsum(lengths) - 1
    first = last - lengths + 1
    ended, t = steps["ended"][last], steps[T]
    reasons = {
        "in_lineage": _any(_trained(steps, trained_on), lengths),
        "incomplete": (t[first] != 0) | (t[last] != lengths - 1),
        "unfinished": np.array([word is None for word in ended], np.bool_),
        "abandoned": np.asarray(ended == "abandoned", np.bool_),
        "broken": np.asarray(ended == "broken", np.bool_),
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


def _without(
    steps: SampleBatch, lengths: npt.NDArray[np.int64], leave: npt.NDArray[np.bool_]
) -> tuple[SampleBatch, npt.NDArray[np.int64], int]:
    """Less the episodes in `leave` (n,), and how many they were."""
    if not leave.any():
        return steps, lengths, 0
    return steps.take(np.repeat(~leave, lengths)), lengths[~leave], int(leave.sum())


def _trained(steps: SampleBatch, lineages: Sequence[Lineage]) -> npt.NDArray[np.bool_]:
    """(S,) whether a lineage has the row's ordinal."""
    found = np.zeros(steps.count, np.bool_)
    streams = steps[STREAM].astype(str)
    for lineage in lineages:
        ledger = Ledger(lineage)
        for stream in lineage:
            rows = streams == stream
            found[rows] |= ledger.contains(stream, steps[ORDINAL][rows])
    return found


def _any(marked: npt.NDArray[np.bool_], lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """(n,) episodes with a marked step."""
    if not lengths.size:
        return np.zeros(0, np.bool_)
    return np.logical_or.reduceat(marked, np.cumsum(lengths) - lengths)
