"""Shards: immutable Parquet files of parts, one row per step.

A shard is built in memory and written to a file whose name begins with a dot. This file is synced,
read back and compared, and renamed to a name that contains its digest; then the directory is
synced. So a file with a shard's name is always complete.

Example:
    >>> info = ShardWriter(root / "shards").write(stream, canonical_json, parts)
    >>> table = read_shard(info.path, verify="digest")
    >>> decode_column(table, "obs").shape
    (3, 4)
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from storage.errors import ObjectNotFound, ObjectUnusable
from storage.experience.episode import Part
from storage.objects.opening import Root, objects_at
from storage.objects.ranged import RangedFile
from storage.shards.arrow_arrays import decode_column, present, table_specs
from storage.shards.digests import digest_of
from storage.shards.names import (
    MAX_SHARD,
    ShardDamaged,
    ShardError,
    ShardInfo,
    ShardName,
    ShardWriteError,
    check_stream,
    is_about_the_file,
)
from storage.shards.part_block import PartBlock
from storage.shards.schema import CODED, ShardMetadata, metadata_for, stored_names
from storage.shards.stored_tables import in_file, in_memory
from storage.shards.tables import BlockColumns

if TYPE_CHECKING:
    import pandas as pd

DICTIONARY = [*CODED, "t", "ordinal", "episode_ordinal"]
"""Columns with few distinct values. Dictionaries for all columns would take 2.8 times as long.

