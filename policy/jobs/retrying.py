"""Waiting out what passes: a full disk, a file system that does not answer right now."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from storage.errors import WeightStoreError
from storage.system.backoff import Backoff

__all__ = ["Retrying", "Stopped"]

log = logging.getLogger("headrace.trainer")

T = TypeVar("T")
_LOOK_SECONDS = 0.1


class Stopped(Exception):
    """The job was stopped while it waited."""


class Retrying:
    """Repeats what fails with OSError, with back-off and without end, until `stop()`.

    `look` is called while it waits; it may raise. `waiting` says for what, None while nothing does.
    """

    def __init__(self, stop: Callable[[], bool], look: Callable[[], None] = lambda: None) -> None:
        self._stop = stop
        self._look = look
        self.waiting: str | None = None

    def do(self, what: str, action: Callable[[], T]) -> T:
        """What `action` gives once it works. Raises Stopped, and what says nothing of a disk."""
        backoff = Backoff()
        while True:
            try:
                result = action()
            except (OSError, WeightStoreError) as error:
                if not _passes(error):
                    raise
                self.waiting = f"{what}: {error}"
                seconds = backoff.failed()
                log.warning("%s; tried again in %.1f s", self.waiting, seconds)
            else:
                if self.waiting is not None:
                    log.warning("%s: done, after %d tries that failed", what, backoff.tries)
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
    """Whether an error tells of the file system alone."""
    if isinstance(error, OSError):
        return True
    return type(error) is WeightStoreError and isinstance(error.__cause__, OSError)
