"""Imported episodes, from their journal event to parts. They are never open.

A long episode comes in pieces, one journal row each. It is *staged* until its last piece arrives;
then all of its parts are sealed at once, so that one plan names them. If the collector is killed in
between, the pieces are dropped and the import sends the episode again from the start.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
from msgspec.structs import replace

from ingest.episodes.journal_events import NO_TIME, Imported, ImportedEpisode
from ingest.episodes.sealed_parts import Finished, Sealed
from storage.experience.endings import Ending
from storage.experience.episode import DEFAULT_AGENT, Part
from storage.experience.step_columns import STEP_COLUMNS

_NO_TIME = struct.pack("<q", NO_TIME)


@dataclass(slots=True)
class Staged:
    """The pieces of an episode so far: its parts, and the journal row of each."""

    parts: list[Part] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    steps: int = 0

    def add(self, parts: list[Part], row: int, item: int | None) -> None:
        """Add a piece's parts; the previous last part ends with the first observation of these.

        `item` is the size of an observation in bytes, None if the part stores lengths.
        """
        if self.parts and parts:
            first = parts[0]
            size = int.from_bytes(first.obs_lengths[:4], "little") if item is None else item
            self.parts[-1] = replace(self.parts[-1], final_obs=first.obs[:size])
        for part in parts:
            self.parts.append(replace(part, part=len(self.parts)) if self.parts else part)
            self.rows.append(row)
            self.steps += part.steps

    def sealed(self, episode: ImportedEpisode, row: int) -> tuple[list[Sealed], Finished]:
        """All parts as sealed, and what is remembered of the episode; `row` is the last piece's."""
        started = episode.started
        how: Ending = episode.how  # type: ignore[assignment]  # checked before it was journaled
        finished = Finished(
            started.episode_id,
            started.key,
            started.instance,
            started.start,
            self.steps + 2,
            how,
            episode.cause,
            started.agent_id,
            episode.agents,
            policy_id=started.policy_id,
            schema_id=started.schema_id,
        )
        last = replace(
            self.parts[-1], final_obs=episode.final_obs, ended=how, agents=episode.agents
        )
        rows = (row,) if self.rows[-1] == row else (self.rows[-1], row)
        before = zip(self.parts[:-1], self.rows[:-1], strict=True)
        found = [Sealed(started.key, part, (held,)) for part, held in before]
        return [*found, Sealed(started.key, last, rows, finished=finished)], finished


@lru_cache(maxsize=64)
def _repeated(value: bytes, steps: int) -> bytes:
    """A column of one repeated value, shared by episodes of the same length."""
    return value * steps


def parts_of(event: Imported, received: int) -> Iterator[tuple[ImportedEpisode, list[Part]]]:
    """Yield each episode and its steps as parts without an ending, numbered from 0."""
    columns = _EventColumns(event, received)
    begin = 0
    for episode in event.episodes:
        end = begin + episode.steps
        size = event.part_steps or max(1, episode.steps)
        parts = [
            columns.part(episode, number, first - begin, first, min(first + size, end), end)
            for number, first in enumerate(range(begin, end, size))
        ]
        yield episode, parts
        begin = end


class _EventColumns:
    """The columns of an event, and the offsets of each step's values."""

    def __init__(self, event: Imported, received: int) -> None:
        self._event = event
        self._total = sum(episode.steps for episode in event.episodes)
        self._obs = self._places(event.obs, event.obs_lengths)
        self._actions = self._places(event.actions, event.actions_lengths)
        came, ts = struct.pack("<q", received), event.ts
        if _NO_TIME in ts:
            given = np.frombuffer(ts, np.int64)
            ts = np.where(given == NO_TIME, received, given).tobytes()
        values = {"ts": ts, "source": b"", "received_ts": b""}
        alone = {"ts": came, "source": bytes([event.source]), "received_ts": came}
        # name, values, the bytes of one, and the value of all steps if there are no values
        self._numbers = [
            (
                c.name,
                values[c.name] if c.name in values else getattr(event, c.name),
                c.itemsize,
                alone.get(c.name, b"" if c.sparse else c.filled(1)),
            )
            for c in STEP_COLUMNS
        ]

    def _places(self, data: bytes, lengths: bytes) -> int | list[int]:
        """The size of each value if it is fixed, otherwise the values' offsets and their end."""
        if not lengths:
            return len(data) // self._total if self._total else 0
        ends: list[int] = np.cumsum(np.frombuffer(lengths, np.uint32), dtype=np.int64).tolist()
        return [0, *ends]

    def obs(self, begin: int, end: int) -> bytes:
        """The observations of steps [begin, end) as bytes."""
        return _cut(self._event.obs, self._obs, begin, end)

    def part(
        self, episode: ImportedEpisode, number: int, t0: int, begin: int, end: int, last: int
    ) -> Part:
        """Return the steps [begin, end) of all as one part; its episode's steps end at `last`."""
        event, started, steps = self._event, episode.started, end - begin
        short, infos = slice(4 * begin, 4 * end), event.infos
        numbers: dict[str, Any] = {
            name: data[size * begin : size * end] or _repeated(value, steps)
            for name, data, size, value in self._numbers
        }
        return Part(
            episode_id=started.episode_id,
            part=number,
            t0=episode.t0 + t0,
            steps=steps,
            schema_id=started.schema_id,
            obs=self.obs(begin, end),
            actions=_cut(event.actions, self._actions, begin, end),
            **numbers,
            obs_lengths=event.obs_lengths[short],
            actions_lengths=event.actions_lengths[short],
            infos={at - begin: infos[at] for at in range(begin, end) if at in infos}
            if infos
            else {},
            final_obs=self.obs(end, end + 1) if end < last else None,
            policy_id=started.policy_id,
            agent_id=DEFAULT_AGENT if started.agent_id is None else started.agent_id,
            training_enabled=started.training_enabled,
            continues=started.continues,
            tags=started.tags,
        )


def _cut(data: bytes, places: int | list[int], begin: int, end: int) -> bytes:
    if isinstance(places, int):
        return data[places * begin : places * end]
    return data[places[begin] : places[end]]
