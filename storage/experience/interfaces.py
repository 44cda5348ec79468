"""What a learner reads from: `InputReader`, and how its reading ends or fails.

    StorageError
    └── ReaderError
        ├── EndOfInput      everything was read, once
        ├── MixedSchemas    shards of several schemas, and none was chosen
        └── ReaderState     a saved position does not fit this reader

Needs numpy alone, so that an implementer outside `storage` does not pay for Arrow.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Self

from storage.errors import StorageError
from storage.experience.multi_agent_batch import MultiAgentBatch
from storage.experience.sample_batch import SampleBatch

__all__ = [
    "EndOfInput",
    "InputReader",
    "MixedSchemas",
    "OutputWriter",
    "ReaderError",
    "ReaderState",
]


class ReaderError(StorageError):
    """The input cannot be read as requested."""


class EndOfInput(ReaderError):
    """There is nothing left to read, and nothing will come."""


class MixedSchemas(ReaderError):
    """One reader reads one schema; the text lists those that were found and how to choose."""


class ReaderState(ReaderError):
    """A saved position was made by another kind of reader, or is damaged."""


class InputReader(ABC):
    """A source of sample batches. Iterating calls `next` until EndOfInput."""

    @abstractmethod
    def next(self, timeout: float | None = None) -> SampleBatch:
        """The next batch.

        A reader that follows a growing input blocks; after `timeout` seconds it returns an empty
        batch. Raises EndOfInput when the input has an end and it is reached.
        """

    def want(self, columns: Sequence[str]) -> None:  # noqa: B027  most bring what they have
        """Name the columns that the caller needs, before the first `next`. A reader adds them
        unless its own arguments choose columns."""

    def share(self, index: int, count: int) -> None:
        """Be reader number `index` of `count` that share one input: together they return each row
        once.

        To be called before the first batch. Raises ReaderError where an input cannot be shared.
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class OutputWriter(ABC):
    """Where sample batches go."""

    @abstractmethod
    def write(self, batch: SampleBatch | MultiAgentBatch) -> None:
        """Write one batch, of one policy or of several. The writer documents when it is durable."""

    def close(self) -> None:  # noqa: B027  most writers in memory have nothing to release
        """Finish; closing twice is fine."""
