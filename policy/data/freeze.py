"""Manifests: the fixed data set of a training run, as ordinals of streams.

    frozen = freeze("run", "default")
    frozen.path                  # run/manifests/{hash16}.json
    train("run", "default", manifest=frozen.streams)

A log grows during training; a manifest does not. Its hash covers only the schema and the ordinals.
So freezing the same data again gives the same file, even if it is in other shards, and jobs on it
are done once (policy.data.run_once).
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from policy.data.schemas import OTHER_SCHEMA, in_other_schemas, never_stored
from storage.declarations.declaration import check_policy_id
from storage.declarations.policy_files import load_declarations
from storage.errors import NothingYet
from storage.experience.episode import DEFAULT_POLICY
from storage.experience.range_set import RangeSet
from storage.reading.exclusion import TRANSIENT
from storage.reading.retries import RETRY_FOR, try_again
from storage.reading.sources import DirectorySource, ScanIncomplete, ShardFile
from storage.shards.names import ShardDamaged, ShardError, check_stream
from storage.shards.shard import shard_metadata
from storage.system.files import make_directory, replace_file
from storage.system.formats import require_format
from storage.weights.manifest import canonical, sha256
from storage.wording import counted

__all__ = ["Frozen", "FrozenDataError", "NothingToFreeze", "freeze", "load_frozen"]

FOLDER = "manifests"
FORMAT_VERSION = 1
HASH_DIGITS = 16
SCANS = 5


class FrozenDataError(ValueError):
    """A manifest file cannot be used; the text says which and why."""


class NothingToFreeze(ValueError):
    """No shard has the requested schema, or can be read; the text names the folder."""


@dataclass(frozen=True, kw_only=True)
class Frozen:
    """A frozen data set. Ranges of ordinals are inclusive.

    `rows` and `parts` are the sums of the shards' footers; they include rows of other policies with
    the same schema.
    """

    path: Path
    hash: str  # 16 hex digits, of the schema and the streams
    schema_id: str
    streams: Mapping[str, list[list[int]]]  # stream -> [[first, last], ...]
    rows: int
    parts: int
    created: int  # microseconds since the epoch
    unchanged: bool = False  # the file existed already
    skipped: Mapping[str, str] = field(default_factory=dict)  # damaged shard -> why
    other_schemas: int = 0  # rows of the policy with another schema

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain types for strict JSON; `manifest` is the path."""
        return {
            "manifest": str(self.path),
            "hash": self.hash,
            "schema_id": self.schema_id,
            "streams": dict(self.streams),
            "rows": self.rows,
            "parts": self.parts,
            "created": self.created,
            "unchanged": self.unchanged,
            "skipped": dict(self.skipped),
            "other_schemas": self.other_schemas,
        }


def freeze(
    root: Path | str,
    policy_id: str = DEFAULT_POLICY,
    *,
    schema_id: str | None = None,
    retry_for: float = RETRY_FOR,
    clock: Callable[[], float] = time.time,
) -> Frozen:
    """Write the ordinals of all shards with a policy's schema to `manifests/{hash16}.json`.

    `schema_id` replaces the declared schema. A shard with a damaged footer is left out and named in
    `skipped`; one that cannot be read is tried again for `retry_for` seconds. `clock` gives seconds
    since the epoch.

    Raises NothingYet if there is no shard of the policy's schema so far, and NothingToFreeze if
    none has a requested `schema_id` and none will, or all are damaged. Raises ReaderError if shards
    could not be read, and ValueError if there are several schemas and the policy is not declared.
    """
    root = Path(root)
    frozen = _at_rest(root, check_policy_id(policy_id), schema_id, retry_for)
    others = in_other_schemas(root, policy_id, frozen.schema_id)[OTHER_SCHEMA]
    frozen = replace(frozen, other_schemas=others)
    if not frozen.streams:
        never = never_stored(root, policy_id, schema_id)
        closed = frozen.skipped or never or (schema_id is not None and others)
        raise (NothingToFreeze if closed else NothingYet)(
            f"policy {policy_id!r}: expected shards of schema {frozen.schema_id} under "
            f"{root / 'shards'}, found none that can be read ({len(frozen.skipped)} damaged; other "
            f"schemas: {counted(frozen.other_schemas, 'row')}){never}"
        )
    try:
        there = load_frozen(frozen.path)
    except FileNotFoundError:
        frozen = replace(frozen, created=int(clock() * 1_000_000))
        make_directory(frozen.path.parent)
        replace_file(frozen.path, _encode(frozen))
        return frozen
    return replace(there, unchanged=True, skipped=frozen.skipped, other_schemas=others)


