"""A fork without Python's fork hooks, as uWSGI makes its workers.

The child copies the interpreter's lock as it is. If another thread of the parent holds it or waits
for it then, the child hangs before any code of ours runs. So `bare_fork` first waits until all
other threads wait for something else, and the client's threads must not wake up in between.
"""

from __future__ import annotations

import ctypes
import os
import threading
from pathlib import Path

from ingest.delivery import outbox, shared_spool

outbox.LOOK_SECONDS = shared_spool.LOOK_SECONDS = 3600.0


def bare_fork() -> int:
    """The child's process id, or 0 in the child."""
    await_idle()
    return int(ctypes.PyDLL(None).fork())  # PyDLL: this thread keeps the interpreter


def await_idle() -> None:
    """Wait until no other thread of this process asks for the interpreter."""
    pause = threading.Event()
    before, now = None, _others()
    while before != now or any(state != "S" for state, _ in now):
        pause.wait(0.05)  # others get the interpreter, and run
        before, now = now, _others()


def _others() -> list[tuple[str, str]]:
    """The state of each other thread, and the processor time that it has had."""
    tasks = [path for path in Path("/proc/self/task").iterdir() if path.name != str(os.getpid())]
    return [
        ((one / "stat").read_text().rpartition(")")[2].split()[0], (one / "schedstat").read_text())
        for one in sorted(tasks)
    ]
