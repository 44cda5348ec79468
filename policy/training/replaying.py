"""Filling the replay of an off-policy algorithm from shards, when a follower resumes.

A replay is not part of a checkpoint, because shards hold the same rows: those that the weights were
trained on, according to their lineage. The latest of them are read again. They are not counted as
read or trained on once more.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np

from policy.algorithms.learner import Learner
from storage.experience.interfaces import ReaderError
from storage.experience.range_set import RangeSet
from storage.experience.sample_batch import ORDINAL, STREAM
from storage.objects.opening import Root
from storage.reading.loading import ROW
from storage.reading.shard_reader import ShardReader
from storage.reading.untrained_rows import RunsByStream
from storage.wording import counted

log = logging.getLogger("headrace.trainer")

_READ_ROWS = 4096


def refill(
    learner: Learner, root: Root, policy_id: str, untrained: Callable[[], RunsByStream]
) -> None:
    """Fill an empty replay with the latest rows of the learner's lineage.

    `untrained` gives the rows of the lineage's ordinals that were not trained on: they stay out.
    Does nothing for an algorithm without a replay. What cannot be read is left out, with a warning.
    """
    algorithm: Any = learner.algorithm
    replay = getattr(algorithm, "replay", None)
    if replay is None or len(replay) or not learner.lineage:
        return
    newest = {name: _newest(ranges, replay.capacity) for name, ranges in learner.lineage.items()}
    left_out = {
        (stream, ordinal, row + i)
        for stream, runs in untrained().items()
        for ordinal, row, count in runs
        if newest.get(stream) and ordinal >= newest[stream][0][0]  # no others are read
        for i in range(count)
    }
    try:
        with ShardReader(
            root,
            policy_id=policy_id,
            schema_id=learner.policy.spec.schema_id,
            ordinals=newest,
            batch_size=_READ_ROWS,
            columns=(*learner.config.columns, ROW),
            retry_for=0.0,
        ) as reader:
            for batch in reader:
                identity = (batch[name].tolist() for name in (STREAM, ORDINAL, ROW))
                keep = [one not in left_out for one in zip(*identity, strict=True)]
                algorithm.refill(batch.take(np.array(keep, np.bool_)))
    except ReaderError as error:
        log.warning("some rows are missing in the replay: %s", error)
    log.info("the replay has %s that were trained on before", counted(len(replay), "row"))


def _newest(ranges: list[list[int]], count: int) -> list[list[int]]:
    """The last `count` of the ordinals, each of which has at least one row."""
    known = RangeSet.from_json(ranges)
    found, left = [], count
    for first, last in reversed(known.ranges()):
        if left <= 0:
            break
        found.append([max(first, last - left + 1), last])
        left -= last - first + 1
    return found[::-1]