def load_frozen(path: Path | str) -> Frozen:
    """Read a manifest file. Raises FileNotFoundError, FrozenDataError."""
    path = Path(path)
    try:
        document = json.loads(path.read_bytes())
        frozen = _decode(document, path)
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError, ShardError) as error:
        raise FrozenDataError(
            f"{path}: expected a manifest of `headrace freeze`: {error}"
        ) from error
    found = _hash(frozen.schema_id, frozen.streams)
    if frozen.hash != found or path.name != f"{found}.json":
        raise FrozenDataError(
            f"{path}: expected the name and hash {found}, got {frozen.hash!r:.40}"
        )
    return frozen


def _at_rest(root: Path, policy_id: str, schema_id: str | None, retry_for: float) -> Frozen:
    """The data set of the current shards. If one was replaced since the scan, scan again."""
    for _ in range(SCANS - 1):
        with contextlib.suppress(FileNotFoundError):
            return _scan(root, policy_id, schema_id, retry_for)
    return _scan(root, policy_id, schema_id, retry_for)


def _scan(root: Path, policy_id: str, schema_id: str | None, retry_for: float) -> Frozen:
    with DirectorySource(root) as source:
        shards = try_again(source.scan, str(root), retry_for, (ScanIncomplete,))
    schema_id = schema_id or _schema_of(root, policy_id, shards)
    mine = [shard for shard in shards if shard.schema_id == schema_id]
    return _account(mine, root, schema_id, retry_for)


def _schema_of(root: Path, policy_id: str, shards: list[ShardFile]) -> str:
    declaration = load_declarations(root).get(policy_id)
    if declaration is not None:
        return declaration.schema_id
    schemas = sorted({shard.schema_id for shard in shards})
    if len(schemas) > 1:
        raise ValueError(
            f"policy {policy_id!r} is not declared under {root / 'policies'}, and the shards have "
            f"{len(schemas)} schemas: {', '.join(schemas)}; pass schema_id= (--schema-id)"
        )
    return schemas[0] if schemas else "unknown"


def _account(shards: list[ShardFile], root: Path, schema_id: str, retry_for: float) -> Frozen:
    """Sum the footers of `shards`; a file whose ordinals other files have adds nothing.

    Raises FileNotFoundError if a shard is missing.
    """
    streams: dict[str, RangeSet] = {}
    skipped: dict[str, str] = {}
    rows = parts = 0
    for shard in shards:
        try:
            read = partial(shard_metadata, Path(shard.place))
            metadata = try_again(read, shard.place, retry_for, TRANSIENT)
        except ShardDamaged as error:
            skipped[f"{shard.stream}/{shard.name}"] = str(error)
            continue
        known = streams.setdefault(shard.stream, RangeSet())
        if all(known.contains_range(first, last) for first, last in metadata.ranges):
            continue
        known.update(metadata.ranges)
        rows, parts = rows + metadata.rows, parts + metadata.parts
    listed = {stream: ranges.to_json() for stream, ranges in sorted(streams.items())}
    name = _hash(schema_id, listed)
    return Frozen(
        path=root / FOLDER / f"{name}.json",
        hash=name,
        schema_id=schema_id,
        streams=listed,
        rows=rows,
        parts=parts,
        created=0,
        skipped=skipped,
    )


def _hash(schema_id: str, streams: Mapping[str, list[list[int]]]) -> str:
    body = {"schema_id": schema_id, "streams": dict(streams)}
    return sha256(canonical(body, "manifest"))[:HASH_DIGITS]


def _encode(frozen: Frozen) -> bytes:
    document = {
        "format": FORMAT_VERSION,
        "hash": frozen.hash,
        "schema_id": frozen.schema_id,
        "streams": dict(frozen.streams),
        "rows": frozen.rows,
        "parts": frozen.parts,
        "created": frozen.created,
    }
    return json.dumps(document, sort_keys=True, indent=1).encode() + b"\n"


def _decode(document: Any, path: Path) -> Frozen:
    require_format(document, FORMAT_VERSION, path)
    return Frozen(
        path=path,
        hash=document["hash"],
        schema_id=document["schema_id"],
        streams={
            check_stream(stream): RangeSet.from_json(ranges).to_json()
            for stream, ranges in document["streams"].items()
        },
        rows=document["rows"],
        parts=document["parts"],
        created=document["created"],
    )
