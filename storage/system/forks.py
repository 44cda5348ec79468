"""Objects that a forked child renews: queues, threads, connections and locks of its parent.

Python runs the renewal in the child of `os.fork`. A child of a fork without Python's hooks (libc's
`fork`, the workers of uWSGI) finds out by its process id, at its first call of `notice_fork`.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from os import getpid
from typing import TypeVar

__all__ = ["notice_fork", "renewed_by_fork"]

T = TypeVar("T")

_process = os.getpid()
_renewals: list[Callable[[], None]] = []
_locks: dict[int, threading.RLock] = {}  # by process: a child must not wait for its parent's


def renewed_by_fork(renew: Callable[[T], object]) -> weakref.WeakSet[T]:
    """A weak set of objects, whose copies in a forked child `renew` renews."""
    known: weakref.WeakSet[T] = weakref.WeakSet()

    def renew_all() -> None:
        for one in list(known):
            renew(one)

    _renewals.append(renew_all)
    return known


def notice_fork() -> None:
    """Renew this process's objects if it was forked and nothing has told it."""
    if getpid() != _process:
        _catch_up()


def _catch_up() -> None:
    with _locks.setdefault(getpid(), threading.RLock()):  # the others wait for the first caller
        if getpid() != _process:
            _renew_all()


def _renew_all() -> None:
    global _process
    for renew_all in _renewals:
        renew_all()
    _process = getpid()


if hasattr(os, "register_at_fork"):  # a client also runs on Windows, which does not fork
    os.register_at_fork(after_in_child=_renew_all)
