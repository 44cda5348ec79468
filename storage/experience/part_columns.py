"""Many parts as columns: per-step buffers joined, and one list entry per part.

Imports seal their episodes in this form, and shards are written from it, so that a part needs no
object of its own.

Pure: uses no clock, file or thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np

from storage.experience.episode import Part, raw_bytes
from storage.experience.step_columns import STEP_COLUMNS, StepBuffers


@dataclass(frozen=True, slots=True, kw_only=True)
class PartScalars:
    """The columns with one value per part, in the order of the parts, and the infos by row."""

    schema_id: str
    episode_id: list[str]
    part: list[int]
    t0: list[int]
    steps: list[int]
    policy_id: list[str]
    agent_id: list[str]
    ended: list[str | None]
    training_enabled: list[bool]
    continues: list[str | None]
    tags: list[str]
    ordinal: list[int]
    episode_ordinal: list[int]
    agents: list[int]
    final_obs: list[bytes | None]
    info_rows: list[int]  # ascending
    infos: list[str]


class PartColumns(StepBuffers, frozen=True, kw_only=True, gc=False):
    """Parts of one policy and schema: `scalars` per part, and the buffers of all steps, joined.

    All parts of an episode are there, one after another. The parts have ordinals, or none of them
    has (`scalars.ordinal` is empty).
    """

    scalars: PartScalars

    @property
    def count(self) -> int:
        """The number of parts."""
        return len(self.scalars.steps)

    @property
    def steps(self) -> int:
        return len(self.source)

    @property
    def nbytes(self) -> int:
        """Raw size in bytes, computed as `Part.nbytes`."""
        return raw_bytes(self, self.steps)

    @property
    def schema_id(self) -> str:
        return self.scalars.schema_id

    @property
    def policy_id(self) -> str:
        return self.scalars.policy_id[0]

    def with_ordinals(self, first: int) -> PartColumns:
        """The parts with consecutive ordinals, and those of their episodes' first parts."""
        ordinals = list(range(first, first + self.count))
        firsts = [at - part for at, part in zip(ordinals, self.scalars.part, strict=True)]
        scalars = replace(self.scalars, ordinal=ordinals, episode_ordinal=firsts)
        return msgspec.structs.replace(self, scalars=scalars)

    def parts(self) -> Iterator[Part]:
        """The parts as objects."""
        scalars = self.scalars
        found = dict(zip(scalars.info_rows, scalars.infos, strict=True))
        bounds = {name: self._bounds(name) for name in ("obs", "actions")}
        begin = 0
        for at, steps in enumerate(scalars.steps):
            end = begin + steps
            own: dict[str, Any] = {
                c.name: getattr(self, c.name)[c.itemsize * begin : c.itemsize * end]
                for c in STEP_COLUMNS
            }
            for name, places in bounds.items():
                own[name] = getattr(self, name)[places[begin] : places[end]]
                lengths = f"{name}_lengths"
                own[lengths] = getattr(self, lengths)[4 * begin : 4 * end]
            yield Part(
                episode_id=scalars.episode_id[at],
                part=scalars.part[at],
                t0=scalars.t0[at],
                steps=steps,
                schema_id=scalars.schema_id,
                infos={row - begin: found[row] for row in range(begin, end) if row in found},
                final_obs=scalars.final_obs[at],
                ended=scalars.ended[at],  # type: ignore[arg-type]  # checked by the part
                policy_id=scalars.policy_id[at],
                agent_id=scalars.agent_id[at],
                agents=scalars.agents[at],
                training_enabled=scalars.training_enabled[at],
                continues=scalars.continues[at],
                tags=scalars.tags[at],
                ordinal=scalars.ordinal[at] if scalars.ordinal else -1,
                episode_ordinal=scalars.episode_ordinal[at] if scalars.ordinal else -1,
                **own,
            )
            begin = end

    def _bounds(self, name: str) -> list[int]:
        """Where the value of each step begins, and the end."""
        data, lengths = getattr(self, name), getattr(self, f"{name}_lengths")
        if not lengths:
            size = len(data) // max(1, self.steps)
            return list(range(0, len(data) + 1, size)) if size else [0] * (self.steps + 1)
        ends: list[int] = np.cumsum(np.frombuffer(lengths, np.uint32), dtype=np.int64).tolist()
        return [0, *ends]


def each_part(parts: Iterable[Part | PartColumns]) -> Iterator[Part]:
    """All parts as objects, in order."""
    for part in parts:
        if isinstance(part, PartColumns):
            yield from part.parts()
        else:
            yield part


def parts_in(part: Part | PartColumns) -> int:
    """How many parts one object stands for."""
    return part.count if isinstance(part, PartColumns) else 1
