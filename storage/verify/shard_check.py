"""How `verify` checks one shard, and lists everything under `shards/`."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

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

__all__ = ["check_shard", "entries", "reason"]


LONGEST = 4095
"""The longest path that Linux accepts, in bytes (PATH_MAX without its terminator): neither our
readers nor other tools can open a longer one."""


def entries(folder: Path) -> Iterator[Path]:
    """All entries under `shards/`, sorted. Folders are represented by their entries.

    A stream may be a link to a folder elsewhere. Any other link to a folder is an entry itself, and
    so is a folder with the name of a shard.
    """
    levels = [_sorted(folder)]  # no recursion: folders may be nested deeper than Python's stack
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
    except (FileNotFoundError, NotADirectoryError):  # removed meanwhile
        there = []
    return iter(sorted(there, key=lambda entry: entry.name))


def reason(path: Path, error: Exception) -> str:
    """Why a shard is damaged, without its path."""
    return str(error).removeprefix(f"{path}: ")


def check_shard(path: Path, name: ShardName) -> tuple[str, ShardMetadata]:
    """Check one shard; return (SHA-256, footer). Raises ShardDamaged, OSError."""
    require_regular(path)
    content = path.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    if digest[:16] != name.digest16:
        raise ShardDamaged(f"its name says digest {name.digest16}, its bytes {digest[:16]}")
    try:
        return digest, _check_content(content, path, name)
    except (ShardDamaged, MemoryError):  # includes Arrow's own error for this
        raise
    except Exception as error:  # any error of decoding bytes with the right digest
        raise ShardDamaged(f"it cannot be decoded: {error!r:.300}") from error


def _check_content(content: bytes, path: Path, name: ShardName) -> ShardMetadata:
    """Check all columns as a reader checks those that it uses."""
    with pq.ParquetFile(
        pa.BufferReader(content), page_checksum_verification=True, read_dictionary=list(CODED)
    ) as file:
        schema = file.schema_arrow
        metadata = ShardMetadata.from_footer(schema.metadata, str(path))
        check_footer(schema, metadata, path.parent.name, name.first, name.last)
        check_size(content, file.metadata, schema, schema.names)
        # ending Arrow's threads has crashed the process before
        table = file.read(use_threads=False)
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
