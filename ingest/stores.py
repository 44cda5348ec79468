"""Where a collector keeps things: under a root directory, or in memory and nowhere else."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ingest.redaction_key import KEY_BYTES, redaction_key
from ingest.remote_inference import LivePolicies
from ingest.sealer import Writer
from storage.declarations import PolicyDeclaration
from storage.episode import Part
from storage.journal import Journal, SqliteJournal
from storage.memory_journal import MemoryJournal
from storage.policy_files import load_declarations
from storage.shard_files import ShardInfo, next_ordinals
from storage.writer_process import WriterProcess

log = logging.getLogger("headrace.server")

ADDRESS = "address"
"""The file beside the journal that says where its collector serves; true while the lock is held."""


@dataclass(frozen=True)
class Stores:
    """What a collector writes to and acts with. `durable`: whether it outlives the process."""

    policies: Mapping[str, PolicyDeclaration]
    journal: Journal
    writer: Writer
    live: LivePolicies
    durable: bool
    redaction_key: bytes


def stores_under(root: Path, compression: str = "zstd") -> Stores:
    """The stores of a root directory. Raises JournalLocked, StorageError, OSError."""
    policies = load_declarations(root)
    key = redaction_key(root, policies.values())
    journal = SqliteJournal.open(root / "journal")
    notice_restore(journal, next_ordinals(root / "shards", journal.collector_id))
    writer = WriterProcess(
        root / "shards",
        owner=journal.collector_id,
        compression=compression,  # type: ignore[arg-type]  # the command line checks it
    )
    live = LivePolicies(root, policies)
    return Stores(policies, journal, writer, live, durable=True, redaction_key=key)


def stores_in_memory(policies: Mapping[str, PolicyDeclaration]) -> Stores:
    """Stores that leave nothing behind. Parts are for a tap: there is no shard to read later."""
    journal = MemoryJournal(keep_records=False)
    live, key = LivePolicies(None, policies), secrets.token_bytes(KEY_BYTES)
    return Stores(policies, journal, _NoShards(), live, durable=False, redaction_key=key)


class _NoShards:
    """A writer for parts that a tap keeps: what the journal holds of them can go at once."""

    def start(self) -> None: ...
    def kill(self) -> None: ...
    def close(self) -> None: ...

    def write(self, stream: str, canonical_json: str, parts: Sequence[Part]) -> ShardInfo:
        first, last = parts[0].ordinal, parts[-1].ordinal
        steps = sum(part.steps for part in parts)
        return ShardInfo(Path("memory"), stream, first, last, "0" * 64, steps, len(parts), 0)


def notice_restore(journal: SqliteJournal, there: Mapping[str, int]) -> bool:
    """Whether shards hold ordinals that the journal never gave: then it came from a backup.

    `there`: stream -> the ordinal after its last shard, of the streams of this collector id.
    Its ordinals must not be given again, so it takes a new collector id. Episodes that the backup
    holds open, and that ended after it was made, are sealed once more under the new id.
    """
    beyond = {name: end for name, end in there.items() if end > journal.next_ordinal(name)}
    if beyond:
        old = journal.collector_id
        new = journal.renew_collector_id()
        log.error(
            "the journal is older than its shards (%s): it was restored from a backup. Collector "
            "%s goes on as %s; what the backup held open may be in shards twice",
            ", ".join(f"{name} up to {end - 1}" for name, end in sorted(beyond.items())),
            old,
            new,
        )
    return bool(beyond)