The three counting columns become smaller and faster to compress: shards are a tenth smaller."""

SAMPLE_BYTES, WORTH_COMPRESSING = 262_144, 0.95
"""How many bytes of a column of long values are compressed as a trial, and the largest compressed
share at which the column is compressed."""

_PIECE_BYTES = 1_000_000
"""Bytes that are read back at a time, into a buffer that is reused: allocating new pages takes
longer than copying the bytes."""

_BYTES_IN_LISTS = pa.list_(pa.field("element", pa.int8(), nullable=False))
"""Zeros and ones: a dictionary halves their size and the time to read them."""

STATISTICS = ["t", "ts", "ordinal", "episode_ordinal"]
"""Readers select row groups by the statistics of these columns: order, time and identity."""


# --- writing ---------------------------------------------------------------------------------


class ShardWriter:
    """Writes blocks of parts as shards under `directory`: a root's `shards/` folder, or `Objects`.

    `row_group_bytes`: raw bytes of a row group. With `make=False` a missing `directory` is an
    error. `fsync` is called with the descriptor of the file and then of the directory; tests
    replace it by a slow or failing one.
    """

    def __init__(
        self,
        directory: Root,
        *,
        compression: Literal["zstd", "lz4"] = "zstd",
        row_group_bytes: int = 8_000_000,
        make: bool = True,
        fsync: Callable[[int], None] = os.fsync,
    ) -> None:
        if compression not in ("zstd", "lz4"):
            raise ShardError(f"compression: expected zstd or lz4, got {compression!r}")
        if row_group_bytes < 1:
            raise ShardError(f"row_group_bytes: expected 1 or more, got {row_group_bytes}")
        self.directory = directory
        self._compression: Literal["zstd", "lz4"] = compression
        self._row_group_bytes = row_group_bytes
        self._fsync = fsync
        self._shards = objects_at(directory, make=make, fsync=fsync)

    def __repr__(self) -> str:
        return f"ShardWriter({str(self.directory)!r}, compression={self._compression!r})"

    def write(
        self, stream: str, canonical_json: str, block: PartBlock | Sequence[Part]
    ) -> ShardInfo:
        """Write one shard; on return it is complete, in its place and durable.

        `canonical_json`: the stream's spaces. The same parts give the same bytes and name, so
        writing them again is harmless. Raises ShardWriteError (disk full, I/O), leaving no file
        behind, and ShardError for a block whose buffers do not fit its schema.
        """
        if not isinstance(block, PartBlock):
            block = PartBlock.of(block)
        check_stream(stream)
        ranges = _ranges(block.scalars.ordinal)
        metadata, schema = metadata_for(
            stream, canonical_json, ranges, rows=block.rows, parts=len(block.scalars.steps)
        )
        if metadata.schema_id != block.scalars.schema_id:
            raise ShardError(
                f"stream {stream}: expected parts of schema {metadata.schema_id}, got "
                f"{block.scalars.schema_id}"
            )
        data = self._encode(BlockColumns(block, metadata, schema), metadata)
        digest = digest_of(memoryview(data))
        name = f"{stream}/{ShardName(metadata.first, metadata.last, digest[:16])}"
        path = Path(f"{self._shards}/{name}")
        try:
            self._place(name, data, metadata)
        except OSError as error:
            raise ShardWriteError(f"{path}: {error}", error.errno) from error
        return _info(path, digest, metadata, data.size)

    def adopt(self, stream: str, first: int, last: int) -> ShardInfo | None:
        """Make durable, and return, the shard of exactly these ordinals left by a killed writer.

        Returns None if there is none. The writer may have been killed between renaming the file and
        syncing the folder. Raises ShardWriteError.
        """
        found = find_shard(self._shards, stream, first, last)
        if found is None:
            return None
        try:
            self._shards.settle(f"{stream}/{found.path.name}")
        except OSError as error:
            raise ShardWriteError(f"{found.path}: {error}", error.errno) from error
        return found

    def _encode(self, columns: BlockColumns, metadata: ShardMetadata) -> pa.Buffer:
        sink = pa.BufferOutputStream()
        rows = max(1, int(self._row_group_bytes / columns.bytes_per_row))
        table = in_file(columns.table(0, min(rows, columns.rows)), metadata.specs)
        with parquet_writer(sink, table, self._compression) as writer:
            writer.write_table(table, row_group_size=rows)
            for begin in range(rows, columns.rows, rows):
                more = columns.table(begin, min(begin + rows, columns.rows))
                writer.write_table(in_file(more, metadata.specs), row_group_size=rows)
            writer.add_key_value_metadata(metadata.to_footer())
        return sink.getvalue()

    def _place(self, name: str, data: pa.Buffer, metadata: ShardMetadata) -> None:
        stream = name.rpartition("/")[0]
        temporary = self._shards.staging(f"{stream}/{metadata.first:012}-{metadata.last:012}")
        try:
            with temporary.open("wb") as file:
                file.write(data)
                file.flush()
                self._fsync(file.fileno())
            _check_copy(temporary, data, metadata)
            self._shards.replace(name, temporary)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def parquet_writer(
    sink: Any, first: pa.Table, compression: Literal["zstd", "lz4"] = "zstd"
) -> pq.ParquetWriter:
    """A writer of a shard to a path or stream.

    `first`: the first rows as in the file, in one chunk; they decide which columns are compressed.
    """
    level = 1 if compression == "zstd" else None
    codecs = _codecs(first, pa.Codec(compression, level))
    small = [f"{f.name}.list.element" for f in first.schema if f.type == _BYTES_IN_LISTS]
    return pq.ParquetWriter(
        sink,
        first.schema.remove_metadata(),
        store_schema=False,  # it would contain our dictionaries
        compression=codecs,
        compression_level=level and {n: level for n in codecs if codecs[n] != "NONE"},
        use_dictionary=[*DICTIONARY, *small],
        write_statistics=STATISTICS,
        data_page_version="1.0",
        write_page_checksum=True,
    )


def _codecs(table: pa.Table, codec: pa.Codec) -> dict[str, str]:
    """Choose the codec of each column, by its path in Parquet, from the first rows.

    Long values that hardly compress, such as camera images with noise, are stored uncompressed.
    """
    codecs = {}
    for name, column in zip(table.column_names, table.columns, strict=True):
        kind, keeps = column.type, False
        values = column.chunk(0).buffers()[2] if pa.types.is_binary(kind) else None
        if values is not None and values.size >= SAMPLE_BYTES:
            size = codec.compress(values[:SAMPLE_BYTES]).size
            keeps = size > WORTH_COMPRESSING * SAMPLE_BYTES
        path = f"{name}.list.element" if pa.types.is_list(kind) else name
        codecs[path] = "NONE" if keeps else codec.name
    return codecs


def _check_copy(path: Path, data: pa.Buffer, metadata: ShardMetadata) -> None:
    """Read the file back: its bytes have to be the same, and its footer the intended one."""
    piece, at = bytearray(_PIECE_BYTES), 0
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(piece):
            here = pa.py_buffer(memoryview(piece)[:count])
            if at + count > data.size or not here.equals(data.slice(at, count)):
                break
            at += count
    if at != data.size:
        raise ShardWriteError(f"{path}: expected to read back the written bytes, got others")
    if _metadata(pq.ParquetFile(pa.BufferReader(data)), path) != metadata:
        raise ShardWriteError(f"{path}: expected a footer with the written metadata, got another")


def _ranges(ordinals: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """The ordinals as ascending inclusive ranges."""
    values = np.unique(np.array(ordinals, np.int64))
    cuts = np.flatnonzero(np.diff(values) > 1)
    firsts = values[np.concatenate([[0], cuts + 1])]
    lasts = values[np.concatenate([cuts, [len(values) - 1]])]
    return tuple(zip(firsts.tolist(), lasts.tolist(), strict=True))


def _info(path: Path, digest: str, metadata: ShardMetadata, nbytes: int) -> ShardInfo:
    return ShardInfo(
        path,
        metadata.stream,
        metadata.first,
        metadata.last,
        digest,
        metadata.rows,
        metadata.parts,
        nbytes,
    )


# --- reading ---------------------------------------------------------------------------------


Shard: TypeAlias = Path | str | RangedFile
"""The path of a shard, or a shard in another store."""
Verify: TypeAlias = Literal["digest", "pages"]


def read_shard(
    shard: Shard,
    *,
    columns: Sequence[str] | None = None,
    verify: Verify | None = None,
    coded: Sequence[str] = (),
) -> pa.Table:
    """Read a shard's rows as an Arrow table; its schema's metadata is the footer.

    `verify="digest"` hashes the whole file first and finds every changed byte; "pages" checks the
    checksums of the pages that are read; None trusts the file. `coded`: text columns that come with
    the dictionaries of the file.

    Raises ShardDamaged; ShardError for a column that is not there; OSError (FileNotFoundError, ...)
    from the system.
    """
    with _opened(shard, verify, coded) as (file, metadata):
        names = None if columns is None else stored_names(columns, metadata.columns)
        _check_columns(shard, file.schema_arrow.names, names)
        # most shards are small
        table = in_memory(file.read(columns=names, use_threads=False), metadata)
        if len(table) != metadata.rows:
            raise ShardDamaged(f"{shard}: expected {metadata.rows} rows, got {len(table)}")
        return table


def shard_metadata(shard: Shard) -> ShardMetadata:
    """Read a shard's footer. Raises ShardDamaged if it is not a shard's, and OSError."""
    with _opened(shard) as (_, metadata):
        return metadata


def rows_of_policy(shard: Shard, policy_id: str) -> tuple[int, int]:
    """Return (rows of a policy, all rows). Raises ShardDamaged if it is no shard, and OSError."""
    with _opened(shard, "pages") as (file, metadata):
        found = file.read(columns=["policy_id"]).column(0).cast(pa.string())
        mine = pc.sum(pc.equal(found, policy_id), min_count=0).as_py()
        return int(mine), metadata.rows


@contextlib.contextmanager
def _opened(
    shard: Shard, verify: Verify | None = None, coded: Sequence[str] = ()
) -> Iterator[tuple[pq.ParquetFile, ShardMetadata]]:
    """A shard and its footer. What its bytes raise is ShardDamaged, also in the caller's block."""
    with damage_named(shard):
        content: Any = RangedFile.at(shard)
        if verify == "digest":
            data = content.whole()
            check_digest(shard, data)
            content = pa.BufferReader(data)
        with pq.ParquetFile(
            content, page_checksum_verification=verify == "pages", read_dictionary=list(coded)
        ) as file:
            yield file, _metadata(file, shard)


