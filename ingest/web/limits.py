"""The collector's resource limits: bytes, seconds, counts, connections."""

from __future__ import annotations

import resource
from collections.abc import Iterable
from dataclasses import dataclass, replace

from ingest.protocol.errors import Refusal

OWN_DESCRIPTORS = 64
"""Descriptors that the collector needs besides its connections: journal, pipes, open files."""

LONG_BODY = 65_536
"""A body of more bytes is long: less room is available to it, and it may have to wait."""

RESERVED_PART = 8
"""Long bodies leave one part in this many of the room for bodies to short ones."""

DECODED, VALUE = 8, 240
"""The memory of a decoded message: a multiple of its body, or bytes for each list and object."""

BACKLOG = 256
"""The most connections that may wait to be accepted, in addition to the connection limit."""


@dataclass(frozen=True)
class ServerLimits:
    """Limits of connections, requests and memory; sizes in bytes, times in seconds.

    `max_message` limits a message's body, `max_bulk` that of a bulk import and of published
    weights, `max_bodies` all bodies in memory, `max_values` the lists and objects of one message.
    `max_open` limits the memory of open episodes, `max_pending` the parts that wait for the shard
    writer. A stop waits `drain_seconds` for the shards of ended episodes; the rest stays in the
    journal for the next start.
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

        Raises ValueError for an unknown name or a value that is not a number.
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

    @property
    def memory(self) -> int:
        """About how many bytes a collector at these limits takes, beyond what it has at its start.

        A body is in memory up to three times: as read, as a journal row and on its way to the disk.
        One at a time is being decoded. Plain rewards may exceed `max_open` by a quarter, and parts
        are copied to the shard writer.
        """
        decoded = max(DECODED * self.max_message, VALUE * self.max_values)
        return 3 * self.max_bodies + decoded + self.max_open * 5 // 4 + 2 * self.max_pending

    def within(self, room: int) -> ServerLimits:
        """These limits, or lower ones that take at most `room` bytes."""
        if self.memory <= room:
            return self
        message = _round(min(self.max_message, room // 20))
        values = min(self.max_values, _round(room // 3) // VALUE)
        rest = room - max(DECODED * message, VALUE * values)
        bodies = _round(min(self.max_bodies, max(rest * 2 // 5 // 3, message * 5 // 4)))
        message = min(message, bodies * 7 // 8)  # both are rounded
        rest -= 3 * bodies
        pending = _round(min(self.max_pending, rest // 8))
        opened = _round(min(self.max_open, (rest - 2 * pending) * 4 // 5))
        bulk = min(self.max_bulk, _round(bodies * 7 // 8), bodies * 7 // 8)
        return replace(
            self,
            max_message=message,
            max_bulk=bulk,
            max_bodies=bodies,
            max_values=values,
            max_open=opened,
            max_pending=pending,
        )

    def words(self, other: ServerLimits) -> list[str]:
        """The limits that differ from another's, as `of` reads them."""
        return [
            f"{name}={getattr(self, name)}"
            for name in self.__dataclass_fields__
            if getattr(self, name) != getattr(other, name)
        ]


def _round(nbytes: int) -> int:
    return max(nbytes - nbytes % 100_000, 1_000)


class Budget:
    """A number of bytes that the bodies of requests share. For one event loop, without a lock.

    Long bodies together leave an eighth of it to short ones. An account's only long body takes what
    it needs; an account with several must leave as many bytes free as they hold, so that another
    account's body finds room.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.held = 0
        self._peak = 0  # since the last call of `peak`
        self.refused = 0
        self._by_account: dict[str, int] = {}

    def take(self, nbytes: int, account: str = "", own: int = 0) -> bool:
        """Take this many bytes, if they are available.

        A long body gives its account, and how many bytes it holds already.
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
        """The most bytes held since the previous call."""
        peak, self._peak = self._peak, self.held
        return peak

    def give(self, nbytes: int, account: str = "") -> None:
        """Return bytes that were taken."""
        self.held -= nbytes
        left = self._by_account.pop(account, 0) - nbytes
        if left > 0:
            self._by_account[account] = left

    def refusal(self) -> Refusal:
        text = f"the bodies of other requests fill the {self.size} bytes set aside for bodies"
        return Refusal("busy", text, retry_after=1.0)


def allow_all_descriptors() -> None:
    """Raise this process's soft limit on open files to its hard limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def room_for_connections(wanted: int) -> int:
    """The number of connections that the process can hold: at most `wanted`."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    return max(1, min(wanted, soft - OWN_DESCRIPTORS - min(BACKLOG, soft // 4)))
