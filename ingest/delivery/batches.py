"""How much goes into a request: its bytes, and where the queue may be cut."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ingest.delivery.events import weight
from ingest.protocol.messages import Decision, Event, LogAction, LogReturns, Start

BATCH_BYTES = 2_000_000
"""The initial size: one sync of the disk per 2 MB, and 30 s suffice at 0.6 Mbit/s. A proxy with a
lower limit (nginx by default 1 MiB) refuses the first batch."""

LONGEST_RUN = 8
"""The length, in events, of the longest episode that is kept in one batch."""

LEAST_BYTES = 16_384
PATIENCE = 64  # requests that go through before a larger one is tried


class BatchSize:
    """The largest size of a batch, at most `most` bytes; a larger event is sent alone.

    A refusal halves it, because the same proxy or collector would refuse the next batch too. It
    grows slowly after that, because the limit may have been lifted.
    """

    def __init__(self, most: int) -> None:
        self.nbytes = most
        self._most = most
        self._passed = 0

    def bound(self, most: int) -> None:
        """Set the upper bound to `most` bytes, the collector's limit."""
        self._most = min(self._most, most)
        self.nbytes = min(self.nbytes, self._most)

    def refused(self, nbytes: int) -> int:
        """Note that a batch of `nbytes` was too large; return the size to try next."""
        self.nbytes = min(self.nbytes, max(LEAST_BYTES, nbytes // 2))
        self._passed = 0
        return self.nbytes

    def passed(self) -> None:
        """Note that a batch was accepted."""
        if self.nbytes == self._most:
            return
        self._passed += 1
        if self._passed >= PATIENCE:
            self.nbytes = min(self._most, 2 * self.nbytes)
            self._passed = 0


def whole_runs(queue: Sequence[Event | None], size: int) -> int:
    """A batch size of at most `size` that does not split short episodes, or steps of long ones.

    A batch is one journal row. If a one-step episode is in one batch, a client that dies between
    two batches does not leave half of it behind.
    """
    if not 0 < size < len(queue):
        return size
    after = queue[size]
    if after is None or isinstance(after, Start):
        return size
    is_reward = isinstance(after, LogReturns) and after.seq is not None
    best = size
    for cut in range(size - 1, max(0, size - LONGEST_RUN), -1):
        event = queue[cut]
        if event is None or event.episode_id != after.episode_id:
            break
        if isinstance(event, Start):
            return cut
        if is_reward and isinstance(event, (LogAction, Decision)):
            best, is_reward = cut, False
    return best


def fitting(events: Sequence[Event | None], most: int) -> int:
    """The number of events with at most `most` bytes in total, but at least one."""
    total = 0
    for count, event in enumerate(events):
        total += 0 if event is None else weight(event)
        if total > most and count:
            return count
    return len(events)


def cut_at(events: Sequence[Event], most: int) -> Iterator[list[Event]]:
    """Yield the events in order, in lists of at most `most` bytes."""
    left = list(events)
    while left:
        count = fitting(left, most)
        yield left[:count]
        left = left[count:]
