"""What the collector spends at most on anybody: bytes, seconds, counts, connections."""

from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import Iterable
from dataclasses import dataclass

from ingest.protocol.errors import Refusal

OWN_DESCRIPTORS = 64
"""Descriptors that the collector needs beside its connections: journal, pipes, files it reads."""

LONG_BODY = 65_536
"""A body of more bytes is a long one: it finds less room, and may have to wait."""

RESERVED_PART = 8
"""Long bodies leave one part in so many of all room for bodies to short ones."""

LARGE_BLOCK = 1 << 20
"""Bytes of a block that the system gives anew each time, page by page: some 0.2 ms for so many."""

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # of malloc.h

BACKLOG = 256
"""Connections that may wait to be accepted; so many may come at once beyond the limit."""


@dataclass(frozen=True)
class ServerLimits:
    """Bounds on connections, requests and memory; sizes in bytes, times in seconds.

    `max_message` bounds a message's body, `max_bulk` that of a bulk import and of published
    weights, `max_bodies` all bodies that are in memory at once, `max_values` the lists and objects
    of one message. `max_open` bounds what open episodes hold in memory, `max_pending` what waits
    for the shard writer. A stop waits `drain_seconds` for the shards of ended episodes; what is
    left stays in the journal for the next start.
    """

    max_connections: int = 4_096
    header_seconds: float = 10.0
    idle_seconds: float = 75.0
    body_seconds: float = 60.0
    send_seconds: float = 30.0
    max_header: int = 32_768
    max_headers: int = 100
    max_pipelined: int = 16
    max_message: int = 8_000_000
    max_bulk: int = 64_000_000
    max_bodies: int = 256_000_000
    max_values: int = 500_000
    max_open: int = 1_000_000_000
    max_pending: int = 40_000_000
    drain_seconds: float = 3.0

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}: expected more than 0, got {getattr(self, name)}")

    @classmethod
    def of(cls, words: Iterable[str]) -> ServerLimits:
        """The limits with some of them changed: `["max_connections=200", "body_seconds=5"]`.

        Raises ValueError for an unknown name or what is no number.
        """
        defaults, changed = cls(), {}
        for word in words:
            name, _, text = word.partition("=")
            known = getattr(defaults, name, None) if name in cls.__dataclass_fields__ else None
            if known is None:
                names = ", ".join(cls.__dataclass_fields__)
                raise ValueError(f"limit: expected NAME=NUMBER of {names}, got {word!r}")
            try:
                changed[name] = type(known)(text)
            except ValueError as error:
                raise ValueError(f"limit {name}: expected a number, got {text!r}") from error
        return cls(**changed)


class Budget:
    """Bytes that the bodies of several requests share. Used on one event loop: it needs no lock.

    Long bodies together leave an eighth of it to short ones. An account's only long body takes what
    it needs; with several, an account leaves free as much as they hold, so that the next one finds
    room.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.held = 0
        self._peak = 0  # since it was last looked at
        self.refused = 0
        self._by_account: dict[str, int] = {}

    def take(self, nbytes: int, account: str = "", own: int = 0) -> bool:
        """Take so many bytes if they are there.

        A long body names its account, and how many bytes it holds already.
        """
        free = self.size - self.held - nbytes
        held = self._by_account.get(account, 0)
        if account:
            free -= self.size // RESERVED_PART
        if free < 0 or (held > own and held + nbytes > free):
            self.refused += 1
            return False
        self.held += nbytes
        self._peak = max(self._peak, self.held)
        if account:
            self._by_account[account] = held + nbytes
        return True

    def peak(self) -> int:
        """The most that was held since this was asked last."""
        peak, self._peak = self._peak, self.held
        return peak

    def give(self, nbytes: int, account: str = "") -> None:
        """Give back what was taken."""
        self.held -= nbytes
        left = self._by_account.pop(account, 0) - nbytes
        if left > 0:
            self._by_account[account] = left

    def refusal(self) -> Refusal:
        text = f"the bodies of other requests fill the {self.size} bytes that are set aside"
        return Refusal("busy", text, retry_after=1.0)


def return_memory_early() -> None:
    """Have large blocks given back to the system when they are freed, where the C library can.

    By default glibc learns from the first large body to keep megabytes for the next. Arrow's own
    allocator would keep as much for each thread that has read an import; unless told otherwise, it
    takes the C library's. To be called before Arrow is loaded.
    """
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(M_MMAP_THRESHOLD, LARGE_BLOCK)
        library.mallopt(M_TRIM_THRESHOLD, 4 * LARGE_BLOCK)
        library.mallopt(M_ARENA_MAX, 2)  # few threads allocate at once; each arena keeps its own


def allow_all_descriptors() -> None:
    """Raise this process's soft limit on open files to its hard one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def room_for_connections(wanted: int) -> int:
    """How many connections the process may hold: `wanted`, or what its descriptors allow."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    return max(1, min(wanted, soft - OWN_DESCRIPTORS - min(BACKLOG, soft // 4)))
