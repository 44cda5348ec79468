"""`InputReader`, the source of a learner's batches, its errors, and `OutputWriter`.

    StorageError
    └── ReaderError
        ├── EndOfInput      everything was read, once
        ├── MixedSchemas    shards of several schemas, and none was chosen
        └── ReaderState     a saved position does not fit this reader

Needs only numpy, so that implementations outside `storage` do not have to load Arrow.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Self

from storage.errors import StorageError
from storage.experience.multi_agent_batch import MultiAgentBatch
from storage.experience.sample_batch import SampleBatch


class ReaderError(StorageError):
    """The input cannot be read as requested."""


class EndOfInput(ReaderError):
    """There is nothing left to read, and nothing more will come."""


class MixedSchemas(ReaderError):
    """One reader reads one schema; the text lists those that were found and how to choose."""


class ReaderState(ReaderError):
    """A saved position belongs to another kind of reader, or is damaged."""


class InputReader(ABC):
    """A source of sample batches. Iterating calls `next` until EndOfInput."""

    @abstractmethod
    def next(self, timeout: float | None = None) -> SampleBatch:
        """The next batch.

        With a growing input, waits for it; after `timeout` seconds returns an empty batch. Raises
        EndOfInput at the end of a finite input.
        """

    def want(self, columns: Sequence[str]) -> None:  # noqa: B027  most readers return fixed columns
        """Name the columns that the caller needs, before the first `next`.

        A reader adds them unless its own arguments choose columns.
        """

    def share(self, index: int, count: int) -> None:
        """Return only the rows of reader `index` out of `count` that share one input.

        Together the readers return each row once. Call this before the first batch. Raises
        ReaderError if the input cannot be shared.
        """
        if count != 1:
            raise ReaderError(
                f"{type(self).__name__}: expected one reader of this input, got {count}: it cannot "
                "be shared"
            )

    def close(self) -> None:  # noqa: B027  most readers in memory have nothing to release
        """Release files and threads; closing twice is fine."""

    def __iter__(self) -> Iterator[SampleBatch]:
        while True:
            try:
                yield self.next()
            except EndOfInput:
                return

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class OutputWriter(ABC):
    """A destination of sample batches."""

    @abstractmethod
    def write(self, batch: SampleBatch | MultiAgentBatch) -> None:
        """Write one batch, of one policy or several. Each writer documents when it is durable."""

    def close(self) -> None:  # noqa: B027  most writers in memory have nothing to release
        """Finish writing; closing twice is fine."""
