"""Temporary columns of numbers on disk, with the interface of `MemoryColumn`.

    with Scratch() as scratch:
        column = scratch.column()

The files have no names once they are open, so a killed job leaves nothing behind. They are written
and read in blocks.
"""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Iterator
from typing import IO, Self

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

BLOCK = 1 << 17  # numbers: 1 MB


class DiskColumn:
    """A column of float64 in a temporary file, which is removed with the column."""

    def __init__(self, scratch: Scratch) -> None:
        self._scratch = scratch
        file = tempfile.TemporaryFile(prefix="headrace-judge-")  # noqa: SIM115  closed by `close`
        self._file: IO[bytes] = file
        self.close = weakref.finalize(self, self._file.close)
        self.size = 0

    def append(self, values: FloatArray) -> None:
        self._file.seek(0, 2)
        self._file.write(np.ascontiguousarray(values, np.float64).tobytes())
        self.size += values.size

    def blocks(self) -> Iterator[FloatArray]:
        self._file.flush()
        for begin in range(0, self.size, BLOCK):
            self._file.seek(begin * 8)
            yield np.frombuffer(self._file.read(8 * min(BLOCK, self.size - begin)))

    def like(self) -> DiskColumn:
        return self._scratch.column()


class Scratch:
    """The temporary columns of one job. Writing raises OSError if the disk is full."""

    def __init__(self) -> None:
        self._columns: weakref.WeakSet[DiskColumn] = weakref.WeakSet()

    def column(self) -> DiskColumn:
        found = DiskColumn(self)
        self._columns.add(found)
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for column in list(self._columns):
            column.close()
