"""Imported episodes, from their journal event to parts. They are never open.

Whole episodes come in blocks, and stay columns up to their shard.

A long episode comes in pieces, one journal row each. It is *staged* until its last piece arrives;
then all of its parts are sealed at once, so that one plan names them. If the collector is killed in
between, the pieces are dropped and the import sends the episode again from the start.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
from msgspec.structs import replace

from ingest.episodes.journal_events import NO_TIME, Imported, ImportedBlock, ImportedEpisode
from ingest.episodes.sealed_parts import Finished, Sealed
from storage.experience.endings import ENDINGS, Ending
from storage.experience.episode import DEFAULT_AGENT, Part
from storage.experience.part_columns import PartColumns, PartScalars
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


def columns_of(event: ImportedBlock, received: int) -> PartColumns:
    """The parts of a block's episodes."""
    lengths = np.frombuffer(event.lengths, np.int64)
    most = event.part_steps or int(lengths.max())
    counts = -(-lengths // most)
    of = np.repeat(np.arange(len(lengths)), counts)  # the episode of each part
    part = np.arange(len(of)) - np.repeat(np.cumsum(counts) - counts, counts)
    steps = np.minimum(lengths[of] - part * most, most)
    is_last = part == counts[of] - 1
    columns, total = _EventColumns(event, received), int(lengths.sum())
    ends = np.cumsum(steps)
    words: list[str | None] = [ENDINGS[code] for code in event.ended]
    final: list[bytes | None] = list(event.final_obs) or [None] * len(lengths)
    whole = len(of) == len(lengths)

    def each(values: Sequence[Any], default: Any) -> list[Any]:
        if not values:
            return [default] * len(of)
        return list(values) if whole else [values[at] for at in of.tolist()]

    if whole:
        finals, ended, agents = final, words, event.agents
    else:
        places = zip(of.tolist(), is_last.tolist(), ends.tolist(), strict=True)
        finals = [final[at] if last else columns.obs(end, end + 1) for at, last, end in places]
        ended = [words[at] if last else None for at, last in zip(of, is_last, strict=True)]
        agents = np.where(is_last, np.array(event.agents)[of], -1).tolist() if event.agents else []
    rows = sorted(event.infos)
    scalars = PartScalars(
        schema_id=event.schema_id,
        episode_id=each(event.episode_ids, ""),
        part=part.tolist(),
        t0=(part * most).tolist(),
        steps=steps.tolist(),
        policy_id=[event.policy_id] * len(of),
        agent_id=each(event.agent_ids, DEFAULT_AGENT),
        ended=ended,
        training_enabled=each(event.training_enabled, True),
        continues=each(event.continues, None),
        tags=each(event.tags, "{}"),
        ordinal=[],
        episode_ordinal=[],
        agents=agents or [-1] * len(of),
        final_obs=finals,
        info_rows=rows,
        infos=[event.infos[row] for row in rows],
    )
    return PartColumns(
        scalars=scalars,
        obs=event.obs,
        actions=event.actions,
        obs_lengths=event.obs_lengths,
        actions_lengths=event.actions_lengths,
        **columns.numbers(0, total),
    )


def finished_of(event: ImportedBlock) -> list[Finished]:
    """What is remembered of a block's episodes."""
    lengths = (np.frombuffer(event.lengths, np.int64) + 2).tolist()
    starts = np.frombuffer(event.starts, np.int64).tolist()
    instance, policy, schema = event.instance, event.policy_id, event.schema_id
    own: Iterable[tuple[str | None, int]] = [(None, -1)] * len(starts)
    if event.agent_ids:
        own = zip(event.agent_ids, event.agents, strict=True)
    rows = zip(event.episode_ids, starts, lengths, event.ended, own, strict=True)
    return [
        Finished(name, key, instance, start, seq, ENDINGS[how], "", *tracks, policy, schema)
        for key, (name, start, seq, how, tracks) in enumerate(rows, event.key)
    ]


class _EventColumns:
    """The columns of an event, and the offsets of each step's values."""

    def __init__(self, event: Imported | ImportedBlock, received: int) -> None:
        self._event = event
        self._total = len(event.rewards) // 8
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

    def numbers(self, begin: int, end: int) -> dict[str, Any]:
        """The numbers of steps [begin, end) by column."""
        return {
            name: data[size * begin : size * end] or _repeated(value, end - begin)
            for name, data, size, value in self._numbers
        }

    def part(
        self, episode: ImportedEpisode, number: int, t0: int, begin: int, end: int, last: int
    ) -> Part:
        """Return the steps [begin, end) of all as one part; its episode's steps end at `last`."""
        event, started, steps = self._event, episode.started, end - begin
        short, infos = slice(4 * begin, 4 * end), event.infos
        return Part(
            episode_id=started.episode_id,
            part=number,
            t0=episode.t0 + t0,
            steps=steps,
            schema_id=started.schema_id,
            obs=self.obs(begin, end),
            actions=_cut(event.actions, self._actions, begin, end),
            **self.numbers(begin, end),
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
