"""How `verify` checks one shard, and lists everything under `shards/`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from storage.objects.folder import FolderObjects
from storage.objects.interface import Objects
from storage.objects.ranged import RangedFile
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
from storage.shards.decoded_size import check_size, group_bytes
from storage.shards.names import ShardDamaged, ShardError, ShardName
from storage.shards.schema import CODED, ShardMetadata
from storage.shards.shard import Shard, check_digest, damage_named
from storage.shards.stored_tables import in_memory

LONGEST = 4095
"""The longest path that Linux accepts, in bytes (PATH_MAX without its terminator): neither our
readers nor other tools can open a longer one."""


def entries(root: Objects) -> Iterator[tuple[str, bool]]:
    """All names under `shards/`, sorted, and whether each is a folder.

    Folders are represented by their entries. In a local folder there are also unfinished files, and
    links: a stream may be a link to a folder elsewhere. Any other link to a folder is an entry
    itself, and so is a folder with the name of a shard.
    """
    if isinstance(root, FolderObjects):
        yield from _files(root.root)
        return
    below = ["shards/"]
    while below:
        found = root.names(below.pop())
        below += [name for name in reversed(found) if name.endswith("/")]
        yield from ((name, False) for name in found if not name.endswith("/"))


def _files(folder: Path) -> Iterator[tuple[str, bool]]:
    # no recursion: folders may be nested deeper than Python's stack
    levels = [_sorted(folder / "shards")]
    while levels:
        entry = next(levels[-1], None)
        if entry is None:
            levels.pop()
            continue
        path, depth = Path(entry.path), len(levels) - 1
        is_folder = path.is_dir() if depth == 0 else entry.is_dir(follow_symlinks=False)
        if not is_folder or (depth == 1 and ShardName.parse(entry.name) is not None):
            yield path.relative_to(folder).as_posix(), path.is_dir()
        if is_folder:
            levels.append(_sorted(path))


def _sorted(folder: Path) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            there = [entry for entry in found if len(os.fsencode(entry.path)) <= LONGEST]
    except (FileNotFoundError, NotADirectoryError):  # removed meanwhile
        there = []
    return iter(sorted(there, key=lambda entry: entry.name))


def reason(place: str, error: Exception) -> str:
    """Why a shard is damaged, without its place."""
    return str(error).removeprefix(f"{place}: ")


class CheckedShard(NamedTuple):
    """A shard in which nothing is wrong: its digest, footer and rows, and its decoded bytes."""

    digest: str
    metadata: ShardMetadata
    table: pa.Table
    nbytes: int


def check_shard(shard: Shard, name: ShardName) -> CheckedShard:
    """Check and read one shard; its texts are dictionaries. Raises ShardDamaged, OSError."""
    with damage_named(shard):
        content = RangedFile.at(shard).whole()
        digest = check_digest(shard, content)
        try:
            return CheckedShard(digest, *_check_content(content, str(shard), name))
        except ShardDamaged:
            raise
        except ShardError as error:  # bytes with the right digest that have no decoding
            raise ShardDamaged(f"{shard}: it cannot be decoded: {error}") from error


def _check_content(
    content: bytes, place: str, name: ShardName
) -> tuple[ShardMetadata, pa.Table, int]:
    """Check all columns as a reader checks those that it uses."""
    with pq.ParquetFile(
        pa.BufferReader(content), page_checksum_verification=True, read_dictionary=list(CODED)
    ) as file:
        schema = file.schema_arrow
        metadata = ShardMetadata.from_footer(schema.metadata, place)
        check_footer(schema, metadata, place.split("/")[-2], name.first, name.last)
        check_size(len(content), file.metadata, schema, schema.names)
        nbytes = sum(group_bytes(file.metadata, schema, schema.names))
        # ending Arrow's threads has crashed the process before
        table = in_memory(file.read(use_threads=False), metadata)
    columns: dict[str, npt.NDArray[Any]] = {}
    for column in table.column_names:
        if column not in CODED and column != "infos" and not column.startswith("final_obs"):
            columns[column] = decode_values(table.column(column), metadata.specs.get(column))
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
    return metadata, table, nbytes
