"""`collect --supervise`: the collector in a child process that is forked again if it is killed.

Loading its modules takes a collector longer than replaying its journal. So this process loads them,
holds the socket, and does nothing else. The next child needs only the time to replay the journal,
and clients that connect meanwhile wait in the backlog and are answered.
"""

from __future__ import annotations

import logging
import mmap
import os
import signal
import time
from collections import deque

from storage.system.process import die_with_parent

log = logging.getLogger("headrace.supervisor")

BURST, WITHIN_SECONDS, PAUSE_SECONDS = 15, 5.0, 1.0
TRIES = 5

_STOP = (signal.SIGTERM, signal.SIGINT)
_HEARD = {*_STOP, signal.SIGCHLD}


class Deaths:
    """The pause before the next child: none, unless children die in quick succession."""

    def __init__(self) -> None:
        self._at: deque[float] = deque(maxlen=BURST)

    def pause(self, now: float) -> float:
        """Seconds to wait, after a death at `now` (seconds of a monotonic clock)."""
        self._at.append(now)
        many = len(self._at) == BURST and now - self._at[0] < WITHIN_SECONDS
        return PAUSE_SECONDS if many else 0.0


class Supervisor:
    """Forks the serving process. To be used by the main thread, before other threads exist."""

    def __init__(self) -> None:
        self._served = mmap.mmap(-1, 1)  # a byte shared by this process and the child
        self._stopped = False

    def serving(self) -> None:
        """To be called by the child when it serves."""
        self._served[0] = 1

    def stay_up(self) -> int | None:
        """Return None in each child, and in this process the last child's exit status.

        SIGTERM and SIGINT are passed on; a child starts with both blocked, until it can handle
        them. A child that is killed, or that fails after it has served, is replaced by the next
        one. If a start fails, this returns, unless an earlier child served: then it tries TRIES
        times in a row. A failed fork counts as a failed start. The child is killed when this
        process ends.
        """
        # if the parent ignores SIGCHLD, no child's end would be reported
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_BLOCK, _HEARD)
        deaths, failed = Deaths(), TRIES  # one try for the first start
        while True:
            self._served[0] = 0
            parent, child = os.getpid(), _fork()
            if child == 0:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
                die_with_parent(parent)
                return None
            status = self._watch(child) if child > 0 else 1
            if status == 0 or (self._stopped and -status in _STOP):
                return 0
            failed = 0 if self._served[0] else failed + 1
            over = self._stopped or failed > TRIES
            if child > 0:
                how = f"was killed by signal {-status}" if status < 0 else f"ended with {status}"
                then = "" if over else "; the next one starts"
                log.error("the collector (process %d) %s%s", child, how, then)
            if over:
                return max(status, 1)
            time.sleep(PAUSE_SECONDS if failed else deaths.pause(time.monotonic()))

    def _watch(self, child: int) -> int:
        """Wait for the child's end; return its exit status, or minus the signal's number.

        Signals are handled one at a time, so that none is sent to a process id that was reused.
        """
        while True:
            number = signal.sigwait(_HEARD)
            if number in _STOP:
                self._stopped = True
                os.kill(child, number)
                continue
            while True:  # in a container this may be process 1, which must also reap orphans
                ended, code = os.waitpid(-1, os.WNOHANG)
                if ended == child:
                    return os.waitstatus_to_exitcode(code)
                if ended == 0:
                    break


def _fork() -> int:
    """`os.fork`; logs an error and returns -1 if it fails."""
    try:
        return os.fork()
    except OSError as error:
        log.error("no process can be started: %s", error)
        return -1
