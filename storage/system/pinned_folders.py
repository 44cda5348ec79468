"""Folders that have to stay where they were opened.

A collector keeps its journal open and names its shards by their path. Were the root renamed, or its
volume taken away, the two would part: a shard would be written into whatever stands at the path by
then, and the journal, elsewhere, would forget the rows of it. So what was opened is held, and
compared with what the path leads to.
"""

from __future__ import annotations

import os
from pathlib import Path

from storage.errors import FolderMoved

__all__ = ["Anchor"]

_HOLD = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC


_WHY = "it was moved, unmounted or replaced while it was in use"


class Anchor:
    """Holds folders, so that no other can take their identity. Raises OSError for one that is not
    there."""

    def __init__(self, *folders: Path) -> None:
        self._held: dict[Path, int] = {}
        try:
            for folder in folders:
                self._held[folder.absolute()] = os.open(folder, _HOLD)
        except OSError:
            self.close()
            raise

    def require(self) -> None:
        """Raises FolderMoved unless each path still leads to what was opened; OSError when that
        cannot be told, as of a network file system that does not answer."""
        for folder, held in self._held.items():
            try:
                there = os.stat(folder)
            except (FileNotFoundError, NotADirectoryError) as error:
                raise FolderMoved(f"{folder} is not there any more: {_WHY}") from error
            if not os.path.samestat(there, os.fstat(held)):
                raise FolderMoved(f"{folder} is not the folder that was opened: {_WHY}")

    def has(self, path: Path) -> bool:
        """Whether a file is in one of the folders as they were opened, wherever they are now."""
        around = [folder for folder in self._held if path.is_relative_to(folder)]
        if not around:
            return False
        folder = max(around, key=lambda folder: len(folder.parts))
        try:
            os.stat(path.relative_to(folder), dir_fd=self._held[folder])
        except FileNotFoundError:
            return False
        return True

    def close(self) -> None:
        """Let go of the folders. No error when it was closed already."""
        while self._held:
            os.close(self._held.popitem()[1])
