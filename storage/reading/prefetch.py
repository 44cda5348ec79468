"""The thread that finds, reads, verifies and decodes shards ahead of the learner."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeAlias, TypeVar

from storage.experience.interfaces import ReaderError
from storage.reading.exclusion import TRANSIENT, Excluded
from storage.reading.listing import ShardFile
from storage.reading.loading import Fetched, LoadedShard, fetch, stated_rows
from storage.reading.retries import DELAYS, Retries
from storage.reading.sources import Content, GrowingSource, ScanIncomplete, ShardSource
from storage.shards.names import ShardDamaged

Item = TypeVar("Item")

LARGE = 1_000_000
"""The size of a shard in bytes from which the next one is fetched while it is decoded."""

MOST_VANISHINGS = 3
"""A shard that a scan lists and a read does not find is excluded after this many attempts."""

_REMEMBERED = 1024  # shards
_HANGING = 10.0  # s for which `idle` waits for a scan


@dataclass(frozen=True, slots=True)
class EndOfShards:
    """All shards that existed have been read."""


@dataclass(frozen=True, slots=True)
class Failure:
    """An error that excluding a shard does not solve; it is raised where batches are requested."""

    error: BaseException


Found: TypeAlias = LoadedShard | Excluded | EndOfShards | Failure


class Channel(Generic[Item]):
    """A bounded queue between two threads, which either side can close.

    One wait can cover several channels that share `changed`.
    """

    def __init__(self, depth: int, changed: threading.Condition | None = None) -> None:
        self._items: deque[Item] = deque()
        self._depth = depth
        self._changed = changed or threading.Condition()
        self._closed = False

    def put(self, item: Item) -> bool:
        """Add an item, after waiting for free space; False if the channel was closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._items) < self._depth)
            if not self._closed:
                self._items.append(item)
                self._changed.notify_all()
            return not self._closed

    def get(self, timeout: float | None) -> Item | None:
        """The next item; None after `timeout` seconds, or if the channel was closed."""
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
        """Whether `get` would return at once."""
        return self._closed or bool(self._items)


class Ahead:
    """Fetches the next large shard in a second thread while the current one is decoded.

    Hashing a shard of images takes as long as decoding it.
    """

    def __init__(self, fetch: Callable[[ShardFile], Fetched]) -> None:
        self._fetch = fetch
        self._asked: Channel[ShardFile] = Channel(1)
        self._fetched: Channel[Fetched] = Channel(1)
        self._pending: ShardFile | None = None
        self._thread: threading.Thread | None = None

    def start(self, shard: ShardFile) -> None:
        """Begin to fetch the shard that `take` will request next.

        If no thread can be started, `take` fetches it.
        """
        try:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="headrace-fetch", daemon=True)
                thread.start()
                self._thread = thread
        except (RuntimeError, MemoryError):  # a later attempt may succeed
            return
        self._pending = shard
        self._asked.put(shard)

    def take(self, shard: ShardFile) -> Fetched:
        """The fetched shard."""
        pending, self._pending = self._pending, None
        fetched = None if pending is None else self._fetched.get(None)
        return fetched if fetched is not None and pending == shard else self._fetch(shard)

    def close(self) -> None:
        self._asked.close()
        self._fetched.close()

    def _run(self) -> None:
        try:
            while (shard := self._asked.get(None)) is not None:
                self._fetched.put(self._fetch(shard))
        finally:
            self.close()  # so that no one waits for this thread


