"""Objects that a forked child renews: queues, threads, connections and locks of its parent.

Python runs the renewal in the child of `os.fork`. A child of a fork without Python's hooks (libc's
`fork`, the workers of uWSGI) finds out at its first call of `notice_fork`: Linux has wiped a page
of its memory. On other systems each call asks for the process id, which takes 15 times as long.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
import weakref
from collections.abc import Callable
from os import getpid
from typing import TypeVar

T = TypeVar("T")

_WIPE_ON_FORK = 18  # MADV_WIPEONFORK, for which Python has no name


def _wiped_in_children() -> mmap.mmap | None:
    """A page that begins with 1 here, and with 0 in a forked child; None if the system has none."""
    if sys.platform != "linux":
        return None
    page = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        page.madvise(_WIPE_ON_FORK)
    except OSError:  # a kernel before 4.14
        return None
    page[0] = 1
    return page


_process, _page = os.getpid(), _wiped_in_children()
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
    if (_page is None or not _page[0]) and getpid() != _process:
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
    if _page is not None:
        _page[0] = 1


if hasattr(os, "register_at_fork"):  # a client also runs on Windows, which does not fork
    os.register_at_fork(after_in_child=_renew_all)
