"""The thread that finds, reads, verifies and decodes shards ahead of the learner."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

from storage.reading.loading import Loaded
from storage.reading.sources import Content, ShardFile, ShardSource
from storage.shards.names import ShardDamaged

Item = TypeVar("Item")

MOST_VANISHINGS = 3
"""A name that a scan lists and a read does not find, so often, is a bad file: a broken link."""


@dataclass(frozen=True, slots=True)
class BadShard:
    """A file that was tried twice, and why it was skipped."""

    shard: ShardFile
    reason: str


@dataclass(frozen=True, slots=True)
class End:
    """Everything that was there has been read."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Something that skipping a file does not cure: raised where batches are asked for."""

    error: BaseException


Found: TypeAlias = Loaded | BadShard | End | Failure


class Channel(Generic[Item]):
    """A bounded queue between two threads that can be closed from either side.

    Channels that share `changed` can be waited for together.
    """

    def __init__(self, depth: int, changed: threading.Condition | None = None) -> None:
        self._items: deque[Item] = deque()
        self._depth = depth
        self._changed = changed or threading.Condition()
        self._closed = False

    def put(self, item: Item) -> bool:
        """Wait for room; False when the channel was closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._items) < self._depth)
            if not self._closed:
                self._items.append(item)
                self._changed.notify_all()
            return not self._closed

    def get(self, timeout: float | None) -> Item | None:
        """The next item; None after `timeout` seconds, or when the channel was closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or bool(self._items), timeout)
            if not self._items:
                return None
            item = self._items.popleft()
            self._changed.notify_all()
            return item

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._items.clear()
            self._changed.notify_all()

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def filled(self) -> bool:
        """Whether `get` would not wait."""
        return self._closed or bool(self._items)


class Prefetcher:
    """Runs passes over a source: scan, load what is wanted in order, wait, scan again.

    `wanted(shards)` picks from a scan what may hold something new, in the order to read; it may
    raise, which ends the reading. `load` decodes one shard's bytes. A file that cannot be read
    right is tried once more at the end of its pass, then handed over as a `BadShard`; one that
    vanished means another pass.
    """

    def __init__(
        self,
        source: ShardSource,
        wanted: Callable[[list[ShardFile]], list[ShardFile]],
        load: Callable[[ShardFile, Content], Loaded],
        *,
        follow: bool,
        depth: int,
        poll_interval: float,
        changed: threading.Condition | None = None,
    ) -> None:
        self._source = source
        self._wanted = wanted
        self._load = load
        self._follow = follow
        self._poll_interval = poll_interval
        self._channel: Channel[Found] = Channel(depth, changed)
        self._handed: set[ShardFile] = set()  # a name is its content: never needed twice
        self._vanished: dict[ShardFile, int] = {}
        self._thread = threading.Thread(target=self._run, name="headrace-prefetch", daemon=True)
        self._thread.start()

    def get(self, timeout: float | None = None) -> Found | None:
        """What was found next; None after `timeout` seconds or when closed."""
        return self._channel.get(timeout)

    @property
    def filled(self) -> bool:
        """Whether `get` would not wait."""
        return self._channel.filled

    def close(self) -> None:
        """Stop the thread; what it read ahead is dropped, and a later scan finds it again."""
        self._channel.close()
        self._source.wake()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        try:
            while not self._channel.closed:
                again = self._pass()
                if again or self._channel.closed:
                    continue
                if not self._follow:
                    self._channel.put(End())
                    return
                self._source.wait(self._poll_interval)
        except BaseException as error:  # the learner's thread raises it
            self._channel.put(Failure(error))

    def _pass(self) -> bool:
        """One scan and what it lists; whether a file vanished, so that another pass must follow."""
        shards = self._source.scan()
        self._handed.intersection_update(shards)
        again, retry = False, []
        for shard in self._wanted(shards):
            if shard in self._handed:
                continue
            if self._channel.closed:
                return False
            found = self._read(shard)
            if found is None:
                again = True
            elif isinstance(found, BadShard):
                retry.append(shard)
            else:
                self._hand_over(shard, found)
        for shard in retry:
            again |= not self._hand_over(shard, self._read(shard))
        return again

    def _hand_over(self, shard: ShardFile, found: Loaded | BadShard | None) -> bool:
        if found is not None:
            self._handed.add(shard)
            self._channel.put(found)
        return found is not None

    def _read(self, shard: ShardFile) -> Loaded | BadShard | None:
        """None when the file is gone."""
        try:
            return self._load(shard, self._source.read(shard))
        except FileNotFoundError as error:
            self._vanished[shard] = self._vanished.get(shard, 0) + 1
            gone = self._vanished[shard] < MOST_VANISHINGS
            return None if gone else BadShard(shard, f"{shard.place}: {error}")
        except (ShardDamaged, OSError) as error:
            return BadShard(shard, str(error))


def deadline_after(timeout: float | None) -> Callable[[], float | None]:
    """A function that tells how many seconds are left, never below 0; None is for ever."""
    if timeout is None:
        return lambda: None
    end = time.monotonic() + timeout
    return lambda: max(0.0, end - time.monotonic())
