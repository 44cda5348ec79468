"""Where a collector keeps things: under a root directory, or in memory and nowhere else."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ingest.access.key_files import KEY_BYTES, redaction_key
from ingest.collector.address_file import LiveAddress, forget_address
from ingest.collector.backup_restore import notice_restore
from ingest.collector.live_policies import LivePolicies, check_specs
from ingest.collector.writer_thread import Writer
from storage.declarations.declaration import PolicyDeclaration
from storage.declarations.policy_files import load_declarations
from storage.errors import JournalLocked, JournalLookedAt
from storage.experience.episode import Part
from storage.journal.memory_journal import MemoryJournal
from storage.journal.sqlite_journal import Journal, SqliteJournal
from storage.shards.names import ShardInfo, next_ordinals
from storage.shards.writer_process import WriterProcess

if TYPE_CHECKING:
    from storage.shards.unrecorded_shards import FoundShard

log = logging.getLogger("headrace.server")

LOCK_SECONDS, LOOK_SECONDS = 10.0, 0.05
"""How long a start waits for those who look at its journal (`verify` and `ls` copy it), and how
often it tries."""


class Stores(msgspec.Struct, frozen=True):
    """What a collector writes to and acts with. `durable`: whether it outlives the process."""

    policies: Mapping[str, PolicyDeclaration]
    journal: Journal
    writer: Writer
    live: LivePolicies
    durable: bool
    redaction_key: bytes


def stores_under(root: Path, compression: str = "zstd") -> Stores:
    """The stores of a root directory.

    It waits a few seconds for those who look at the journal, and not at all for a collector. Raises
    DeclarationError, JournalLocked, StorageError, OSError.
    """
    policies = load_declarations(root)
    check_specs(policies)
    key = redaction_key(root, policies.values())
    journal = _opened(root / "journal")
    notice_restore(journal, policies, ShardFolder(root / "shards"), received=time.time_ns() // 1000)
    writer = WriterProcess(
        root / "shards",
        owner=journal.collector_id,
        beside=(root, root / "journal"),
        compression=compression,  # type: ignore[arg-type]  # the command line checks it
    )
    live = LivePolicies(root, policies)
    return Stores(policies, journal, writer, live, durable=True, redaction_key=key)


def _opened(directory: Path) -> SqliteJournal:
    """The journal. JournalLocked says where the collector that has it serves."""
    try:
        journal = _once_unseen(directory)
    except JournalLocked as error:
        where = _served_at(directory)
        raise JournalLocked(f"{error}{where}") from error
    forget_address(directory)  # of the one before: this one does not serve yet
    return journal


def _once_unseen(directory: Path) -> SqliteJournal:
    """The journal, as soon as nobody looks at it."""
    until, told = time.monotonic() + LOCK_SECONDS, False
    while True:
        try:
            return SqliteJournal.open(directory)
        except JournalLookedAt as error:
            if time.monotonic() > until:
                raise
            if not told:
                log.warning("this start waits: %s", error)
            told = True
        time.sleep(LOOK_SECONDS)


def _served_at(directory: Path) -> str:
    live = LiveAddress.of(directory)
    if live is None:
        return ""
    with closing(live):
        return f". Its collector serves {live.address}"


def stores_in_memory(policies: Mapping[str, PolicyDeclaration]) -> Stores:
    """Stores that leave nothing behind. Parts are for a tap: there is no shard to read later."""
    journal = MemoryJournal(keep_records=False)
    live, key = LivePolicies(None, policies), secrets.token_bytes(KEY_BYTES)
    return Stores(policies, journal, _NoShards(), live, durable=False, redaction_key=key)


class _NoShards:
    """A writer for parts that a tap keeps: what the journal holds of them can go at once."""

    def start(self) -> None: ...
    def check(self) -> None: ...
    def kill(self) -> None: ...
    def close(self) -> None: ...

    def write(self, stream: str, canonical_json: str, parts: Sequence[Part]) -> ShardInfo:
        first, last = parts[0].ordinal, parts[-1].ordinal
        steps = sum(part.steps for part in parts)
        return ShardInfo(Path("memory"), stream, first, last, "0" * 64, steps, len(parts), 0)


class ShardFolder(msgspec.Struct, frozen=True):
    """The shards under a root, as a journal that may have been restored looks at them."""

    directory: Path

    def ends(self, collector_ids: set[str]) -> Mapping[str, int]:
        """By the names of the files alone: this happens at every start."""
        found: dict[str, int] = {}
        for collector_id in collector_ids:
            found.update(next_ordinals(self.directory, collector_id))
        return found

    def later(
        self, known: Mapping[str, int], since: int
    ) -> tuple[Sequence[FoundShard], Mapping[str, int]]:
        """Read what the journal does not know of."""
        from storage.shards.unrecorded_shards import later_shards  # noqa: PLC0415  Arrow, and rarely needed

        return later_shards(self.directory, known, since)
