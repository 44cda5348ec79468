"""The whole tracks of one policy, which `MultiAgentReader` joins to episodes."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from storage.declarations.declaration import PolicyDeclaration
from storage.experience.endings import UNOBSERVED
from storage.experience.interfaces import EndOfInput
from storage.experience.sample_batch import (
    AGENT_ID,
    AGENTS,
    ENV_T,
    EPISODE_ORDINAL,
    EPS_ID,
    SampleBatch,
    T,
)
from storage.reading.agent_joiner import Track
from storage.reading.batching import segment_starts
from storage.reading.loading import ENDED, STREAM_INDEX
from storage.reading.objects_source import Roots
from storage.reading.position import Position
from storage.reading.shard_reader import Left, ShardReader
from storage.reading.sources import ShardSource

__all__ = ["TrackReader"]

_RECEIVED = "received_ts"
_ALL = 2**62


class TrackReader(ShardReader):
    """A `ShardReader` of one policy's whole tracks.

    `arrival` is notified when there may be more. `ended`: the input has ended. `reached`:
    (collector, microseconds since the epoch) of the latest track.
    """

    def __init__(
        self,
        roots: Roots | None,
        *,
        policy: PolicyDeclaration,
        arrival: threading.Condition,
        source: ShardSource | None,
        columns: Sequence[str],
        brings_default: bool,
        **options: Any,
    ) -> None:
        super().__init__(
            roots,
            source=source,
            policy_id=policy.policy_id,
            schema_id=policy.schema_id,
            mode="episodes",
            eager=True,
            columns=(*dict.fromkeys((*columns, EPS_ID, AGENT_ID, ENV_T, AGENTS, _RECEIVED)),),
            **options,
        )
        self._brings_default = brings_default
        self._policy_id = policy.policy_id
        self._arrival = arrival
        hidden = {AGENTS, _RECEIVED} - set(columns)
        self._columns = self._columns - hidden
        self.ended = False
        self.reached = ("", -1)

    @property
    def filled(self) -> bool:
        """Whether `tracks` would return at once."""
        return self._prefetcher is None or self._prefetcher.filled

    def tracks(self, timeout: float | None) -> list[Track]:
        """The whole tracks that are available; none after `timeout` seconds. Raises EndOfInput."""
        try:
            found = self._split(self._take(_ALL, timeout))
        except EndOfInput:
            self.ended = True
            raise
        if found:
            self.reached = found[-1].episode[0], found[-1].received
        return found

    def restored(self) -> list[Track]:
        """The tracks of the restored position, read again; call it once, after `ready`.

        Rows that are in no shard any more are counted in `stats.lost`.
        """
        return self._split(self._cutter.take(_ALL)) if self._cutter.rows else []

    def ready(self, left: Left) -> bool:
        """Whether the rows of the position were read again within the time that is left."""
        return self._start(left)

    def position(self, held: Sequence[SampleBatch]) -> dict[str, Any]:
        """Like `state_dict`, including rows of tracks that the caller still holds."""
        if self._restored is not None:
            return self._restored.to_json()
        return Position.of(
            mode=self.mode,
            taken=self._ledger,
            streams=self._streams,
            joiner=self._joiner.pending(),
            window=[],
            cutter=[*held, *self._cutter.pending()],
            rng=dict(self._rng.bit_generator.state),
        ).to_json()

    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict(state)
        self.ended = False

    def public(self, rows: SampleBatch) -> SampleBatch:
        """The columns that were asked for, and those that identify the steps."""
        return self._public(rows)

    def _split(self, rows: SampleBatch) -> list[Track]:
        if not rows.count:
            return []
        placed = rows.select(list(rows))
        placed[ENV_T] = np.where(rows[ENV_T] < 0, rows[T], rows[ENV_T])
        starts = segment_starts(rows, EPISODE_ORDINAL)
        stops = np.append(starts[1:], rows.count)
        ends = stops - 1
        facts = zip(
            starts.tolist(),
            stops.tolist(),
            (rows[ENV_T][starts] < 0).tolist(),
            rows[AGENTS][ends].tolist(),
            rows[ENDED][ends].tolist(),
            rows[_RECEIVED][ends].tolist(),
            rows[STREAM_INDEX][starts].tolist(),
            strict=True,
        )
        return [
            Track(
                policy_id=self._policy_id,
                stream=self._streams[stream],
                rows=placed.slice(start, stop),
                alone=alone,
                agents=agents,
                stopped=ended in UNOBSERVED,
                received=received,
            )
            for start, stop, alone, agents, ended, received, stream in facts
        ]