def find_shard(shards: Root, stream: str, first: int, last: int) -> ShardInfo | None:
    """Find the intact shard of exactly these ordinals, which a restart can adopt; None without one.

    `shards` is the `shards/` folder. Damaged or unreadable files of that range are skipped. Raises
    OSError if the cause is not the file itself.
    """
    objects = objects_at(shards)
    for name in objects.names(f"{check_stream(stream)}/{first:012}-{last:012}-"):
        if name.endswith("/"):
            continue
        path = Path(f"{objects}/{name}")
        try:
            with damage_named(path):
                data = objects.read(name, limit=MAX_SHARD)
                digest = check_digest(path, data)
                metadata = _metadata(pq.ParquetFile(pa.BufferReader(data)), path)
        except ShardDamaged:
            continue
        except OSError as error:
            if not is_about_the_file(error):
                raise
            continue
        if (metadata.stream, metadata.first, metadata.last) == (stream, first, last):
            return _info(path, digest, metadata, len(data))
    return None


def to_pandas(shard: Shard) -> pd.DataFrame:
    """Read a shard as a DataFrame: arrays and numbers instead of bytes. Needs pandas.

    Vectors and images are one array per row. An absent `final_obs` or `action_dist_inputs` is None.
    Raises the errors of `read_shard`.
    """
    import pandas as pd  # noqa: PLC0415  an optional extra, rarely needed

    table = read_shard(shard, verify="digest")
    specs = table_specs(table.schema)
    frame: dict[str, Any] = {}
    for name in table.column_names:
        spec = specs.get(name)
        if spec is None or (spec.encoding in ("scalar", "text") and not spec.nullable):
            frame[name] = table.select([name]).to_pandas()[name]
        else:
            rows = list(decode_column(table, name))
            valid = present(table, name)
            found = [row if here else None for row, here in zip(rows, valid, strict=True)]
            frame[name] = pd.Series(found, dtype=object)
    return pd.DataFrame(frame)


