"""`ls`: what lies in the shards under a root, told by footers and statistics alone.

No row is read, and nothing is verified (that is `verify`): a folder of thousands of shards is
listed in seconds, while a collector writes to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from storage.declarations.declaration import PolicyDeclaration
from storage.shards.names import ShardDamaged, ShardName, require_regular
from storage.shards.schema import ShardMetadata

__all__ = ["StreamListing", "list_streams"]


@dataclass(frozen=True, kw_only=True)
class StreamListing:
    """One stream: what its footers say. Times are microseconds since the epoch, None without rows.

    `policies` are those declared today with the stream's spaces; `unreadable` counts files that
    have no footer of ours, and what is no file.
    """

    stream: str
    shards: int
    parts: int
    rows: int
    nbytes: int
    first_ts: int | None
    last_ts: int | None
    policies: tuple[str, ...]
    spaces: str | None  # canonical JSON
    unreadable: int

    def to_dict(self) -> dict[str, Any]:
        """Plain types for strict JSON."""
        return asdict(self)


def list_streams(
    root: Path, declarations: Mapping[str, PolicyDeclaration]
) -> tuple[StreamListing, ...]:
    """Every stream under `root`, by name. A shard that vanishes meanwhile is passed over."""
    folders = sorted(path for path in (root / "shards").glob("*") if path.is_dir())
    return tuple(_listing(folder, declarations) for folder in folders)


def _listing(folder: Path, declarations: Mapping[str, PolicyDeclaration]) -> StreamListing:
    found: list[tuple[ShardMetadata, int]] = []
    times: list[int] = []
    unreadable = 0
    for path in sorted(folder.iterdir()):
        if ShardName.parse(path.name) is None:
            continue
        try:
            metadata, span = _footer(path)
            found.append((metadata, path.stat().st_size))
            times += span
        except FileNotFoundError:
            continue
        except (ShardDamaged, pa.ArrowException, OSError):
            unreadable += 1
    schema_id = folder.name.rpartition("-")[2]
    return StreamListing(
        stream=folder.name,
        shards=len(found),
        parts=sum(metadata.parts for metadata, _ in found),
        rows=sum(metadata.rows for metadata, _ in found),
        nbytes=sum(size for _, size in found),
        first_ts=min(times, default=None),
        last_ts=max(times, default=None),
        policies=tuple(name for name, d in declarations.items() if d.schema_id == schema_id),
        spaces=found[0][0].spaces if found else None,
        unreadable=unreadable,
    )


def _footer(path: Path) -> tuple[ShardMetadata, list[int]]:
    """(metadata, the smallest and largest `ts` of each row group)."""
    require_regular(path)
    with pq.ParquetFile(path) as file:
        metadata = ShardMetadata.from_footer(file.schema_arrow.metadata, str(path))
        column = file.metadata.schema.names.index("ts")
        times: list[int] = []
        for group in range(file.metadata.num_row_groups):
            statistics = file.metadata.row_group(group).column(column).statistics
            if statistics is not None and statistics.has_min_max:
                times += [statistics.min, statistics.max]
    return metadata, times
