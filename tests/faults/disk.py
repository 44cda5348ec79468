"""A folder that behaves like a disk which can lose power, fill up and fail.

Processes started with `Disk.environment` run with disk.c preloaded, which logs every write and
every change of a name under the folder before it happens. `Disk.cut` changes the folder to a state
that a loss of power could leave:

    content   data survives if a later sync of the same file succeeded. Of other data, nothing, a
              prefix, or any parts torn at 512 bytes survive: three kinds of cuts
    names     files, renames, removals and folders survive if a later sync of their folder
    succeeded.
              Of the others, none or the earliest survive
    a failed sync  covers nothing, and no later sync covers its data: the kernel forgets which pages
              it could not write. Before the cut, reads still return that data

Changes by processes without disk.c are durable at once and not simulated.

A write counts from just before it happens, and a sync once it has returned, so a process may be
killed at any moment. All processes must be dead before the cut.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import shutil
import struct
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.durable_names import Namespace

KINDS = (
    *("write", "sync", "dirsync", "open", "rename", "unlink", "truncate", "create", "mkdir"),
    "link",
)
ROLES = ("collector", "writer", "trainer")
KILL = -1
FAIL_THEN_KILL = -2

_FIELDS = (
    "sequence",
    "shift",
    "full",
    "role",
    "kind",
    "first",
    "count",
    "action",
    "fired",
    "retry",
    "hang",
)
_HEAD = struct.Struct("<IIQQqqIIIIII")
_MAGIC = 0x4B534944
_SECTOR = 512


def build(folder: Path) -> Path:
    """Compile disk.c; return the library's path."""
    library = folder / "disk.so"
    source = Path(__file__).with_name("disk.c")
    subprocess.run(
        ["gcc", "-O1", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True, timeout=60
    )
    return library


@dataclass(frozen=True)
class Change:
    """One logged call."""

    kind: str
    sequence: int
    inode: int
    offset: int
    old_size: int
    failed: bool
    path: str
    target: str
    old: bytes
    fresh: bytes


@dataclass
class CutReport:
    """The changes that a cut undid: unsynced writes and names that did not survive."""

    survival: str
    writes: int = 0
    names: int = 0
    spared: int = 0


@dataclass
class Disk:
    """`root` stands for the disk; `state` is a folder beside it, on the same file system."""

    root: Path
    state: Path
    library: Path
    _folders: set[str] = field(default_factory=set)
    _files: dict[str, int] = field(default_factory=dict)

    @classmethod
    def create(cls, root: Path, library: Path | None = None) -> Disk:
        """A disk for `root`, which need not exist; its present content counts as durable."""
        root.mkdir(parents=True, exist_ok=True)
        root = root.resolve()
        state = Path(tempfile.mkdtemp(prefix=f"{root.name}-disk-", dir=root.parent))
        (state / "control").write_bytes(bytes(mmap.PAGESIZE))
        disk = cls(root, state, library or build(state))
        disk.forget()
        return disk

    @classmethod
    def of_environment(cls) -> Disk:
        """The disk that this process runs on. Raises KeyError if there is none."""
        environment = os.environ
        root, state = Path(environment["DISK_ROOT"]), Path(environment["DISK_STATE"])
        return cls(root, state, Path(environment["LD_PRELOAD"]))

    @property
    def environment(self) -> dict[str, str]:
        return {
            "LD_PRELOAD": str(self.library),
            "DISK_ROOT": str(self.root),
            "DISK_STATE": str(self.state),
        }

    # --- what the preloaded processes are told ----------------------------------------------

    def _set(self, **changes: int) -> None:
        with (self.state / "control").open("r+b") as file, mmap.mmap(file.fileno(), 0) as page:
            for name, value in changes.items():
                struct.pack_into("<q", page, 8 * _FIELDS.index(name), value)

    def _get(self, number: int) -> int:
        with (self.state / "control").open("rb") as file:
            value: int = struct.unpack_from("<q", file.read(4096), 8 * number)[0]
            return value

    def shift_clock(self, seconds: float) -> None:
        """Offset the processes' wall clock from the real one."""
        self._set(shift=int(seconds * 1e9))

    def fill(self, full: bool) -> None:
        """While the disk is full, no file can grow or be created: ENOSPC."""
        self._set(full=int(full))

    def hang(self, hangs: bool) -> None:
        """While the disk hangs, no call that writes, syncs or creates a file returns."""
        self._set(hang=int(hangs))

    def fail(self, role: str, kind: str, nth: int, action: int, count: int = 1) -> None:
        """Fail the role's nth call of a kind, counted from now, and the count - 1 calls after it.

        `action`: an errno; KILL: SIGKILL before the call has any effect; FAIL_THEN_KILL: EIO at the
        first, SIGKILL at the second (give count=2).
        """
        first = self.calls(role, kind) + nth
        self._set(count=0)
        self._set(role=ROLES.index(role), kind=KINDS.index(kind), first=first, action=action)
        self._set(count=count)

    def retry_failed_syncs(self) -> None:
        """Plant a fault: a failed sync is repeated at once, and then succeeds."""
        self._set(retry=1)

    def disarm(self) -> None:
        """Stop all planned failures."""
        self._set(count=0)

    def calls(self, role: str, kind: str) -> int:
        """How many calls of a kind there were so far."""
        return self._get(len(_FIELDS) + ROLES.index(role) * len(KINDS) + KINDS.index(kind))

    @property
    def fired(self) -> int:
        """How many calls were made to fail so far."""
        return self._get(_FIELDS.index("fired"))

    # --- the cut ------------------------------------------------------------------------------

    def cut(self, chance: random.Random, survival: str | None = None) -> CutReport:
        """Reduce the folder to what a loss of power may leave. All processes must be dead.

        `survival`: how much of the unsynced changes survives: "nothing", "beginning" or "parts";
        drawn at random if None.
        """
        changes = sorted(self._changes(), key=lambda change: change.sequence)
        report = CutReport(survival or chance.choice(("nothing", "beginning", "parts")))
        self._restore_content(changes, report, chance)
        self._restore_names(changes, report, chance)
        self.forget()
        return report

    def forget(self) -> None:
        """Count the whole present content as durable."""
        for path in self.state.glob("log.*"):
            path.unlink()
        shutil.rmtree(self.state / "inodes", ignore_errors=True)
        (self.state / "inodes").mkdir()
        self._folders, self._files = {str(self.root)}, {}
        for folder, folders, files in os.walk(self.root):
            self._folders.update(os.path.join(folder, name) for name in folders)
            for name in files:
                path = os.path.join(folder, name)
                inode = self._files[path] = os.stat(path).st_ino
                with contextlib.suppress(FileExistsError):  # a file with two names
                    os.link(path, self.state / "inodes" / str(inode))

    def _changes(self) -> Iterator[Change]:
        for log in self.state.glob("log.*"):
            data, at = log.read_bytes(), 0
            while at + _HEAD.size <= len(data):
                head = _HEAD.unpack_from(data, at)
                magic, kind, sequence, inode, offset, old_size, failed, *sizes = head
                if magic != _MAGIC:
                    raise RuntimeError(f"{log}: no record at byte {at}")
                at += _HEAD.size
                if at + sum(sizes[:4]) > len(data):
                    break  # killed while it logged: the call itself never happened
                texts = []
                for size in sizes[:4]:
                    texts.append(data[at : at + size])
                    at += size
                path, target, old, fresh = texts
                yield Change(
                    KINDS[kind], sequence, inode, offset, old_size, bool(failed),
                    os.fsdecode(path), os.fsdecode(target), old, fresh,
                )  # fmt: skip

    def _restore_content(
        self, changes: list[Change], report: CutReport, chance: random.Random
    ) -> None:
        of_file: defaultdict[int, list[Change]] = defaultdict(list)
        for change in changes:
            if change.kind in ("write", "truncate", "sync"):
                of_file[change.inode].append(change)
        for inode, history in of_file.items():
            path = self.state / "inodes" / str(inode)
            with path.open("r+b", buffering=0) as file:
                _restore_file(file.fileno(), history, report, chance)

    def _restore_names(
        self, changes: list[Change], report: CutReport, chance: random.Random
    ) -> None:
        namespace = Namespace(str(self.root), self._folders, self._files)
        for change in changes:
            namespace.note(change)
        namespace.cut(report, chance)
        folders, files = namespace.durable()
        known = {*self._folders, *self._files, *namespace.known}
        for folder, _, names in os.walk(self.root, topdown=False):
            for name in names:
                path = os.path.join(folder, name)
                if path in known and files.get(path) != os.stat(path).st_ino:
                    os.unlink(path)
            if folder in known and folder not in folders:
                os.rmdir(folder)
        for folder in sorted(folders):
            os.makedirs(folder, exist_ok=True)
        for path, inode in files.items():
            if not os.path.exists(path):
                os.link(self.state / "inodes" / str(inode), path)


def _restore_file(fd: int, history: list[Change], report: CutReport, chance: random.Random) -> None:
    """Undo the unsynced changes of one file, except for those that survive."""
    stays = _covered(history)
    changes = [change for change in history if change.kind != "sync"]
    first = next((n for n, change in enumerate(changes) if change.sequence not in stays), None)
    if first is None:
        return
    for change in reversed(changes[first:]):
        if change.old:
            os.pwrite(fd, change.old, change.offset)
        os.ftruncate(fd, change.old_size)
    loose = [change for change in changes[first:] if change.sequence not in stays]
    kept = chance.randrange(len(loose) + 1) if report.survival == "beginning" else 0
    spared = {change.sequence for change in loose[:kept]}
    for change in changes[first:]:
        if change.sequence in stays or change.sequence in spared:
            _redo(fd, change)
        elif report.survival == "parts" and chance.random() < 0.5:
            _redo_parts(fd, change, chance)
            report.spared += 1
        else:
            report.writes += 1
    report.spared += len(spared)


def _covered(history: list[Change]) -> set[int]:
    """The sequence numbers of the changes of one file that a sync made durable."""
    stays: set[int] = set()
    waiting: list[int] = []
    for change in history:
        if change.kind != "sync":
            waiting.append(change.sequence)
            continue
        if not change.failed:
            stays.update(waiting)
        waiting = []  # data of a failed sync is never written: its pages count as clean
    return stays


def _redo(fd: int, change: Change) -> None:
    if change.kind == "truncate":
        os.ftruncate(fd, change.offset)
    else:
        os.pwrite(fd, change.fresh, change.offset)


def _redo_parts(fd: int, change: Change, chance: random.Random) -> None:
    """A random subset of a write's sectors."""
    if change.kind == "truncate":
        os.ftruncate(fd, change.offset)
    for at in range(0, len(change.fresh), _SECTOR):
        if chance.random() < 0.7:
            os.pwrite(fd, change.fresh[at : at + _SECTOR], change.offset + at)
