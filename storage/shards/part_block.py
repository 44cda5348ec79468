"""Many parts as one block of columns, the form in which experience is sent to the shard writer.

Per-step buffers of the parts are joined column by column; columns with one value per part stay
lists. A block is converted to a list of byte frames and back without creating an object per step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import msgspec

from storage.experience.episode import EpisodeError, Part, raw_bytes
from storage.experience.part_columns import PartColumns, PartScalars
from storage.experience.step_columns import STEP_COLUMNS, StepBuffers
from storage.shards.names import ShardError


class PartBlock(StepBuffers, frozen=True, kw_only=True, gc=False):
    """Parts of one schema with N steps in all: `scalars` per part, and their buffers, joined.

    A sparse buffer is empty if it is in all parts.
    """

    scalars: PartScalars

    @classmethod
    def of(cls, parts: Sequence[Part | PartColumns]) -> PartBlock:
        """The block of one or more parts with the same schema, which have their ordinals.

        Raises ShardError for no parts, several schemas, or a missing ordinal.
        """
        scalars, pieces = _scalars(parts), _pieces(parts)
        return cls(scalars=scalars, **{name: b"".join(pieces[name]) for name in _BUFFERS})

    @property
    def rows(self) -> int:
        return len(self.source)

    @property
    def first(self) -> int:
        return min(self.scalars.ordinal)

    @property
    def last(self) -> int:
        return max(self.scalars.ordinal)

    @property
    def nbytes(self) -> int:
        """Raw size in bytes, computed as `Part.nbytes`."""
        return raw_bytes(self, self.rows)

    def to_frames(self) -> list[bytes]:
        """The scalars as msgpack, followed by the buffers in their order."""
        return [_encode(self.scalars), *(getattr(self, name) for name in _BUFFERS)]

    @classmethod
    def from_frames(cls, frames: Sequence[bytes]) -> PartBlock:
        """The block of the result of `to_frames`. Raises ShardError for anything else."""
        if len(frames) != 1 + len(_BUFFERS):
            raise ShardError(f"block: expected {1 + len(_BUFFERS)} frames, got {len(frames)}")
        try:
            scalars = _decode(frames[0])
        except msgspec.MsgspecError as error:
            raise ShardError(f"block: expected per-part values as msgpack: {error}") from error
        return cls(scalars=scalars, **dict(zip(_BUFFERS, frames[1:], strict=True)))


@dataclass(frozen=True, slots=True)
class UnwrittenParts:
    """The content of a shard that is not written yet, for a reader that does not wait for it."""

    canonical_json: str  # the spaces
    block: PartBlock


def frames_of(parts: Sequence[Part | PartColumns]) -> list[list[bytes]]:
    """The frames of the parts' block, each as a list of pieces, so that nothing large is copied.

    Raises the errors of `PartBlock.of`.
    """
    scalars, pieces = _scalars(parts), _pieces(parts)
    return [[_encode(scalars)], *(pieces[name] for name in _BUFFERS)]


_BUFFERS = StepBuffers.__struct_fields__
_SPARSE = tuple(column for column in STEP_COLUMNS if column.sparse)
_LENGTHS = tuple(name for name in _BUFFERS if name.endswith("_lengths"))
_ALIKE = tuple(n for n in _BUFFERS if n not in {*_LENGTHS, *(c.name for c in _SPARSE)})
_PER_PART = tuple(
    f.name
    for f in fields(PartScalars)
    if f.name not in ("schema_id", "episode_id", "info_rows", "infos")
)
_encode: Callable[[PartScalars], bytes] = msgspec.msgpack.Encoder().encode
_decode: Callable[[bytes], PartScalars] = msgspec.msgpack.Decoder(PartScalars).decode


def _scalars(parts: Sequence[Part | PartColumns]) -> PartScalars:
    if not parts:
        raise ShardError("block: expected one or more parts, got none")
    schema = parts[0].schema_id
    values: dict[str, list[Any]] = {name: [] for name in ("episode_id", *_PER_PART)}
    start, info_rows, infos = 0, list[int](), list[str]()
    for part in parts:
        name = _first(part)
        if part.schema_id != schema:
            raise ShardError(
                f"block: expected parts of schema {schema}, got {part.schema_id} for episode {name}"
            )
        if isinstance(part, Part):
            if part.ordinal < 0 or part.episode_ordinal < 0:
                raise ShardError(f"block: episode {name}: expected ordinals, got none")
            for field, found in values.items():
                found.append(getattr(part, field))
            rows = sorted(part.infos)
            infos += [part.infos[row] for row in rows]
        else:
            if not part.scalars.ordinal:
                raise ShardError(f"block: episode {name}: expected ordinals, got none")
            for field, found in values.items():
                found += getattr(part.scalars, field)
            rows = part.scalars.info_rows
            infos += part.scalars.infos
        info_rows += [start + row for row in rows]
        start += part.steps
    return PartScalars(schema_id=schema, info_rows=info_rows, infos=infos, **values)


def _pieces(parts: Sequence[Part | PartColumns]) -> dict[str, list[bytes]]:
    """Buffer name -> the pieces of the parts."""
    pieces = {name: [getattr(p, name) for p in parts] for name in _ALIKE}
    for name in _LENGTHS:
        pieces[name] = _lengths(parts, name)
    for column in _SPARSE:
        found = [getattr(p, column.name) for p in parts]
        filled = zip(found, parts, strict=True) if any(found) else ()
        pieces[column.name] = [values or column.filled(p.steps) for values, p in filled]
    return pieces


def _lengths(parts: Sequence[Part | PartColumns], name: str) -> list[bytes]:
    """One uint32 per step, zeros for a part without lengths; no bytes if no part has any."""
    found = [getattr(p, name) for p in parts]
    if not any(found):
        return []
    for part, lengths in zip(parts, found, strict=True):
        if len(lengths) not in (0, 4 * part.steps):
            raise EpisodeError(
                f"episode {_first(part)}: {name}: expected {4 * part.steps} bytes for "
                f"{part.steps} steps, got {len(lengths)}"
            )
    return [lengths or bytes(4 * p.steps) for p, lengths in zip(parts, found, strict=True)]


def _first(part: Part | PartColumns) -> str:
    """The name of the first episode."""
    return part.episode_id if isinstance(part, Part) else part.scalars.episode_id[0]
