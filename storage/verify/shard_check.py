"""One shard as `verify` looks at it, and what else may lie under `shards/`."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from storage.experience.range_set import RangeSet
from storage.shards.arrow_arrays import decode_values
from storage.shards.content import (
    check_alike,
    check_choices,
    check_column,
    check_endings,
    check_finals,
    check_footer,
    check_runs,
)
from storage.shards.names import ShardDamaged, ShardName, require_regular
from storage.shards.page_sizes import check_size
from storage.shards.schema import CODED, ShardMetadata

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
    content = path.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    if digest[:16] != name.digest16:
        raise ShardDamaged(f"its name says digest {name.digest16}, its bytes {digest[:16]}")
    try:
        return digest, _check_content(content, path, name)
    except (ShardDamaged, MemoryError):  # Arrow's lack of memory is one, too
        raise
    except Exception as error:  # whatever its right bytes cannot be decoded for
        raise ShardDamaged(f"it cannot be decoded: {error!r:.300}") from error


def _check_content(content: bytes, path: Path, name: ShardName) -> ShardMetadata:
    """What a reader checks of the columns that it uses, of all columns."""
    with pq.ParquetFile(
        pa.BufferReader(content), page_checksum_verification=True, read_dictionary=list(CODED)
    ) as file:
        schema = file.schema_arrow
        metadata = ShardMetadata.from_footer(schema.metadata, str(path))
        check_footer(schema, metadata, path.parent.name, name.first, name.last)
        check_size(content, file.metadata, schema, schema.names)
        table = file.read(use_threads=False)  # ending Arrow's threads has ended the process
    columns: dict[str, npt.NDArray[Any]] = {}
    for column in table.column_names:
        if column not in CODED and column != "infos" and not column.startswith("final_obs"):
            columns[column] = decode_values(table.column(column), metadata.columns.get(column))
        check_column(table.column(column), columns.get(column), metadata, column)
    runs = check_runs(
        columns["ordinal"],
        columns["t"],
        columns["episode_ordinal"],
        lambda: decode_values(table.column("agent_id"), None),
        metadata,
    )
    check_alike(table, runs)
    check_endings(runs, columns, decode_values(table.column("ended"), None))
    check_finals(table, runs, metadata)
    check_choices(table.column("source"), columns, metadata)
    return metadata


def as_text(ranges: RangeSet | tuple[tuple[int, int], ...], most: int = 5) -> str:
    """`0-3, 7, 9-12`, cut after a few."""
    pairs = ranges.ranges() if isinstance(ranges, RangeSet) else list(ranges)
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in pairs[:most]]
    return ", ".join([*texts, "..."] if len(pairs) > most else texts) or "none"
