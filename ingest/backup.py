"""`backup`, `restore` and `adopt`: copies of a root, and journals that are older than their shards.

    backup(root, target)     # beside a collector; the next one copies only what is new
    restore(target, root)    # to an empty folder
    adopt_root(root)         # after a restore by other means

A backup is of the moment when its journal is copied. Weights come before: what they were trained on
is in the journal or in shards then. Shards come after: those that this journal has planned. So
nothing that it acknowledges is missing, and no shard is later. No other order has this property: a
journal that is copied last has dropped the rows of shards that were listed too early.

Shards are immutable and known by name. Any other file is copied if its size or time has changed.
Until the mark names the new journal, at the end, nothing is removed: a backup that was interrupted
is the earlier one with shards that are later, and `restore` adopts them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from stat import S_ISREG

import msgspec

from ingest.access.key_files import redaction_key
from ingest.collector.adoption import Adopted, adopt, require_current
from ingest.collector.recovery import ERASED, decode_marks, recover
from ingest.erasure.command import erase
from storage.declarations.policy_files import load_declarations
from storage.errors import JournalBehind
from storage.journal.copying import copy_journal, opened_copy
from storage.journal.database import DATABASE
from storage.journal.sqlite_journal import SqliteJournal
from storage.maintenance.plans import MaintenancePlan
from storage.maintenance.removal import applied_erasures
from storage.objects.folder import FolderObjects
from storage.shards.names import ShardName
from storage.shards.replacements import FOLDER, REPLACED, Replacements, given_ordinals
from storage.shards.unrecorded_shards import later_shards
from storage.shards.writer_process import WriterProcess
from storage.system.files import make_directory, replace_file, sync_directory
from storage.system.formats import require_format
from storage.verify.audit import OnProgress, no_progress

FORMAT_VERSION = 1
MARK = "backup.json"


class _Mark(msgspec.Struct):
    """What makes a folder a backup.

    `journal`: the folder of the journal, "" if the root has none. `finished`: when the latest
    backup was, in microseconds since the epoch; 0: never.
    """

    root: str
    journal: str = ""
    finished: int = 0
    format: int = FORMAT_VERSION


@dataclass
class BackedUp:
    """The files of a backup or restore: how many were copied, were there, and were removed."""

    copied: int = 0
    nbytes: int = 0
    kept: int = 0
    removed: int = 0
    adopted: Adopted | None = None


_decode_mark = msgspec.json.Decoder(_Mark).decode
_decode_object = msgspec.json.Decoder(dict).decode


def backup(root: Path, target: Path, *, on_progress: OnProgress = no_progress) -> BackedUp:
    """Copy a root to a folder that is new, empty, or an earlier backup.

    Excludes the application of maintenance plans, because these rename shards. Raises ValueError
    for another folder, also for the backup of another root that is still there, BlockingIOError
    while a plan is applied, JournalFailed and OSError.
    """
    if target.resolve().is_relative_to(root.resolve()):
        raise ValueError(f"backup: expected a folder outside of {root}, got {target}")
    mark = _mark(target)
    if mark is None and target.exists() and any(target.iterdir()):
        raise ValueError(
            f"backup: expected a new or empty folder, or an earlier backup ({MARK}), got {target}"
        )
    if mark is not None and Path(mark.root).exists() and not root.samefile(mark.root):
        raise ValueError(f"backup: expected a backup of {root}, got {target}, of {mark.root}")
    make_directory(target)
    own = str(root.resolve())
    replace_file(target / MARK, msgspec.json.encode(mark or _Mark(own)))
    done, now, journal = BackedUp(), time.time_ns() // 1000, ""
    with FolderObjects(root).exclusive(f"{FOLDER}/lock"):
        seen = _copy_all(_files(root, but=("shards", "journal")), root, target, done, on_progress)
        ends: dict[str, int] = {}
        if (root / "journal" / DATABASE).exists():
            journal = f"journal-{now}"
            ends = _copied_journal(root / "journal", target / journal)
        shards = (one for one in _files(root, "shards") if _belongs(one, ends))
        seen |= _copy_all(shards, root, target, done, on_progress)
    replace_file(target / MARK, msgspec.json.encode(_Mark(own, journal, now)))
    for one in list(_files(target, hidden=True)):  # also what a kill has left half copied
        if one not in seen and one.parts[0] not in (MARK, journal):
            (target / one).unlink()
            done.removed += not one.parts[0].startswith("journal-")
    for folder in target.glob("journal-*"):
        if folder.name != journal:
            folder.rmdir()
    return done


def restore(source: Path, root: Path, *, on_progress: OnProgress = no_progress) -> BackedUp:
    """Copy a backup to a root that is new or empty, or where this restore was interrupted.

    Its journal takes a new collector id, and closes what was open: the collector may have gone on
    after the backup, and its readers know the ordinals that it gave. The journal gets its name
    last, so that nothing starts with it before. Raises ValueError, JournalError and OSError.
    """
    mark = _mark(source)
    if mark is None or not mark.finished:
        raise ValueError(f"restore: expected a finished backup ({MARK}), got {source}")
    if root.exists() and any(root.iterdir()) and _mark(root) != mark:
        raise ValueError(
            f"restore: expected a new or empty folder, or one where a restore of this backup was "
            f"interrupted, got {root}"
        )
    make_directory(root)
    replace_file(root / MARK, msgspec.json.encode(mark))
    done, place = BackedUp(), root / "journal-restored"
    _copy_all(_files(source, but=("journal-", MARK)), source, root, done, on_progress)
    if mark.journal and not (root / "journal").exists():
        shutil.rmtree(place, ignore_errors=True)
        journal = source / mark.journal
        _copy_all(_files(journal), journal, place, done, on_progress)
        done.adopted = _adopted(root, place)
        place.rename(root / "journal")
    if mark.journal:
        _erase_again(root)
    (root / MARK).unlink()
    sync_directory(root)
    return done


def adopt_root(root: Path) -> Adopted | None:
    """Make the journal under a root current; None if it is. No collector may use it.

    What was erased since it was copied is erased again, and its tombstones return. Raises
    JournalError, StorageError, OSError, and ValueError for damaged records.
    """
    policies = load_declarations(root)
    journal, done = SqliteJournal.open(root / "journal"), None
    with closing(journal):
        try:
            require_current(journal, partial(given_ordinals, root))
            recover(journal, policies)  # release 0.1.0 left marks in a restored journal
            is_behind = False
        except JournalBehind:
            is_behind = True
    if is_behind:
        done = _adopted(root, root / "journal")
    _erase_again(root)
    return done


def _erase_again(root: Path) -> None:
    """Erase what was erased since the journal under a root was copied, and came back with it."""
    marks = {mark for plan in applied_erasures(root) for mark in plan.tombstones}
    with closing(SqliteJournal.open(root / "journal")) as journal:
        for blob in journal.state(ERASED).values():
            marks -= {*decode_marks(blob)}
    if marks:
        plan = MaintenancePlan("erase", (), tombstones=tuple(sorted(marks)))
        erase(root, plan, redaction_key(root), by="headrace adopt", why="an older journal")


def _removed_later(root: Path, known: Mapping[str, int]) -> int:
    """The rows that were removed with ordinals from `known` on (stream -> ordinal)."""
    shards = root / "shards"
    removals = Replacements.of(FolderObjects(root)).removed(
        lambda stream, name: (shards / stream / name).exists()
    )
    return sum(
        record.removed_rows
        for record, ordinals in removals
        if record.stream in known and ordinals.ranges()[0][0] >= known[record.stream]
    )


def _adopted(root: Path, directory: Path) -> Adopted:
    policies, shards = load_declarations(root), root / "shards"
    with (
        closing(SqliteJournal.open(directory)) as journal,
        closing(WriterProcess(shards, owner=journal.collector_id, sources=(root,))) as writer,
    ):
        ends, later = partial(given_ordinals, root), partial(later_shards, shards)
        removed, now = partial(_removed_later, root), time.time_ns() // 1000
        return adopt(journal, policies, ends, later, writer.write, received=now, removed=removed)


def _mark(folder: Path) -> _Mark | None:
    """The mark of a backup; None without one. Raises ValueError, NewerFormat."""
    try:
        data = (folder / MARK).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        require_format(_decode_object(data), FORMAT_VERSION, str(folder / MARK))
        return _decode_mark(data)
    except msgspec.MsgspecError as error:
        raise ValueError(f"{folder / MARK}: expected the mark of a backup: {error}") from error


def _copied_journal(directory: Path, target: Path) -> dict[str, int]:
    """Copy and check a journal; return the next ordinals of its streams.

    An entry for the collector's id alone makes it known if it has no stream yet.
    """
    target.mkdir(mode=0o700)
    copy_journal(directory, target)
    with opened_copy(target) as journal:
        return {f"{journal.collector_id}-": 0, **journal.streams()}


def _belongs(name: Path, ends: dict[str, int]) -> bool:
    """Whether a file under `shards/` is part of a backup: not if the journal is older."""
    if name.name.endswith(REPLACED):
        return False
    shard, stream = ShardName.parse(name.name), name.parent.name
    ours = {end.rpartition("-")[0] for end in ends}
    return (
        shard is None or stream.rpartition("-")[0] not in ours or shard.last < ends.get(stream, 0)
    )


def _files(
    root: Path, within: str = "", but: tuple[str, ...] = (), *, hidden: bool = False
) -> Iterator[Path]:
    """The files under a root by relative names, those of a folder before those of its folders.

    So a pointer is copied before what it points to, which is there for longer. Hidden files are
    written at the moment, and not part of a root. `but`: how names to leave out begin.
    """
    for folder, folders, names in os.walk(root / within):
        here = Path(folder).relative_to(root)
        if here == Path() and but:
            folders[:] = [one for one in folders if not one.startswith(but)]
            names = [one for one in names if not one.startswith(but)]
        folders.sort()
        yield from (here / one for one in sorted(names) if hidden or not one.startswith("."))


def _copy_all(
    names: Iterator[Path], source: Path, target: Path, done: BackedUp, on_progress: OnProgress
) -> set[Path]:
    """Copy what has changed. Returns the names of all files that are there now."""
    seen = set()
    for count, name in enumerate(names, 1):
        with contextlib.suppress(FileNotFoundError):  # removed in the meantime
            _copy(source / name, target / name, done)
            seen.add(name)
        on_progress("copying", count, None)
    for folder in {target / name.parent for name in seen}:
        sync_directory(folder)
    return seen


def _copy(source: Path, target: Path, done: BackedUp) -> None:
    """Copy a file with its mode and time, durably, unless the target has them."""
    stat = source.stat()
    if not S_ISREG(stat.st_mode):
        return
    with contextlib.suppress(FileNotFoundError):
        there = target.stat()
        if (there.st_size, there.st_mtime_ns) == (stat.st_size, stat.st_mtime_ns):
            done.kept += 1
            return
    if not target.parent.is_dir():
        make_directory(target.parent)
        target.parent.chmod(source.parent.stat().st_mode & 0o7777)
    temporary = target.with_name(f".{target.name}.tmp")
    try:
        shutil.copy2(source, temporary)
        os.utime(temporary, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # not of a later change
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.rename(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    done.copied += 1
    done.nbytes += stat.st_size
