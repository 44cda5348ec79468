"""`RangedFile`: an object as a file for libraries that read parts of one."""

from __future__ import annotations

import io
import os

from storage.errors import ObjectNotFound
from storage.objects.interface import Objects

__all__ = ["RangedFile"]


class RangedFile(io.RawIOBase):
    """A readable and seekable file, of which only what is asked for is read.

    Raises ObjectNotFound, and from its methods the errors of `Objects.read`.
    """

    def __init__(self, objects: Objects, name: str) -> None:
        status = objects.status(name)
        if status is None:
            raise ObjectNotFound(f"expected {objects}/{name}, which does not exist")
        self._objects, self._object, self._size, self._at = objects, name, status.size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        self._at = start + offset
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        end = self._size if size is None or size < 0 else min(self._at + size, self._size)
        data = self._objects.read(self._object, begin=self._at, end=end, limit=self._size)
        self._at += len(data)
        return data

    def readall(self) -> bytes:
        return self.read()
