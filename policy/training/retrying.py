"""Retries of operations that fail for a while, as on a full disk."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from storage.errors import WeightStoreError
from storage.system.backoff import Backoff
from storage.wording import counted

log = logging.getLogger("headrace.trainer")

T = TypeVar("T")
_LOOK_SECONDS = 0.1


class Stopped(Exception):
    """The job was stopped while it waited."""


class Retrying:
    """Repeats operations that fail with OSError, with back-off and without a limit, until `stop()`.

    `look` is called while it waits, and may raise. `waiting` describes the current wait, else None.
    """

    def __init__(self, stop: Callable[[], bool], look: Callable[[], None] = lambda: None) -> None:
        self._stop = stop
        self._look = look
        self.waiting: str | None = None

    def do(self, what: str, action: Callable[[], T]) -> T:
        """Call `action` until it succeeds, and return its result.

        `what` names it in messages. Raises Stopped, and errors that are not the file system's.
        """
        backoff, failures = Backoff(), 0
        while True:
            try:
                result = action()
            except (OSError, WeightStoreError) as error:
                if not _passes(error):
                    raise
                self.waiting = f"{what}: {error}"
                failures += 1
                seconds = backoff.delay(failures)
                log.warning("%s; trying again in %.1f s", self.waiting, seconds)
            else:
                if self.waiting is not None:
                    log.warning("%s: succeeded after %s", what, counted(failures, "failure"))
                self.waiting = None
                return result
            self._wait(seconds)

    def _wait(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if self._stop():
                raise Stopped(self.waiting)
            self._look()
            threading.Event().wait(min(left, _LOOK_SECONDS))


def _passes(error: Exception) -> bool:
    """Whether an error is the file system's, so that a retry may succeed."""
    if isinstance(error, OSError):
        return True
    return type(error) is WeightStoreError and isinstance(error.__cause__, OSError)
