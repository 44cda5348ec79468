"""Free space of the disks of journal and shards, and when they will be full at the present rate.

A thread looks, because a network file system can hang; what it found last is read at any time.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path

from ingest.collector.trainer_watch import look_in_thread

log = logging.getLogger("headrace.collector")

LOOK_SECONDS = 60.0
MOST_LOOKS = 360
LEAST_LOOKS = 10
"""The rate is that over the last `MOST_LOOKS` looks (6 hours), once there are `LEAST_LOOKS`."""


def free_bytes(folder: Path) -> int:
    """The bytes that this process may still write to a folder's file system. Raises OSError."""
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


class DiskSpace:
    """The latest looks at the file systems of a root's `journal/` and `shards/`."""

    def __init__(
        self,
        root: Path,
        *,
        free: Callable[[Path], int] = free_bytes,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folders = {name: root / name for name in ("journal", "shards")}
        self._free, self._clock = free, clock
        self._looks = {name: deque[tuple[float, int]](maxlen=MOST_LOOKS) for name in self._folders}

    async def follow(self) -> None:
        """Look until cancelled."""
        await look_in_thread(self.look, LOOK_SECONDS, "headrace-disks")

    def look(self) -> None:
        """Note the free space now."""
        for name, folder in self._folders.items():
            try:
                self._looks[name].append((self._clock(), self._free(folder)))
            except OSError as error:  # as before the first shard
                log.debug("the free space of %s cannot be read: %s", folder, error)

    def free(self) -> Mapping[str, int]:
        """Folder -> free bytes at the last look."""
        return {name: looks[-1][1] for name, looks in self._looks.items() if looks}

    def hours_left(self) -> Mapping[str, float]:
        """Folder -> hours until its disk is full at the present rate, inf if it does not fill."""
        return {name: _hours(looks) for name, looks in self._looks.items() if looks}


def _hours(looks: deque[tuple[float, int]]) -> float:
    (begin, before), (end, now) = looks[0], looks[-1]
    used = before - now
    if len(looks) < LEAST_LOOKS or used <= 0:
        return math.inf
    return now / used * (end - begin) / 3600
