"""What strikes a process by itself, right before or after its nth call that changes files."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable
from typing import Any

CALLS = ("fsync", "rename", "replace", "link", "unlink", "mkdir")


def begin(
    nth: int, *, after: bool = False, how: str = "killed", calls: tuple[str, ...] = CALLS
) -> None:
    """Count these calls of `os` in this process, and strike at the nth, done or not.

    `how`: "killed" or "stopped" by a signal; "full": that call and all later ones fail.
    """
    count = 0

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def struck(*given: Any, **named: Any) -> Any:
            nonlocal count
            count += 1
            now = count == nth
            if how == "full" and count >= nth:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if now and not after:
                _strike(how)
            try:
                return call(*given, **named)
            finally:  # also after one that fails
                if now and after:
                    _strike(how)

        return struck

    for name in calls:
        setattr(os, name, counted(getattr(os, name)))


def _strike(how: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGSTOP)
