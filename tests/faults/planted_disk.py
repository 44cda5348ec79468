"""Broken builds around syncs, which only a loss of power can reveal."""

from __future__ import annotations

import os
import sqlite3
from typing import Any

import storage.journal.database
import storage.journal.sqlite_journal
import storage.objects.folder
import storage.shards.shard
import storage.system.files
from storage.journal.sqlite_journal import SqliteJournal
from storage.shards.shard import ShardWriter, find_shard
from storage.system.pinned_folders import Anchor
from tests.faults.disk import Disk
from tests.faults.mutants import Patch, mutant


def _unsynced(patch: Patch, level: str) -> None:
    connect = patch.original(storage.journal.sqlite_journal, "connect")

    def broken(*given: Any) -> sqlite3.Connection:
        database: sqlite3.Connection = connect(*given)
        database.execute(f"PRAGMA synchronous = {level}")
        return database

    patch.replace(storage.journal.sqlite_journal, "connect", broken)


@mutant(power_loss="lost")
def no_sync(patch: Patch) -> None:
    """The journal is never synced."""
    _unsynced(patch, "OFF")


@mutant(power_loss="lost")
def synchronous_normal(patch: Patch) -> None:
    """The journal's log is synced at its checkpoints only."""
    _unsynced(patch, "NORMAL")


@mutant(power_loss="lost")
def no_directory_sync(patch: Patch) -> None:
    """Files are synced, but not the folders with their names."""
    for module in (storage.system.files, storage.journal.database, storage.objects.folder):
        patch.replace(module, "sync_directory", lambda directory, fsync=None: None)


@mutant(power_loss="lost")
def shard_not_synced(patch: Patch) -> None:
    """A shard gets its name before its content is synced."""
    begin = patch.original(ShardWriter, "__init__")

    def broken(self: ShardWriter, *given: Any, **named: Any) -> None:
        begin(self, *given, **named, fsync=_sync_folders)

    patch.replace(ShardWriter, "__init__", broken)


def _sync_folders(descriptor: int) -> None:
    if os.path.isdir(f"/proc/self/fd/{descriptor}"):
        os.fsync(descriptor)


@mutant(power_loss="lost")
def adopted_unsynced(patch: Patch) -> None:
    """Files left by a killed writer count as durable."""

    def adopt(self: ShardWriter, stream: str, first: int, last: int) -> Any:
        return find_shard(self.directory, stream, first, last)

    patch.replace(ShardWriter, "adopt", adopt)


@mutant(syscalls="lost")
def retry_after_a_failed_sync(patch: Patch) -> None:
    """A failed sync is repeated, and its success is trusted."""
    begin = patch.original(SqliteJournal, "__init__")

    def broken(self: SqliteJournal, *given: Any) -> None:
        Disk.of_environment().retry_failed_syncs()
        begin(self, *given)

    patch.replace(SqliteJournal, "__init__", broken)


@mutant(syscalls="went_on")
def failed_sync_ignored(patch: Patch) -> None:
    """A commit that failed is rolled back, and acknowledged."""
    write = patch.original(SqliteJournal, "_write")

    def broken(self: SqliteJournal, statements: Any) -> None:
        try:
            write(self, statements)
        except storage.journal.sqlite_journal.JournalFailed:
            self._failed = None

    patch.replace(SqliteJournal, "_write", broken)


@mutant(syscalls="lost")
def log_trusted_after_a_failed_sync(patch: Patch) -> None:
    """The next start trusts the log that a failed sync left."""
    patch.replace(SqliteJournal, "_make_durable", lambda self: None)


@mutant(moved_root="lost")
def shard_believed_wherever_it_is(patch: Patch) -> None:
    """Nothing checks whether a path still leads to the opened root."""
    patch.replace(Anchor, "require", lambda self: None)
    patch.replace(Anchor, "has", lambda self, path: True)
