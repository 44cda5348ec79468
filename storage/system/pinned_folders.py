"""Detects that a folder in use was moved or replaced.

A collector keeps its journal open, but opens shards by their path. If the root were renamed, or its
volume unmounted, the shard would be written to whatever is at the path then, while the journal,
elsewhere, would forget its rows. So the folders are kept open, and compared with those at their
paths.
"""

from __future__ import annotations

import os
from pathlib import Path

from storage.errors import FolderMoved

_HOLD = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC


_WHY = "it was moved, unmounted or replaced while it was in use"


class Anchor:
    """Keeps folders open, so that no other can get their identity.

    Raises OSError if one of them does not exist.
    """

    def __init__(self, *folders: Path) -> None:
        self._held: dict[Path, int] = {}
        try:
            for folder in folders:
                self._held[folder.absolute()] = os.open(folder, _HOLD)
        except OSError:
            self.close()
            raise

    def require(self) -> None:
        """Raise FolderMoved unless each path still leads to the folder that was opened.

        Raises OSError if that cannot be checked, as on a network file system that does not answer.
        """
        for folder, held in self._held.items():
            try:
                there = os.stat(folder)
            except (FileNotFoundError, NotADirectoryError) as error:
                raise FolderMoved(f"{folder} is not there any more: {_WHY}") from error
            if not os.path.samestat(there, os.fstat(held)):
                raise FolderMoved(f"{folder} is not the folder that was opened: {_WHY}")

    def has(self, path: Path) -> bool:
        """Whether a file is in one of the folders that were opened, wherever these are now."""
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
        """Close the folders. No error if they are closed already."""
        while self._held:
            os.close(self._held.popitem()[1])
