"""The data set of a training run, frozen: which ordinals of which streams, under one name.

    frozen = freeze("run", "default")
    frozen.path                  # run/manifests/{hash16}.json
    train("run", "default", manifest=frozen.streams)

A log grows while it is learned from; a manifest does not. Its hash covers the schema and the
ordinals and nothing else, so that freezing the same shards twice, or after compaction, gives the
same file, and whatever is keyed by it (policy.runs) is done once.
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

from policy.jobs.schemas import OTHER_SCHEMA, in_other_schemas
from storage.declarations.declaration import check_policy_id
from storage.declarations.policy_files import load_declarations
from storage.experience.episode import DEFAULT_POLICY
from storage.experience.range_set import RangeSet
from storage.reading.exclusion import TRANSIENT
from storage.reading.retries import RETRY_FOR, try_again
from storage.reading.sources import DirectorySource, ScanIncomplete, ShardFile
from storage.shards.names import ShardDamaged, ShardError, check_stream
from storage.shards.shard import shard_metadata
from storage.system.files import make_directory, replace_file
from storage.weights.manifest import canonical, sha256

__all__ = ["Frozen", "ManifestError", "NothingToFreeze", "freeze", "load_frozen"]

FOLDER = "manifests"
FORMAT_VERSION = 1
HASH_DIGITS = 16
SCANS = 5


class ManifestError(ValueError):
    """A manifest file cannot be used; the text says which and why."""


class NothingToFreeze(ValueError):
    """There is no shard of the policy; the text says where was looked."""


@dataclass(frozen=True, kw_only=True)
class Frozen:
    """A frozen data set. Ranges are inclusive; rows and parts are those that the footers state.

    `rows` and `parts` cover the whole shards, of which a policy may share the schema with others.
    """

    path: Path
    hash: str  # 16 hex digits, of the schema and the streams
    schema_id: str
    streams: Mapping[str, list[list[int]]]  # stream -> [[first, last], ...]
    rows: int
    parts: int
    created: int  # microseconds since the epoch
    unchanged: bool = False  # the file was there already
    skipped: Mapping[str, str] = field(default_factory=dict)  # damaged shard -> why
    other_schemas: int = 0  # rows of the policy that have another schema

    def to_dict(self) -> dict[str, Any]:
        """Plain types for strict JSON; `manifest` is the file."""
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
    """Write down every ordinal at rest of a policy's schema, as `manifests/{hash16}.json`.

    `schema_id` takes the place of the declared one. Only whole shards count: one gets its name when
    it is complete, synced and checked. A shard whose footer makes no sense is left out and named in
    `skipped`; one that cannot be read is tried again for `retry_for` seconds. `other_schemas`
    counts the policy's rows of other schemas. `clock` gives seconds since the epoch. Raises
    NothingToFreeze, ReaderError for what could not be read, and ValueError when several schemas
    are there and the policy is not declared.
    """
    root = Path(root)
    frozen = _at_rest(root, check_policy_id(policy_id), schema_id, retry_for)
    others = in_other_schemas(root, policy_id, frozen.schema_id)[OTHER_SCHEMA]
    frozen = replace(frozen, other_schemas=others)
    if not frozen.streams:
        raise NothingToFreeze(
            f"policy {policy_id!r}: expected shards of schema {frozen.schema_id} under "
            f"{root / 'shards'}, found none that can be read ({len(frozen.skipped)} damaged; other "
            f"schemas: {frozen.other_schemas} rows)"
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
    """The data set of a manifest file. Raises FileNotFoundError, ManifestError."""
    path = Path(path)
    try:
        document = json.loads(path.read_bytes())
        frozen = _decode(document, path)
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError, ShardError) as error:
        raise ManifestError(f"{path}: expected a manifest of `headrace freeze`: {error}") from error
    found = _hash(frozen.schema_id, frozen.streams)
    if frozen.hash != found or path.name != f"{found}.json":
        raise ManifestError(f"{path}: expected the name and hash {found}, got {frozen.hash!r:.40}")
    return frozen


def _at_rest(root: Path, policy_id: str, schema_id: str | None, retry_for: float) -> Frozen:
    """What the shards hold now. One that vanishes was replaced since the scan: scan again."""
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
    """What the footers of `shards` add up to; a file that another one covers adds nothing.

    Raises FileNotFoundError when a shard is gone.
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
    if document["format"] != FORMAT_VERSION:
        raise ValueError(f"expected format {FORMAT_VERSION}, got {document['format']!r:.40}")
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