class Prefetcher:
    """Runs passes over a source: scan, load the wanted shards in order, wait, scan again.

    `wanted(shards)` selects from a scan those that may hold something new, in the order to read; an
    exception from it ends the reading. `load` decodes one shard's bytes. A shard whose digest does
    not match its name is read once more at the end of its pass, then returned as `Excluded`; so is
    one whose content fails a check. Anything else that fails is retried (`retries`) while reading
    continues; when the time for that is over, reading ends with a ReaderError.
    """

    def __init__(
        self,
        source: ShardSource,
        wanted: Callable[[list[ShardFile]], list[ShardFile]],
        load: Callable[[ShardFile, Content], LoadedShard],
        retries: Retries,
        *,
        follow: bool,
        depth: int,
        poll_interval: float,
        changed: threading.Condition | None = None,
    ) -> None:
        self._source = source
        self._wanted = wanted
        self._load = load
        self._retries = retries
        self._follow = follow
        self._poll_interval = poll_interval
        self._changed = changed or threading.Condition()
        self._channel: Channel[Found] = Channel(depth, self._changed)
        self._ahead = Ahead(partial(fetch, source))
        self._growing = source if isinstance(source, GrowingSource) else None
        self._looked = False
        self._open: set[ShardFile] = set()  # to be read or retried
        self._handed: dict[ShardFile, None] = {}  # a name stands for its content: read once
        self._bad: set[ShardFile] = set()  # excluded ones among them, read again when listed again
        self._vanished: dict[ShardFile, int] = {}
        self._asked = self._answered = 0  # tickets of `idle`
        self._busy = False
        self._thread = threading.Thread(target=self._run, name="headrace-prefetch", daemon=True)
        self._thread.start()

    def get(self, timeout: float | None = None) -> Found | None:
        """The next result; None after `timeout` seconds, or if closed."""
        return self._channel.get(timeout)

    @property
    def filled(self) -> bool:
        """Whether `get` would return at once."""
        return self._channel.filled

    def idle(self) -> bool:
        """Whether a scan made now finds nothing to read except shards that are being retried."""
        with self._changed:
            self._asked += 1
            ticket = self._asked
        self._source.wake()
        with self._changed:
            self._changed.wait_for(
                lambda: self._channel.filled or self._answered >= ticket, _HANGING
            )
            return self._answered >= ticket and not (self._busy or self._channel.filled)

    def close(self) -> None:
        """Stop the thread; shards read ahead are dropped, and a later scan finds them again."""
        self._channel.close()
        self._source.wake()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        try:
            while not self._channel.closed:
                if self._pass():
                    continue
                if not self._follow and not self._retries:
                    self._channel.put(EndOfShards())
                    return
                given_up = self._retries.given_up()
                if given_up:
                    raise ReaderError(given_up)
                self._rest()
        except BaseException as error:  # raised in the learner's thread
            self._channel.put(Failure(error))
        finally:
            self._ahead.close()

    def _rest(self) -> None:
        """Wait until something may have happened, a retry is due, or `idle` is called."""
        with self._changed:
            if self._channel.closed or self._asked > self._answered:
                return
        due = self._retries.next_due()
        wait = self._poll_interval if self._follow else DELAYS.longest
        self._source.wait(wait if due is None else min(wait, due))

    def _pass(self) -> bool:
        """Read the new shards once. True if a file vanished, so that another pass must follow."""
        with self._changed:
            ticket = self._asked
        gone = self._look(thorough=ticket > self._answered or bool(self._vanished))
        todo = self._wanted(sorted(self._open))
        for shard in self._open.difference(todo):  # another shard delivered its parts meanwhile
            self._settle(shard)
        fresh = [shard for shard in todo if shard not in self._retries]
        fresh.sort(key=self._vanished.__contains__)  # last, after files that may have replaced them
        due = [shard for shard in todo if shard in self._retries and not self._retries.waits(shard)]
        self._tell(busy=bool(fresh or gone), answered=self._answered)
        again = self._read_all([*fresh, *due])
        for shard in gone:  # after files that may contain their parts
            text = f"{shard.place}: gone before it was read"
            self._channel.put(Excluded(shard, "vanished", text))
        self._tell(busy=False, answered=self._answered if fresh or again else ticket)
        return again

    def _look(self, *, thorough: bool) -> list[ShardFile]:
        """Add new shards to `_open`. Returns those in it that no longer exist."""
        growing, afresh = self._growing, not self._looked
        try:
            if growing is None:
                found = self._source.scan()
            else:
                found = growing.changes(thorough=thorough, afresh=afresh)
            errors = {}
        except ScanIncomplete as partial:
            found, errors = partial.found, partial.errors
        self._looked = True
        self._note_folders(errors)
        if growing is not None:
            self._open.update(s for s in found if s not in self._handed or s in self._bad)
            self._forget_oldest()
            return []
        there = set(found)
        gone = [] if errors else sorted(self._open - there)
        for shard in gone:
            self._settle(shard)
        self._handed = {shard: None for shard in self._handed if shard in there}
        self._bad &= there
        self._open = there - self._handed.keys()
        return gone

    def _forget_oldest(self) -> None:
        """Forget the oldest shards read: a growing source soon stops listing them again."""
        while len(self._handed) > _REMEMBERED:
            oldest = next(iter(self._handed))
            del self._handed[oldest]
            self._bad.discard(oldest)

    def _settle(self, shard: ShardFile) -> None:
        self._open.discard(shard)
        self._vanished.pop(shard, None)
        self._retries.settle(shard)

    def _note_folders(self, errors: dict[str, OSError]) -> None:
        """Retry folders that cannot be listed now."""
        for key in self._retries.keys():  # noqa: SIM118  not a dict
            if isinstance(key, str) and key not in errors:
                self._retries.settle(key)
        for folder, error in errors.items():
            self._retries.failed(folder, folder, error)

    def _tell(self, *, busy: bool, answered: int) -> None:
        with self._changed:
            self._busy, self._answered = busy, answered
            self._changed.notify_all()

    def _read_all(self, shards: list[ShardFile]) -> bool:
        again, retry = False, []
        for shard, following in zip(shards, [*shards[1:], None], strict=False):
            if self._channel.closed:
                return False
            found = self._read(shard, following)
            if isinstance(found, Excluded) and found.reason == "damaged":
                retry.append(shard)
            elif found is not None:
                self._hand_over(shard, found)
            else:
                again |= shard in self._vanished
        for shard in retry:
            found = self._read(shard, None)
            if found is not None:
                self._hand_over(shard, found)
        return again

    def _hand_over(self, shard: ShardFile, found: LoadedShard | Excluded) -> None:
        self._settle(shard)
        self._handed[shard] = None
        if isinstance(found, Excluded):
            self._bad.add(shard)
        self._channel.put(found)

    def _read(self, shard: ShardFile, following: ShardFile | None) -> LoadedShard | Excluded | None:
        """Read one shard; None if it cannot be read now, or is gone."""
        fetched = self._ahead.take(shard)
        if following is not None and fetched.nbytes >= LARGE:
            self._ahead.start(following)
        try:
            return self._load(shard, fetched.proven())
        except FileNotFoundError as error:
            count = self._vanished[shard] = self._vanished.get(shard, 0) + 1
            text = f"{shard.place}: {error}"
            return None if count < MOST_VANISHINGS else Excluded(shard, "vanished", text)
        except ShardDamaged as error:
            return Excluded(shard, error.reason, str(error), stated_rows(shard, fetched.content))
        except TRANSIENT as error:
            self._retries.failed(shard, shard.place, error)
            return None


def deadline_after(timeout: float | None) -> Callable[[], float | None]:
    """A function that returns the seconds left, never below 0; always None without a timeout."""
    if timeout is None:
        return lambda: None
    end = time.monotonic() + timeout
    return lambda: max(0.0, end - time.monotonic())
