"""Names on a disk: which of the files and folders exist after a cut.

A name is durable once its folder has been synced after the name was created. A folder is identified
by itself, not by its path: synced content moves with a renamed folder, and moves back if the rename
does not survive.
"""

from __future__ import annotations

import os
import random
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from tests.faults.disk import Change, CutReport

Entry: TypeAlias = int | str
"""The inode of a file, or a folder."""

NAMES = ("create", "rename", "unlink", "mkdir")


@dataclass(frozen=True)
class _Step:
    """`entry` gets a name in one folder and loses one in another, or the same; "" is none."""

    entry: Entry
    where: str
    name: str
    before: str
    old: str


class Namespace:
    """Begins with the durable names; `note` the changes in order, then `cut`.

    `known` are all paths that were ever there.
    """

    def __init__(self, root: str, folders: Iterable[str], files: Mapping[str, int]) -> None:
        self._root = root
        self._now = {path: path for path in folders}  # path -> the folder
        self._durable: dict[str, dict[str, Entry]] = {path: {} for path in self._now}
        self._waiting: defaultdict[str, list[_Step]] = defaultdict(list)
        self.known = {*self._now, *files}
        for path, entry in [*files.items(), *self._now.items()]:
            if path != root:
                self._durable[os.path.dirname(path)][os.path.basename(path)] = entry

    def note(self, change: Change) -> None:
        """One logged call."""
        if change.kind == "dirsync":
            waiting = self._waiting.pop(self._now.get(change.path, ""), [])
            for step in waiting if not change.failed else ():
                self._apply(step)
        elif change.kind in NAMES:
            step = self._step(change)
            if step is not None:
                self._waiting[step.where].append(step)

    def _step(self, change: Change) -> _Step | None:
        """The effect of a change; None if its folder is unknown."""
        folder, name = os.path.split(change.target or change.path)
        where = self._now.get(folder)
        if where is None:
            return None
        self.known.update((change.path, change.target or change.path))
        if change.kind == "create":
            return _Step(change.inode, where, name, "", "")
        if change.kind == "mkdir":
            entry = f"{change.path}#{change.sequence}"
            self._now[change.path], self._durable[entry] = entry, {}
            return _Step(entry, where, name, "", "")
        if change.kind == "unlink":
            self._now.pop(change.path, None)
            return _Step("", where, "", where, name)
        source, old = os.path.split(change.path)
        renamed: Entry = change.inode
        if change.path in self._now:
            renamed = self._now[change.path]
            self._move(change.path, change.target)
        return _Step(renamed, where, name, self._now.get(source, ""), old)

    def _move(self, source: str, target: str) -> None:
        """Record that a folder, with its content, has a new path."""
        inside = source + os.sep
        self.known |= {
            target + path[len(source) :] for path in self.known if path.startswith(inside)
        }
        for path in [path for path in self._now if path == source or path.startswith(inside)]:
            self._now[target + path[len(source) :]] = self._now.pop(path)

    def _apply(self, step: _Step) -> None:
        if step.before:
            self._durable[step.before].pop(step.old, None)
        if step.name:
            self._durable[step.where][step.name] = step.entry

    def cut(self, report: CutReport, chance: random.Random) -> None:
        """Drop the unsynced names: all of them, or all but the earliest in each folder."""
        for folder in sorted(self._waiting):
            waiting = self._waiting[folder]
            kept = 0 if report.survival == "nothing" else chance.randrange(len(waiting) + 1)
            for step in waiting[:kept]:
                self._apply(step)
            report.names += len(waiting) - kept
            report.spared += kept

    def durable(self) -> tuple[set[str], dict[str, int]]:
        """(folders, path of a file -> inode)."""
        folders: set[str] = set()
        files: dict[str, int] = {}
        open_ = [(self._root, self._root)]
        while open_:
            path, folder = open_.pop()
            folders.add(path)
            for name, entry in self._durable[folder].items():
                if isinstance(entry, str):
                    open_.append((os.path.join(path, name), entry))
                else:
                    files[os.path.join(path, name)] = entry
        return folders, files
