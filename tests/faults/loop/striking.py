"""SIGKILL of a process by itself, right before or after the nth call that changes files."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any, NoReturn

CALLS = ("fsync", "rename", "replace", "link", "unlink", "mkdir")


def begin(nth: int, *, after: bool, calls: tuple[str, ...] = CALLS) -> None:
    """Count these calls of `os` in this process; the nth is its last, done or not."""
    count = 0

    def fatal(call: Callable[..., Any]) -> Callable[..., Any]:
        def struck(*given: Any, **named: Any) -> Any:
            nonlocal count
            count += 1
            if count == nth and not after:
                _die()
            result = call(*given, **named)
            if count == nth:
                _die()
            return result

        return struck

    for name in calls:
        setattr(os, name, fatal(getattr(os, name)))


def _die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise SystemExit(137)