@contextlib.contextmanager
def damage_named(shard: Shard) -> Iterator[None]:
    """Turn whatever Arrow raises for a shard's bytes into ShardDamaged; also what is no file.

    Errors that are not due to the bytes pass: ours, too little memory, and those of the store.
    """
    try:
        yield
    except ObjectUnusable as error:
        raise ShardDamaged(str(error)) from error
    except (ShardError, ObjectNotFound, MemoryError):  # includes Arrow's own error for this
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise ShardDamaged(f"{shard}: {error}") from error


def check_digest(shard: Shard, data: bytes) -> str:
    """The file's digest in hex. Raises ShardDamaged if it does not match the file's name."""
    name = ShardName.parse(str(shard).rpartition("/")[2])
    if name is None:
        raise ShardDamaged(f"{shard}: expected a shard's name, which holds its digest")
    digest = digest_of(data)
    if digest[:16] != name.digest16:
        raise ShardDamaged(f"{shard}: expected digest {name.digest16}, found {digest[:16]}")
    return digest


def _metadata(file: pq.ParquetFile, shard: Shard) -> ShardMetadata:
    footer = file.schema_arrow.metadata
    metadata = ShardMetadata.from_footer(footer, str(shard))
    if file.metadata.num_rows != metadata.rows:
        raise ShardDamaged(
            f"{shard}: expected {metadata.rows} rows, the file has {file.metadata.num_rows}"
        )
    return metadata


def _check_columns(shard: Shard, names: Sequence[str], wanted: Sequence[str] | None) -> None:
    missing = [name for name in wanted or () if name not in names]
    if missing:
        raise ShardError(f"{shard}: expected columns of {', '.join(names)}, got {missing}")
