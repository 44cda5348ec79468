"""Columns of numbers on disk, for as long as a job needs them: the twin of `MemoryColumn`.

with Scratch() as scratch:
    column = scratch.column()

A file has no name once it is open, so that nothing is left of a killed job. Written and read a
block at a time; what the system caches of it, it takes back when memory is short.
"""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Iterator
from types import TracebackType
from typing import IO, Self

import numpy as np
import numpy.typing as npt

__all__ = ["DiskColumn", "Scratch"]

FloatArray = npt.NDArray[np.float64]

BLOCK = 1 << 17  # numbers: 1 MB


class DiskColumn:
    """Numbers in a file of its own, which goes with the column."""

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
    """The files of one job, gone with it. Raises OSError where there is no room."""

    def __init__(self) -> None:
        self._columns: weakref.WeakSet[DiskColumn] = weakref.WeakSet()

    def column(self) -> DiskColumn:
        found = DiskColumn(self)
        self._columns.add(found)
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for column in list(self._columns):
            column.close()
