"""Helpers that are used as `with` blocks: what ends one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self


class Closing(ABC):
    """Lives as long as its `with` block; `close` is called at the end, whatever ended it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None:
        """Let go of processes, threads, sockets and files."""
