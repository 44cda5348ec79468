"""`RangedFile`: an object as a file for libraries that read parts of one."""

from __future__ import annotations

import io
import os
from pathlib import Path

from storage.errors import ObjectNotFound, ObjectUnusable
from storage.objects.folder import FolderObjects
from storage.objects.interface import Objects


class RangedFile(io.RawIOBase):
    """A readable and seekable file, of which only what is asked for is read. `str(file)`: where.

    Raises ObjectNotFound, ObjectUnusable, and from its methods the errors of `Objects.read`.
    """

    def __init__(self, objects: Objects, name: str) -> None:
        status = objects.status(name)
        if status is None:
            raise ObjectNotFound(f"expected {objects}/{name}, which does not exist")
        if not status.is_object:
            raise ObjectUnusable(f"{objects}/{name}: expected a file, found something else")
        self._objects, self._object, self._size, self._at = objects, name, status.size, 0

    @classmethod
    def at(cls, place: Path | str | RangedFile) -> RangedFile:
        """The file at a local path; a RangedFile is one."""
        if isinstance(place, RangedFile):
            return place
        path = Path(place)
        return cls(FolderObjects(path.parent), path.name)

    def __repr__(self) -> str:
        return f"RangedFile({self._objects!r}, {self._object!r})"

    def __str__(self) -> str:
        return f"{self._objects}/{self._object}"

    def readable(self) -> bool:
        """True."""
        return True

    def seekable(self) -> bool:
        """True."""
        return True

    def tell(self) -> int:
        """The offset of the next byte."""
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go to an offset, and return it."""
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        self._at = start + offset
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        """The next bytes, all of them by default."""
        end = self._size if size is None or size < 0 else min(self._at + size, self._size)
        data = self._objects.read(self._object, begin=self._at, end=end, limit=self._size)
        self._at += len(data)
        return data

    def whole(self) -> bytes:
        """All bytes, wherever the file is read at."""
        return self._objects.read(self._object, limit=self._size)
