"""The checks of a policy's log that need no candidate: propensities and repeats.

    for check in review("run", "default"):
        print(check.sentence)

`evaluate` makes the same checks of the episodes that it judges by; this reads all of them.
"""

from __future__ import annotations

import numpy as np

from policy.data.log_selection import LogSelection
from policy.inference.preprocessors import Flattener, columns_of
from policy.judging.action_cells import cells_of
from policy.judging.judged_log import lengths_of, rows_of_block
from policy.ope.diagnostics import Diagnostic
from policy.ope.judgement import Judged
from policy.ope.propensities import Propensities
from policy.ope.repeats import Repeats, fingerprints
from policy.progress import Progress, no_progress
from storage.experience.sample_batch import ACTION_LOGP, EPS_ID, REWARDS, SampleBatch
from storage.objects.opening import Root
from storage.reading.holdout import TAGS, tag_values
from storage.reading.retries import RETRY_FOR
from storage.reading.shard_reader import EndOfInput, Reserve
from storage.spaces.descriptors import Box, Discrete, Space, SpaceError
from storage.spaces.leaves import leaves

__all__ = ["review"]

TIME = "ts"
_COLUMNS = (EPS_ID, "obs", "actions", REWARDS, ACTION_LOGP, "agent_id", TIME, TAGS)


def review(
    root: Root,
    policy_id: str,
    *,
    retry_for: float = RETRY_FOR,
    on_progress: Progress = no_progress,
) -> list[Diagnostic]:
    """Check all episodes of a policy. Raises the errors of reading its shards."""
    given = {"since": None, "until": None, "manifest": None, "schema_id": None}
    selection = LogSelection(root=root, policy_id=policy_id, retry_for=retry_for, **given)
    reading = _Review()
    rows = 0
    with selection.reader(
        mode="episodes",
        batch_size=rows_of_block(64),
        select=Reserve(1.0).rows,
        incomplete=True,
        columns=_COLUMNS,
    ) as reader:
        while True:
            try:
                batch = reader.next()
            except EndOfInput:
                break
            if reader.spaces is not None:
                reading.add(batch, *reader.spaces)
            rows += batch.count
            on_progress("checking the log", rows, None)
    return reading.checks()


class _Review:
    def __init__(self) -> None:
        self._propensities, self._repeats = Propensities(), Repeats()

    def add(self, batch: SampleBatch, observation: Space, action: Space) -> None:
        """Add the whole episodes of a batch whose propensities are known."""
        lengths = lengths_of(batch)
        starts = np.cumsum(lengths) - lengths
        known = ~np.logical_or.reduceat(np.isnan(batch[ACTION_LOGP]), starts)
        steps, lengths = batch.take(np.repeat(known, lengths)), lengths[known]
        if not lengths.size:
            return
        logp, starts = np.asarray(steps[ACTION_LOGP], np.float64), np.cumsum(lengths) - lengths
        heads = steps.take(starts)
        actions = columns_of(action, "actions", steps)
        cells = cells_of(action, actions)
        if cells is not None:
            tags = {
                name: np.repeat(np.array(values, object), lengths).tolist()
                for name, values in tag_values(heads).items()
            }
            self._propensities.add(logp, cells, tags=tags)
        try:
            flat = Flattener(observation).columns(columns_of(observation, "obs", steps))
        except SpaceError:  # of texts
            return
        one = isinstance(action, Discrete)
        data = Judged(
            rewards=np.asarray(steps[REWARDS], np.float64),
            lengths=lengths,
            behaviour_logp=logp,
            flat=flat,
            cells=cells,
            taken=np.asarray(actions[""], np.int64) if one else None,
            discrete=not any(isinstance(leaf.space, Box) for leaf in leaves(action)),
            times=np.asarray(heads[TIME], np.float64),
        )
        self._repeats.add(fingerprints(data), None)

    def checks(self) -> list[Diagnostic]:
        """The results, once all is read."""
        return [self._propensities.check(), self._repeats.check()]
