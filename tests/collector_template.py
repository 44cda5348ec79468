"""A process that has loaded the collector's modules, and forks collectors on request.

Loading them takes half of a collector's start, and the tests start hundreds. `collect --supervise`
forks the same process. A forked collector also forks its shard writer (`tests.forked_writer`).
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

_MOST_BYTES = 100_000
_MOST_FILES = 4_096
HOUR = 3600.0


class Forked:
    """A forked collector, with the interface of `subprocess.Popen`."""

    def __init__(self, pid: int, stdout: TextIO, ended: int) -> None:
        self.pid = pid
        self.stdout = stdout
        self.returncode: int | None = None
        self._ended = ended
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0.0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            ready = select.poll()  # knows descriptors beyond 1023, too
            ready.register(self._ended, select.POLLIN)
            if not ready.poll(None if timeout is None else timeout * 1000):
                raise subprocess.TimeoutExpired("collect", timeout or 0.0)
        with self._lock:
            if self.returncode is None:
                self.returncode = int(os.read(self._ended, 16))
                os.close(self._ended)
            return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # reaped; the status follows in a moment
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


class Template:
    """The forking process; it ends together with the one that started it."""

    def __init__(self) -> None:
        self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            cwd=Path(__file__).parents[1],
            pass_fds=[theirs.fileno()],
        )
        theirs.close()

    def fork(self, arguments: Sequence[str], stderr: int, plant: str = "") -> Forked:
        """Run `tests.plain_collector` with these arguments, and the current environment and umask.

        With "headrace" as the first argument, the command line of Headrace instead. Before it,
        `plant()` of the module of that name is called.
        """
        os.umask(umask := os.umask(0o077))
        job = json.dumps([arguments, umask, dict(os.environ), plant]).encode()
        out, theirs = os.pipe()
        ended, write_end = os.pipe()
        with self._lock:
            socket.send_fds(self._link, [job], [theirs, stderr, write_end])
            pid = int(self._link.recv(16))
        os.close(theirs)
        os.close(write_end)
        return Forked(pid, os.fdopen(out), ended)

    def close(self) -> None:
        self._link.shutdown(socket.SHUT_RDWR)  # also for processes that were forked from this one
        self._link.close()
        self._process.wait()


@functools.cache
def template() -> Template:
    """The one of this process."""
    made = Template()
    atexit.register(made.close)
    return made


def main(link: int) -> int:
    """Fork until the peer closes the link; return the exit status, in each child, too."""
    from storage.system.startup import loading, use_one_blas_thread  # noqa: PLC0415 - as below

    use_one_blas_thread()
    with loading():
        # lazy, so that its imports follow the line above and never run in the tests' own process
        from headrace.__main__ import main as headrace  # noqa: PLC0415
        from tests.forked_writer import fork_writers  # noqa: PLC0415
        from tests.plain_collector.command import run  # noqa: PLC0415

        fork_writers()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal, it is for the tests
    asked = socket.socket(fileno=link)
    ready = select.poll()
    ready.register(link, select.POLLIN)
    running: dict[int, tuple[int, int]] = {}  # pidfd -> pid, and where to report its end
    while True:
        for found, _ in ready.poll():
            if found in running:
                ready.unregister(found)
                os.close(found)
                _tell_end(*running.pop(found))
                continue
            job, files, _, _ = socket.recv_fds(asked, _MOST_BYTES, 3)
            if not job:
                return 0
            if (pid := os.fork()) == 0:
                asked.detach()
                arguments = _as_asked(job, files)
                _turn_clock_by_signal()
                if arguments[0] != "headrace":
                    return run(arguments)
                sys.argv = arguments
                headrace()
                return 0
            asked.send(str(pid).encode())
            os.close(files[0])
            os.close(files[1])
            running[pidfd := os.pidfd_open(pid)] = pid, files[2]
            ready.register(pidfd, select.POLLIN)


def _as_asked(job: bytes, files: Sequence[int]) -> list[str]:
    """Adopt the output, umask and environment, and no other file; plant; return the arguments."""
    os.dup2(files[0], 1)
    os.dup2(files[1], 2)
    os.closerange(3, _MOST_FILES)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    arguments: list[str]
    arguments, umask, environment, plant = json.loads(job)
    os.umask(umask)
    os.environ.clear()
    os.environ.update(environment)
    if plant:
        importlib.import_module(plant).plant()
    return arguments


def _turn_clock_by_signal() -> None:
    """Each SIGUSR1 turns the clock of the collector's time-outs an hour ahead."""
    from ingest.collector.collector import Collector  # noqa: PLC0415 - as in `main`

    ahead = 0.0

    def turn(*_: object) -> None:
        nonlocal ahead
        ahead += HOUR

    signal.signal(signal.SIGUSR1, turn)
    Collector.__init__.__kwdefaults__["clock"] = lambda: time.monotonic() + ahead  # type: ignore[attr-defined]


def _tell_end(pid: int, write_end: int) -> None:
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(BrokenPipeError), os.fdopen(write_end, "wb", buffering=0) as file:
        file.write(str(code).encode())


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
