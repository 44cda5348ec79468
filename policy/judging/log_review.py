"""The checks of a policy's log that need no candidate: propensities and repeats.

    for check in review("run", "default"):
        print(check.sentence)

`evaluate` makes the same checks of the episodes that it judges by; this reads all of them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from policy.data.log_selection import LogSelection
from policy.inference.preprocessors import Flattener, columns_of
from policy.judging.action_cells import cells_of
from policy.judging.judged_log import PASS_PROB, lengths_of, rows_of_block
from policy.ope.diagnostics import Diagnostic
from policy.ope.judgement import Judged
from policy.ope.propensities import Propensities
from policy.ope.repeats import Repeats, fingerprints
from policy.progress import Progress, no_progress
from storage.experience.sample_batch import ACTION_LOGP, EPS_ID, REWARDS, SampleBatch
from storage.objects.opening import Root
from storage.reading.holdout import TAGS, Reserve, tag_values
from storage.spaces.descriptors import Box, Discrete, Space, SpaceError
from storage.spaces.leaves import leaves
from storage.system.backoff import RETRY_FOR

TIME = "ts"
_COLUMNS = (EPS_ID, "obs", "actions", REWARDS, ACTION_LOGP, "agent_id", PASS_PROB, TIME, TAGS)


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
        for batch in reader:
            if reader.spaces is not None:
                reading.add(batch, *reader.spaces)
            rows += batch.count
            on_progress("checking the log", rows, None)
    return reading.checks()


class ImportReview:
    """The check of propensities of rows while they are imported, by policy."""

    def __init__(self) -> None:
        self._found: dict[str, Propensities] = {}

    def add(self, policy_id: str, action: Space, steps: Any) -> None:
        """Add steps: an Arrow table with a column of `actions` and one of `action_logp`."""
        logp = np.asarray(steps["action_logp"].to_numpy(), np.float64)
        column = steps["actions"]
        listed = hasattr(column.type, "value_type")
        actions = np.array(column.to_pylist()) if listed else column.to_numpy()
        known = ~np.isnan(logp)
        paths = [leaf.path for leaf in leaves(action)]
        if len(paths) != 1 or not known.any() or actions.dtype.kind not in "biuf":
            return
        cells = cells_of(action, {paths[0]: actions[known]})
        if cells is not None:
            by = None
            if PASS_PROB in steps.column_names:
                by = 1 / np.asarray(steps[PASS_PROB].to_numpy(), np.float64)[known]
            self._found.setdefault(policy_id, Propensities()).add(logp[known], cells, by=by)

    def checks(self) -> dict[str, list[dict[str, Any]]]:
        """The results by policy, as plain types, once all is sent."""
        return {policy_id: [found.check().to_dict()] for policy_id, found in self._found.items()}


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
            by = 1 / np.asarray(steps[PASS_PROB], np.float64)
            self._propensities.add(logp, cells, tags=tags, by=by)
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
        self._repeats.add(fingerprints(data), None, pass_prob=np.asarray(heads[PASS_PROB]))

    def checks(self) -> list[Diagnostic]:
        """The results, once all is read."""
        return [self._propensities.check(), self._repeats.check()]
