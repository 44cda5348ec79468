"""From collected columns to a batch: identity of the rows, clipped rewards, postprocessing."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from policy.algorithms.base import episode_order
from policy.algorithms.ppo import ADVANTAGES, VALUE_TARGETS, PPOConfig
from policy.algorithms.trainable_policy import TrainablePolicy
from policy.sampling.callbacks import Callbacks, is_overridden
from policy.sampling.episode import SamplingWorker
from policy.sampling.fragment_buffers import EpisodeSegment, RowLayout, row_layout
from storage.experience.sample_batch import (
    AGENT_ID,
    AGENTS,
    ENV_T,
    EPISODE_ORDINAL,
    EPS_ID,
    HAS_NEXT_OBS,
    POLICY_ID,
    REWARDS,
    STREAM,
    SampleBatch,
    T,
    concat_samples,
)
from storage.experience.sequences import fragment_ends

Array = npt.NDArray[Any]
RAW_REWARDS, SOURCE = "raw_rewards", "source"


def clip_rewards(mode: Any, rewards: Array) -> Array | None:
    """Clipped rewards (N,) float64; None if they are not to be clipped (mode None or False).

    Mode True or "sign" gives their signs; a number x clips them to -x..x.
    """
    if mode is None or mode is False:
        return None
    if mode is True or mode == "sign":
        return np.sign(rewards)
    return np.clip(rewards, -mode, mode)


def check_clip_rewards(mode: Any) -> Any:
    """Return a valid mode of clipping. Raises ValueError for any other value."""
    plain = mode is None or isinstance(mode, bool) or mode == "sign"
    if not plain and not (isinstance(mode, (int, float)) and mode > 0):
        raise ValueError(
            f'clip_rewards: expected None, False, True, "sign" or a number > 0, got {mode!r}'
        )
    return mode


def env_columns(stored: Mapping[str, Array], sent: Mapping[str, Array]) -> dict[str, Array]:
    """Leaf path -> actions as sent; empty if all of them equal the stored ones."""
    same = all(
        stored[path] is sent[path] or np.array_equal(stored[path], sent[path]) for path in sent
    )
    return {} if same else dict(sent)


def alike(batches: Sequence[SampleBatch]) -> list[SampleBatch]:
    """The batches with `actions_env` columns in all or in none.

    A batch has these columns only if an action was sent in another form than stored.
    """
    names = {name for batch in batches for name in batch if name.startswith("actions_env")}
    done = []
    for batch in batches:
        missing = names - set(batch)
        if missing:
            batch = batch.select(list(batch))
            for name in missing:
                batch[name] = batch[name.replace("actions_env", "actions", 1)]
        done.append(batch)
    return done


def finish_read(policy: TrainablePolicy, rows: SampleBatch) -> SampleBatch:
    """Complete rows from a reader in the same way as sampled rows.

    Adds advantages of fragments, or calls the policy's `postprocess_trajectory` for each run of one
    agent in one episode. Rows that have advantages already, or lack columns because the reader was
    asked for others, are returned unchanged: they may be meant for estimators only.
    """
    there = {name.partition(".")[0] for name in rows}
    if not rows.count or ADVANTAGES in rows or not there.issuperset(_NEEDED):
        return rows
    order = episode_order(rows)
    in_order = rows.take(order)
    if type(policy).postprocess_trajectory is TrainablePolicy.postprocess_trajectory:
        done = policy.postprocess(in_order)
        whole = rows.select(list(rows))
        for name in (ADVANTAGES, VALUE_TARGETS):
            if name in done:
                whole[name] = done[name][np.argsort(order)]
        return whole
    keys = in_order[STREAM], in_order[EPISODE_ORDINAL], in_order[AGENT_ID]
    ends = np.flatnonzero(fragment_ends(in_order[T], *keys)) + 1
    runs = [in_order.slice(a, b).copy() for a, b in pairwise([0, *ends.tolist()])]
    return concat_samples([policy.postprocess_trajectory(run, {}, None) for run in runs])


_NEEDED = frozenset({*PPOConfig.columns, STREAM, EPISODE_ORDINAL, AGENT_ID, T})


@dataclass
class RowFinisher:
    """Adds the identity of rows, and lets policies and callbacks complete them.

    `stream` is this worker's own and new in every process, so that rows of two workers are never
    mixed. As in shards, the text before its last hyphen identifies the collector of the rows; the
    stream contains the rows of all policies.
    """

    policies: Mapping[str, TrainablePolicy]
    callbacks: Callbacks
    clip: Any
    worker: SamplingWorker  # only passed on, to callbacks
    trains: Callable[[str], bool]  # whether a policy learns here; otherwise its filter must not
    stream: str = field(default_factory=lambda: f"worker-{secrets.token_hex(6)}-all")

    def identified(
        self,
        columns: dict[str, Array],
        segments: Sequence[EpisodeSegment],
        *,
        policy_id: str,
        agent_id: str,
    ) -> SampleBatch:
        """A batch from collected columns: rows of `segments`, one after the other.

        Without the columns `has_new_obs` and `source`, each row has a next observation and is on
        policy.
        """
        count = len(columns[REWARDS])
        lengths = np.diff([*(one.start for one in segments), count])
        ids = np.array([one.episode_id for one in segments], object)
        clipped = clip_rewards(self.clip, columns[REWARDS])
        if clipped is not None:
            columns[RAW_REWARDS], columns[REWARDS] = columns[REWARDS], clipped
        columns.setdefault(HAS_NEXT_OBS, np.ones(count, np.bool_))
        columns[EPS_ID] = np.repeat(ids, lengths)
        numbers = np.array([one.number for one in segments], np.int64)
        columns[EPISODE_ORDINAL] = np.repeat(numbers, lengths)
        for name, value in ((AGENT_ID, agent_id), (POLICY_ID, policy_id), (STREAM, self.stream)):
            columns[name] = np.full(count, value, object)
        columns.setdefault(SOURCE, np.full(count, "on_policy", object))
        return SampleBatch(columns)

    def layout(self, policy_id: str, *, joint: bool = False) -> RowLayout:
        """The columns of a policy's rows; `joint`: also those of several agents' episodes."""
        policy = self.policies[policy_id]
        layout = row_layout(policy.spec.observation, policy.spec.action, policy.spec.layout.size)
        state = policy.initial_state()
        layout |= {f"state_in_{i}": (one.shape, one.dtype) for i, one in enumerate(state)}
        return layout | ({ENV_T: ((), np.int64), AGENTS: ((), np.int32)} if joint else {})

    def no_rows(self, policy_id: str, *, joint: bool = False) -> SampleBatch:
        """A batch without rows, with the columns of the policy's samples.

        Those that its own `postprocess_trajectory` or a callback adds are unknown without rows.
        """
        layout = self.layout(policy_id, joint=joint)
        columns = {name: np.zeros((0, *shape), dtype) for name, (shape, dtype) in layout.items()}
        rows = self.identified(columns, [], policy_id=policy_id, agent_id="")
        return self.policies[policy_id].postprocess(rows)

    def is_hooked(self, policy: TrainablePolicy) -> bool:
        """Whether trajectories have to be passed on one by one."""
        own = type(policy).postprocess_trajectory is not TrainablePolicy.postprocess_trajectory
        return own or is_overridden(self.callbacks, "on_postprocess_trajectory")

    def finish_runs(
        self, batch: SampleBatch, segments: Sequence[EpisodeSegment], episodes: Mapping[int, Any]
    ) -> SampleBatch:
        """Pass on rows of the default agent, run by run: `segments` are of its episodes."""
        policy_id = next(iter(self.policies))
        starts = [*(one.start for one in segments), batch.count]
        done = []
        for number, one in enumerate(segments):
            run = batch.slice(starts[number], starts[number + 1]).copy()
            if run.count:
                agent = run[AGENT_ID][0]
                together = {agent: (policy_id, run)}
                done.append(self.finish(together, episodes.get(one.number))[agent][1])
        return concat_samples(done)

    def finish(
        self, runs: Mapping[Any, tuple[str, SampleBatch]], episode: Any
    ) -> dict[Any, tuple[str, SampleBatch]]:
        """Postprocess the agents' runs of one episode: agent id -> (policy id, rows)."""
        originals = {
            agent: (self.policies[policy_id], rows) for agent, (policy_id, rows) in runs.items()
        }
        done: dict[Any, tuple[str, SampleBatch]] = {}
        for agent, (policy_id, rows) in runs.items():
            others = {name: pair for name, pair in originals.items() if name != agent}
            policy = self.policies[policy_id]
            out = policy.postprocess_trajectory(rows.copy(), others, episode)
            done[agent] = (policy_id, out)
        if is_overridden(self.callbacks, "on_postprocess_trajectory"):
            for agent, (policy_id, rows) in done.items():
                self.callbacks.on_postprocess_trajectory(
                    worker=self.worker,
                    episode=episode,
                    agent_id=agent,
                    policy_id=policy_id,
                    policies=self.policies,
                    postprocessed_batch=rows,
                    original_batches=originals,
                )
        return done
