"""Retrying reads that fail for a cause that may be temporary: with back-off."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TypeVar

from storage.experience.interfaces import ReaderError
from storage.system.backoff import Backoff

Result = TypeVar("Result")

log = logging.getLogger("headrace.reader")

DELAYS = Backoff(0.05, 10.0)


@dataclass(slots=True)
class _Trial:
    place: str
    error: str
    since: float
    due: float
    failures: int = 1


class Retries:
    """Failures that may be temporary, by key: a shard, or a folder that cannot be listed.

    `retry_for`: seconds after which to give up; None for never. `on_change` is called with place ->
    last error whenever that changes, with a new dict each time, which other threads may keep.
    """

    def __init__(
        self, retry_for: float | None, on_change: Callable[[dict[str, str]], None]
    ) -> None:
        self._retry_for = retry_for
        self._on_change = on_change
        self._trials: dict[Hashable, _Trial] = {}

    def __len__(self) -> int:
        return len(self._trials)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._trials

    def failed(self, key: Hashable, place: str, error: BaseException) -> None:
        """Record a failure and schedule the next try; the first failure is logged."""
        now, text = time.monotonic(), _described(error)
        trial = self._trials.get(key)
        if trial is None:
            trial = self._trials[key] = _Trial(place, text, now, now)
            log.warning("cannot be read for now, will be tried again: %s: %s", place, text)
        else:
            trial.failures += 1
            trial.error = text
        trial.due = now + DELAYS.delay(trial.failures)
        if self._retry_for is not None:  # the last try is at the end of `retry_for`
            trial.due = min(trial.due, max(now, trial.since + self._retry_for))
        self._tell()

    def settle(self, key: Hashable) -> None:
        """Forget the failures of a key that was read, was found to be damaged, or is gone."""
        trial = self._trials.pop(key, None)
        if trial is not None:
            waited = time.monotonic() - trial.since
            log.info("no longer waited for after %.1f s: %s", waited, trial.place)
            self._tell()

    def keys(self) -> list[Hashable]:
        return list(self._trials)

    def waits(self, key: Hashable) -> bool:
        """Whether the next try of a key is still to come."""
        trial = self._trials.get(key)
        return trial is not None and time.monotonic() < trial.due

    def next_due(self) -> float | None:
        """Seconds until the next try; None if nothing failed."""
        if not self._trials:
            return None
        return max(0.0, min(t.due for t in self._trials.values()) - time.monotonic())

    def given_up(self) -> str:
        """A message with all failures if one has lasted `retry_for` seconds, else ""."""
        now, patience = time.monotonic(), self._retry_for
        if patience is None or all(now < t.since + patience for t in self._trials.values()):
            return ""
        listed = "; ".join(f"{t.place}: {t.error}" for t in self._trials.values())
        return f"gave up after {patience:g} s: {len(self._trials)} cannot be read: {listed}"

    def _tell(self) -> None:
        self._on_change({trial.place: trial.error for trial in self._trials.values()})


def try_again(
    work: Callable[[], Result], place: str, retry_for: float, transient: tuple[type[Exception], ...]
) -> Result:
    """Call `work` until it succeeds, and return its result.

    `transient` errors are retried for `retry_for` seconds; then raises ReaderError, which names
    `place`. FileNotFoundError is raised at once.
    """
    retries = Retries(retry_for, lambda _: None)
    while True:
        try:
            return work()
        except FileNotFoundError:
            raise
        except transient as error:
            retries.failed(place, place, error)
            given_up = retries.given_up()
            if given_up:
                raise ReaderError(given_up) from error
        time.sleep(retries.next_due() or 0.0)


def _described(error: BaseException) -> str:
    return str(error) or type(error).__name__
