"""Kills, stops or starves the own process just before or after its nth call that changes files."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

CALLS = ("fsync", "rename", "replace", "link", "unlink", "mkdir")


def begin(
    nth: int,
    *,
    after: bool = False,
    how: str = "killed",
    calls: tuple[str, ...] = CALLS,
    noted: str | None = None,
) -> None:
    """Count these calls of `os` in this process, and strike before or after the nth; 0: never.

    `how`: "killed" or "stopped" by a signal; "full": that call and all later ones fail. `noted` is
    a file to which the path of each call is written, one per line.
    """
    count = 0

    def counted(name: str) -> Callable[..., Any]:
        call, which = getattr(os, name), int(name in ("rename", "replace", "link"))

        def struck(*given: Any, **named: Any) -> Any:
            nonlocal count
            count += 1
            if noted is not None:
                with open(noted, "a") as file:
                    file.write(f"{_path(given[which])}\n")
            now = count == nth
            if how == "full" and 0 < nth <= count:
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
        setattr(os, name, counted(name))


def _path(given: Any) -> str:
    """A path, or that of a descriptor."""
    return os.readlink(f"/proc/self/fd/{given}") if isinstance(given, int) else os.fspath(given)


def noted_calls(path: Path) -> list[str]:
    """The paths of the calls that a process made, in their order."""
    return path.read_text().splitlines()


def _strike(how: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGSTOP)
