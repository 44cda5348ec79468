"""Writing sampled batches as shards: a worker's samples become a log like any other.

    writer = ParquetOutputWriter("run", {"default": (Box((4,)), Discrete(2))})
    writer.write(worker.sample())
    ShardReader("run", policy_id="default")

A batch becomes one shard per policy. The rows of an episode in one batch are a part. Reading joins
the parts of an episode from several batches, and `MultiAgentReader` also joins the tracks of its
agents, if rows have `env_t` and `agents`. Rewards are stored as the environment returned them
(`raw_rewards` if the batch contains clipped ones), actions as the policy chose them.
"""

from __future__ import annotations

import json
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from storage.declarations.declaration import PolicyDeclaration
from storage.declarations.policy_files import save_declaration
from storage.experience.endings import Ending
from storage.experience.episode import DEFAULT_AGENT, DEFAULT_POLICY, Part
from storage.experience.interfaces import OutputWriter
from storage.experience.multi_agent_batch import MultiAgentBatch
from storage.experience.sample_batch import (
    ACTION_DIST_INPUTS,
    AGENT_ID,
    AGENTS,
    EPS_ID,
    HAS_NEXT_OBS,
    NEXT_OBS,
    OBS,
    POLICY_ID,
    REWARDS,
    TERMINATEDS,
    TRUNCATEDS,
    BatchError,
    SampleBatch,
    T,
)
from storage.experience.step_columns import SOURCES, STEP_COLUMNS
from storage.objects.opening import Root, objects_at
from storage.shards.shard import ShardWriter
from storage.spaces.codec import Codec
from storage.spaces.descriptors import Space, canonical_json, schema_id

Array = npt.NDArray[Any]
# The number of open episodes that are remembered. Later rows of one that was forgotten, the oldest
# first, start a new episode.
_MOST_OPEN = 10_000


@dataclass
class _Open:
    """An open episode: the number of its next part, its ordinal, and the next t."""

    part: int
    episode_ordinal: int
    t: int


class _Stream:
    """The parts of one schema, of all policies with this schema."""

    def __init__(self, collector: str, spaces: tuple[Space, Space]) -> None:
        self.canonical = canonical_json(*spaces)
        self.schema = schema_id(*spaces)
        self.name = f"{collector}-{self.schema}"
        self.obs, self.actions = Codec(spaces[0]), Codec(spaces[1])
        self.open: OrderedDict[tuple[str, str, str], _Open] = OrderedDict()
        self.ordinal = 0


class ParquetOutputWriter(OutputWriter):
    """Writes shards under `root`, durable when `write` returns, and the policies' declarations.

    `spaces`: policy id -> (observation, action) as descriptors. `clock` returns microseconds since
    the epoch, the `ts` of rows without one. Every writer has a collector id of its own, with one
    stream per schema; the tracks of an episode share this id.
    """

    def __init__(
        self,
        root: Root,
        spaces: Mapping[str, tuple[Space, Space]],
        *,
        compression: Literal["zstd", "lz4"] = "zstd",
        clock: Callable[[], int] = lambda: time.time_ns() // 1000,
    ) -> None:
        self.root = root
        self._writer = ShardWriter(objects_at(root).under("shards"), compression=compression)
        self._clock = clock
        self._streams: dict[str, _Stream] = {}  # by policy
        by_schema: dict[str, _Stream] = {}
        collector = secrets.token_hex(6)
        for policy_id, pair in spaces.items():
            stream = _Stream(collector, pair)
            self._streams[policy_id] = by_schema.setdefault(stream.schema, stream)
            declared = PolicyDeclaration(policy_id=policy_id, observation=pair[0], action=pair[1])
            save_declaration(self.root, declared)

    def __repr__(self) -> str:
        return f"ParquetOutputWriter({str(self.root)!r}, policies {', '.join(self._streams)})"

    def write(self, batch: SampleBatch | MultiAgentBatch) -> None:
        """Write a batch.

        Raises BatchError for a policy or columns that were not declared, and ShardWriteError if the
        disk is full or fails.
        """
        if isinstance(batch, MultiAgentBatch):
            for policy_id, rows in batch.policy_batches.items():
                self._write(policy_id, rows)
        elif batch.count:
            default = batch[POLICY_ID][0] if POLICY_ID in batch else DEFAULT_POLICY
            self._write(str(default), batch)

    def _write(self, policy_id: str, rows: SampleBatch) -> None:
        if not rows.count:
            return
        if policy_id not in self._streams:
            raise BatchError(
                f"expected rows of the policies {sorted(self._streams)}, got {policy_id!r}"
            )
        stream = self._streams[policy_id]
        now = self._clock()
        runs = rows.split_by_episode()
        undo = {key: _Open(o.part, o.episode_ordinal, o.t) for key, o in stream.open.items()}
        ordinal = stream.ordinal
        try:
            parts = [part for run in runs for part in self._parts(stream, policy_id, run, now)]
            self._writer.write(stream.name, stream.canonical, parts)
        except BaseException:
            # nothing was written: use the same ordinals for the next attempt
            stream.open, stream.ordinal = OrderedDict(undo), ordinal
            raise

    def _parts(self, stream: _Stream, policy_id: str, run: SampleBatch, now: int) -> list[Part]:
        """The parts of one episode's rows: several if t has gaps."""
        jumps = np.flatnonzero(np.diff(run[T]) != 1) + 1
        starts = [0, *jumps.tolist(), run.count]
        return [
            self._part(stream, policy_id, run.slice(begin, end), now)
            for begin, end in pairwise(starts)
        ]

    def _part(self, stream: _Stream, policy_id: str, rows: SampleBatch, now: int) -> Part:
        episode_id = str(rows[EPS_ID][0])
        agent = str(rows[AGENT_ID][0]) if AGENT_ID in rows else DEFAULT_AGENT
        ordinal = stream.ordinal
        stream.ordinal += 1
        track = policy_id, episode_id, agent
        known = stream.open.pop(track, None) or _Open(0, ordinal, 0)
        ended = _ending(rows)
        if ended is None:
            stream.open[track] = _Open(known.part + 1, known.episode_ordinal, int(rows[T][-1]) + 1)
            while len(stream.open) > _MOST_OPEN:
                stream.open.popitem(last=False)
        count = rows.count
        obs = stream.obs.encode_columns(rows.leaves(OBS), count)
        actions = stream.actions.encode_columns(rows.leaves("actions"), count)
        dist_inputs, dist_lengths = _dist_inputs(rows)
        return Part(
            episode_id=episode_id,
            part=known.part,
            t0=int(rows[T][0]),
            agents=(int(rows[AGENTS][-1]) or -1) if AGENTS in rows and ended else -1,
            steps=count,
            schema_id=stream.schema,
            obs=b"".join(obs),
            actions=b"".join(actions),
            obs_lengths=_lengths(stream.obs, obs),
            actions_lengths=_lengths(stream.actions, actions),
            **_numbers(rows, now),
            dist_inputs=dist_inputs,
            dist_lengths=dist_lengths,
            infos=_infos(rows),
            final_obs=_final_obs(stream.obs, rows),
            ended=ended,
            policy_id=policy_id,
            agent_id=agent,
            training_enabled=bool(rows["training_enabled"][0])
            if "training_enabled" in rows
            else True,
            ordinal=ordinal,
            episode_ordinal=known.episode_ordinal,
        )


