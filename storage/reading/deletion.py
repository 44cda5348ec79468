"""Ending the threads of a reader or source that is deleted without `close`."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any


def close_if_deleted(owner: object, close: Callable[[], object]) -> weakref.finalize[Any, Any]:
    """Have `close` called if `owner` is deleted in this process; `detach` cancels it.

    It is called in a thread of its own. The garbage collector may run a finalizer in the middle of
    any section, with locks held that `close` or a thread that it waits for needs. Until then
    `close` is referenced, so it must not refer to `owner`.
    """
    finalizer = weakref.finalize(owner, _close_in_thread, close, os.getpid())
    finalizer.atexit = False
    return finalizer


def _close_in_thread(close: Callable[[], object], process: int) -> None:
    if os.getpid() != process:  # a forked child has none of the threads
        return
    with contextlib.suppress(RuntimeError):  # no more threads: those of the owner stay
        threading.Thread(target=close, name="headrace-close", daemon=True).start()
