"""Child processes, which can import this package and do not outlive their parent; stop signals."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Iterator
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when its parent ends; exit if it has ended already.

    On systems without such a call, the process has to exit at the end of its input.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit("the parent process is gone")


def own_environment() -> dict[str, str]:
    """This process's environment, changed so that children can import this package."""
    environment = dict(os.environ)
    root = str(Path(__file__).resolve().parents[len(__name__.split(".")) - 1])
    if root != sysconfig.get_paths()["purelib"]:
        before = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = f"{root}{os.pathsep}{before}" if before else root
    return environment


def drop_pipes(child: subprocess.Popen[bytes]) -> None:
    """Close a child's pipes, discarding data that a dead child can no longer read."""
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()


@contextlib.contextmanager
def stop_on_signal() -> Iterator[threading.Event]:
    """Yield an event that SIGTERM and SIGINT set."""
    stop = threading.Event()
    before = {
        number: signal.signal(number, lambda *_: stop.set())
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
