"""A base class for helpers that are used as `with` blocks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self


class Closing(ABC):
    """Lives as long as its `with` block; `close` is called at the end, also after an error."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None:
        """Release processes, threads, sockets and files."""
