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
from collections.abc import Callable, Mapping, Sequence
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
from storage.objects.interface import Objects
from storage.objects.opening import Root, objects_at, require_local
from storage.reading.exclusion import TRANSIENT
from storage.reading.listing import ShardFile
from storage.reading.objects_source import source_at
from storage.reading.retries import try_again
from storage.reading.sources import ScanIncomplete, StoredSource
from storage.shards.names import ShardDamaged, ShardError, check_stream
from storage.shards.schema import ShardMetadata
from storage.shards.shard import shard_metadata
from storage.system.backoff import RETRY_FOR
from storage.system.formats import require_format
from storage.weights.manifest import canonical, sha256
from storage.wording import counted

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

    folder: Objects = field(compare=False, repr=False)  # of the manifest
    hash: str  # 16 hex digits, of the schema and the streams
    schema_id: str
    streams: Mapping[str, list[list[int]]]  # stream -> [[first, last], ...]
    rows: int
    parts: int
    created: int  # microseconds since the epoch
    unchanged: bool = False  # the file existed already
    skipped: Mapping[str, str] = field(default_factory=dict)  # damaged shard -> why
    other_schemas: int = 0  # rows of the policy with another schema

    @property
    def place(self) -> str:
        """Where the manifest is: a path, or an address."""
        return f"{self.folder}/{self.hash}.json"

    @property
    def path(self) -> Path:
        """The manifest's file under a local root. Raises ValueError under another."""
        return require_local(self.folder, "path") / f"{self.hash}.json"

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain types for strict JSON; `manifest` is the place."""
        return {
            "manifest": self.place,
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
    root: Root,
    policy_id: str = DEFAULT_POLICY,
    *,
    schema_id: str | None = None,
    up_to: Mapping[str, int] | None = None,
    retry_for: float = RETRY_FOR,
    clock: Callable[[], float] = time.time,
) -> Frozen:
    """Write the ordinals of all shards with a policy's schema to `manifests/{hash16}.json`.

    `schema_id` replaces the declared schema. `up_to`: stream -> the last ordinal to use; streams
    that it does not name are left out. A shard with a damaged footer is left out and named in
    `skipped`; one that cannot be read is tried again for `retry_for` seconds. `clock` gives seconds
    since the epoch.

    Raises NothingYet if there is no shard of the policy's schema so far, and NothingToFreeze if
    none has a requested `schema_id` and none will, or all are damaged. Raises ReaderError if shards
    could not be read, and ValueError if there are several schemas and the policy is not declared.
    """
    objects = objects_at(root)
    frozen = _at_rest(objects, check_policy_id(policy_id), schema_id, up_to, retry_for)
    others = in_other_schemas(root, policy_id, frozen.schema_id)[OTHER_SCHEMA]
    frozen = replace(frozen, other_schemas=others)
    if not frozen.streams:
        never = never_stored(root, policy_id, schema_id)
        closed = frozen.skipped or never or (schema_id is not None and others)
        raise (NothingToFreeze if closed else NothingYet)(
            f"policy {policy_id!r}: expected shards of schema {frozen.schema_id} under "
            f"{objects}/shards, found none that can be read ({len(frozen.skipped)} damaged; other "
            f"schemas: {counted(frozen.other_schemas, 'row')}){never}"
        )
    try:
        there = _load(frozen.folder, f"{frozen.hash}.json")
    except FileNotFoundError:
        frozen = replace(frozen, created=int(clock() * 1_000_000))
        frozen.folder.replace(f"{frozen.hash}.json", _encode(frozen))
        return frozen
    return replace(there, unchanged=True, skipped=frozen.skipped, other_schemas=others)


def load_frozen(manifest: Path | str) -> Frozen:
    """Read the manifest at a path or an address. Raises FileNotFoundError, FrozenDataError."""
    folder, slash, name = str(manifest).rpartition("/")
    return _load(objects_at(folder or slash or "."), name)


def _load(folder: Objects, name: str) -> Frozen:
    where = f"{folder}/{name}"
    try:
        document = json.loads(folder.read(name))
        frozen = _decode(document, where, folder)
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError, ShardError) as error:
        raise FrozenDataError(
            f"{where}: expected a manifest of `headrace freeze`: {error}"
        ) from error
    found = _hash(frozen.schema_id, frozen.streams)
    if frozen.hash != found or name != f"{found}.json":
        raise FrozenDataError(
            f"{where}: expected the name and hash {found}, got {frozen.hash!r:.40}"
        )
    return frozen


def _at_rest(
    root: Objects,
    policy_id: str,
    schema_id: str | None,
    up_to: Mapping[str, int] | None,
    retry_for: float,
) -> Frozen:
    """The data set of the current shards. If one was replaced since the scan, scan again."""
    for _ in range(SCANS - 1):
        with contextlib.suppress(FileNotFoundError):
            return _scan(root, policy_id, schema_id, up_to, retry_for)
    return _scan(root, policy_id, schema_id, up_to, retry_for)


def _scan(
    root: Objects,
    policy_id: str,
    schema_id: str | None,
    up_to: Mapping[str, int] | None,
    retry_for: float,
) -> Frozen:
    source = source_at(root)
    shards = try_again(source.scan, str(root), retry_for, (ScanIncomplete,))
    schema_id = schema_id or _schema_of(root, policy_id, shards)
    mine = [shard for shard in shards if shard.schema_id == schema_id]
    return _account(mine, source, schema_id, up_to, retry_for)


def _schema_of(root: Objects, policy_id: str, shards: list[ShardFile]) -> str:
    declaration = load_declarations(root).get(policy_id)
    if declaration is not None:
        return declaration.schema_id
    schemas = sorted({shard.schema_id for shard in shards})
    if len(schemas) > 1:
        raise ValueError(
            f"policy {policy_id!r} is not declared under {root}/policies, and the shards have "
            f"{len(schemas)} schemas: {', '.join(schemas)}; pass schema_id= (--schema-id)"
        )
    return schemas[0] if schemas else "unknown"


def _account(
    shards: list[ShardFile],
    source: StoredSource,
    schema_id: str,
    up_to: Mapping[str, int] | None,
    retry_for: float,
) -> Frozen:
    """Sum the footers of `shards`; a file whose ordinals other files have adds nothing.

    Only ordinals up to `up_to` count; the sums are those of the whole files that have some.

    Raises FileNotFoundError if a shard is missing.
    """
    streams: dict[str, RangeSet] = {}
    skipped: dict[str, str] = {}
    rows = parts = 0
    for shard in shards:
        try:
            read = partial(_footer, source, shard)
            metadata = try_again(read, shard.place, retry_for, TRANSIENT)
        except ShardDamaged as error:
            skipped[f"{shard.stream}/{shard.name}"] = str(error)
            continue
        last_used = None if up_to is None else up_to.get(shard.stream, -1)
        ranges = metadata.ranges if last_used is None else _cut(metadata.ranges, last_used)
        known = streams.setdefault(shard.stream, RangeSet()) if ranges else RangeSet()
        if all(known.contains_range(first, last) for first, last in ranges):
            continue
        known.update(ranges)
        rows, parts = rows + metadata.rows, parts + metadata.parts
    listed = {stream: ranges.to_json() for stream, ranges in sorted(streams.items())}
    name = _hash(schema_id, listed)
    return Frozen(
        folder=source.home.under(FOLDER),
        hash=name,
        schema_id=schema_id,
        streams=listed,
        rows=rows,
        parts=parts,
        created=0,
        skipped=skipped,
    )


def _cut(ranges: Sequence[Sequence[int]], last_used: int) -> list[tuple[int, int]]:
    """The ranges up to an ordinal."""
    return [(first, min(last, last_used)) for first, last in ranges if first <= last_used]


def _footer(source: StoredSource, shard: ShardFile) -> ShardMetadata:
    return shard_metadata(source.open(shard))


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


def _decode(document: Any, where: str, folder: Objects) -> Frozen:
    require_format(document, FORMAT_VERSION, where)
    return Frozen(
        folder=folder,
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