def _ending(rows: SampleBatch) -> Ending | None:
    """How the episode ended with these rows, by the flags of the last row and its `cut`.

    A `cut` above 1 ends an episode although neither flag is set, as at a soft horizon.
    """
    last = rows.slice(rows.count - 1, None)
    if last[TERMINATEDS][0]:
        return "terminated"
    cut = int(last["cut"][0]) if "cut" in rows else 0
    # the numbers above 1 mean that no row of this episode follows
    return "truncated" if last[TRUNCATEDS][0] or cut > 1 else None


def _final_obs(codec: Codec, rows: SampleBatch) -> bytes | None:
    last = rows.slice(rows.count - 1, None)
    if HAS_NEXT_OBS in rows and not last[HAS_NEXT_OBS][0]:
        return None
    columns = last.leaves(NEXT_OBS)
    return codec.encode_columns(columns, 1)[0] if columns else None


def _lengths(codec: Codec, encoded: list[bytes]) -> bytes:
    return b"" if codec.itemsize is not None else _bytes([len(one) for one in encoded], "<u4")


def _bytes(values: npt.ArrayLike, dtype: str) -> bytes:
    return np.ascontiguousarray(values, dtype).tobytes()


def _numbers(rows: SampleBatch, now: int) -> dict[str, Any]:
    """The buffers of the step columns; `now` is the time of rows without one."""
    missing = {"ts": now, "received_ts": now, "source": SOURCES.index("on_policy")}
    found: dict[str, Any] = {}
    for column in STEP_COLUMNS:
        name = column.name
        if name == REWARDS and "raw_rewards" in rows:
            name = "raw_rewards"
        if name in rows and name != "received_ts":
            values = rows[name]
            if column.words:
                values = np.array([column.words.index(word) for word in values.tolist()])
            found[column.name] = _bytes(values, column.dtype)
        elif column.sparse:
            found[column.name] = b""
        else:
            default = missing.get(name, column.default)
            found[column.name] = _bytes(np.full(rows.count, default), column.dtype)
    return found


def _dist_inputs(rows: SampleBatch) -> tuple[bytes, bytes]:
    """(values, lengths); null for rows with NaN, whose action another policy chose."""
    if ACTION_DIST_INPUTS not in rows:
        return b"", b""
    values = np.ascontiguousarray(rows[ACTION_DIST_INPUTS], "<f4")
    known = ~np.isnan(values).any(axis=1)
    if not known.any():
        return b"", b""
    lengths = np.where(known, values.shape[1] * 4, 0)
    return values[known].tobytes(), _bytes(lengths, "<u4")


def _infos(rows: SampleBatch) -> dict[int, str]:
    """The infos that JSON can hold; other values in them are for callbacks only."""
    found: dict[int, str] = {}
    for row, info in enumerate(rows["infos"]) if "infos" in rows else ():
        plain = {k: v for k, v in info.items() if isinstance(v, (str, int, float, bool))}
        if plain:
            found[row] = json.dumps(_finite(plain), sort_keys=True)
    return found


def _finite(info: dict[str, Any]) -> dict[str, Any]:
    """Replace NaN and infinity, which JSON does not have, by None."""
    return {k: None if isinstance(v, float) and not np.isfinite(v) else v for k, v in info.items()}
