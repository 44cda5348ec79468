"""A collector's stores: under a root, or only in memory."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

import msgspec

from ingest.access.key_files import KEY_BYTES, etag_key, redaction_key
from ingest.collector.address_file import LiveAddress, forget_address
from ingest.collector.adoption import require_current
from ingest.collector.live_policies import LivePolicies, check_specs
from ingest.collector.writer_thread import Writer
from storage.declarations.declaration import PolicyDeclaration
from storage.declarations.policy_files import load_declarations
from storage.errors import JournalBehind, JournalLocked, JournalLookedAt
from storage.experience.episode import Part
from storage.experience.part_columns import PartColumns, parts_in
from storage.journal.memory_journal import MemoryJournal
from storage.journal.records import Journal
from storage.journal.sqlite_journal import SqliteJournal
from storage.shards.names import ShardInfo
from storage.shards.replacements import given_ordinals
from storage.shards.writer_process import WriterProcess

log = logging.getLogger("headrace.server")

LOCK_SECONDS, LOOK_SECONDS = 10.0, 0.05
"""Seconds that a start waits for readers of its journal (`verify` and `ls` copy it), and seconds
between tries."""


class Stores(msgspec.Struct, frozen=True):
    """The stores of a collector. `durable`: whether they outlive the process."""

    policies: Mapping[str, PolicyDeclaration]
    journal: Journal
    writer: Writer
    live: LivePolicies
    durable: bool
    redaction_key: bytes


def stores_under(root: Path, compression: str = "zstd") -> Stores:
    """Open the stores under a root.

    If other processes read the journal, it waits for up to `LOCK_SECONDS`; if a collector has it
    open, it fails at once. Raises DeclarationError, JournalBehind, JournalLocked, StorageError,
    OSError.
    """
    policies = load_declarations(root)
    check_specs(root, policies)
    key = redaction_key(root)
    journal = _opened(root / "journal")
    try:
        require_current(journal, partial(given_ordinals, root))
    except JournalBehind:
        journal.close()
        raise
    writer = WriterProcess(
        root / "shards",
        owner=journal.collector_id,
        sources=(root, root / "journal"),
        compression=compression,  # type: ignore[arg-type]  # the command line checks it
    )
    live = LivePolicies(root, policies, etag_key(root))
    return Stores(policies, journal, writer, live, durable=True, redaction_key=key)


def _opened(directory: Path) -> SqliteJournal:
    """Open the journal. JournalLocked has the address of the collector that has it open."""
    try:
        journal = _once_unseen(directory)
    except JournalLocked as error:
        where = _served_at(directory)
        raise JournalLocked(f"{error}{where}") from error
    forget_address(directory)  # the previous collector's; this one has no address yet
    return journal


def _once_unseen(directory: Path) -> SqliteJournal:
    """Open the journal as soon as no other process reads it."""
    until, warned = time.monotonic() + LOCK_SECONDS, False
    while True:
        try:
            return SqliteJournal.open(directory)
        except JournalLookedAt as error:
            if time.monotonic() > until:
                raise
            if not warned:
                log.warning("startup is waiting: %s", error)
            warned = True
        time.sleep(LOOK_SECONDS)


def _served_at(directory: Path) -> str:
    live = LiveAddress.of(directory)
    if live is None:
        return ""
    with closing(live):
        return f". Its collector serves {live.address}"


def stores_in_memory(policies: Mapping[str, PolicyDeclaration]) -> Stores:
    """Stores in memory. Parts go only to a tap: there are no shards."""
    journal = MemoryJournal(keep_records=False)
    live, key = LivePolicies(None, policies), secrets.token_bytes(KEY_BYTES)
    return Stores(policies, journal, _NoShards(), live, durable=False, redaction_key=key)


class _NoShards:
    """A writer without shards, so that the journal drops parts at once; a tap has them."""

    def start(self) -> None: ...
    def check(self) -> None: ...
    def kill(self) -> None: ...
    def close(self) -> None: ...

    def write(
        self, stream: str, canonical_json: str, parts: Sequence[Part | PartColumns]
    ) -> ShardInfo:
        begin, count = parts[0], sum(map(parts_in, parts))
        first = begin.ordinal if isinstance(begin, Part) else begin.scalars.ordinal[0]
        steps, last = sum(part.steps for part in parts), first + count - 1
        return ShardInfo(Path("memory"), stream, first, last, "0" * 64, steps, count, 0)
