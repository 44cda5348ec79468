"""One shard as `verify` looks at it, and what else may lie under `shards/`."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from storage.experience.range_set import RangeSet
from storage.shards.names import ShardDamaged, ShardName, require_regular
from storage.shards.schema import ShardMetadata
from storage.shards.shard import read_shard

__all__ = ["as_text", "check_shard", "entries", "reason"]


LONGEST = 4095
"""Bytes of the longest path that Linux takes (PATH_MAX without its end): none beyond it can be
opened by its path, by us or by other tools."""


def entries(folder: Path) -> Iterator[Path]:
    """All that lies under `shards/`, folders by what is in them; sorted.

    A stream may be a link to a folder elsewhere. Any other link to a folder is itself an entry, and
    so is a folder that has the name of a shard.
    """
    levels = [_sorted(folder)]  # not a recursion: folders may be deeper than Python's stack
    while levels:
        entry = next(levels[-1], None)
        if entry is None:
            levels.pop()
            continue
        path, depth = Path(entry.path), len(levels) - 1
        is_folder = path.is_dir() if depth == 0 else entry.is_dir(follow_symlinks=False)
        if not is_folder or (depth == 1 and ShardName.parse(entry.name) is not None):
            yield path
        if is_folder:
            levels.append(_sorted(path))


def _sorted(folder: Path) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            there = [entry for entry in found if len(os.fsencode(entry.path)) <= LONGEST]
    except (FileNotFoundError, NotADirectoryError):  # gone meanwhile
        there = []
    return iter(sorted(there, key=lambda entry: entry.name))


def reason(path: Path, error: Exception) -> str:
    """Why a shard is damaged, without its path."""
    return str(error).removeprefix(f"{path}: ")


def check_shard(path: Path, name: ShardName) -> tuple[str, ShardMetadata]:
    """(SHA-256, footer) of a shard that is whole. Raises ShardDamaged, OSError."""
    require_regular(path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if digest[:16] != name.digest16:
        raise ShardDamaged(f"its name says digest {name.digest16}, its bytes {digest[:16]}")
    table = read_shard(path, verify="pages")
    metadata = ShardMetadata.from_footer(table.schema.metadata, str(path))
    if metadata.stream != path.parent.name:
        raise ShardDamaged(f"it lies in {path.parent.name}, but is of stream {metadata.stream}")
    if (metadata.first, metadata.last) != (name.first, name.last):
        raise ShardDamaged(
            f"its name says ordinals {name.first}-{name.last}, its footer "
            f"{metadata.first}-{metadata.last}"
        )
    _check_parts(table, metadata)
    return digest, metadata


def _check_parts(table: pa.Table, metadata: ShardMetadata) -> None:
    """The parts inside are those that the footer tells, each a run of steps without a gap."""
    parts = table.group_by(["ordinal", "agent_id"]).aggregate(
        [("t", "min"), ("t", "max"), ("t", "count_distinct"), ("t", "count")]
    )
    ordinals = RangeSet.of(pc.unique(parts["ordinal"]).to_pylist())
    if ordinals != RangeSet(metadata.ranges) or len(parts) != metadata.parts:
        raise ShardDamaged(
            f"its footer says {metadata.parts} parts of ordinals {as_text(metadata.ranges)}, "
            f"inside are {len(parts)} of {as_text(ordinals)}"
        )
    span = pc.add(pc.subtract(parts["t_max"], parts["t_min"]), 1)
    whole = pc.and_(
        pc.equal(parts["t_count"], span), pc.equal(parts["t_count_distinct"], parts["t_count"])
    )
    if not pc.all(whole).as_py():
        broken = parts.filter(pc.invert(whole))["ordinal"].to_pylist()
        raise ShardDamaged(f"the steps of ordinal {broken[0]} have a gap or are doubled")


def as_text(ranges: RangeSet | tuple[tuple[int, int], ...], most: int = 5) -> str:
    """`0-3, 7, 9-12`, cut after a few."""
    pairs = ranges.ranges() if isinstance(ranges, RangeSet) else list(ranges)
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in pairs[:most]]
    return ", ".join([*texts, "..."] if len(pairs) > most else texts) or "none"
