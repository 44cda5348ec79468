"""`collect --supervise`: the collector in a child that is forked again as soon as it is killed.

To load its modules takes a collector longer than to read its journal. So this process has loaded
them, holds the socket, and does nothing else: a child that dies is followed by the next one in the
time that the journal takes, and who connects meanwhile waits in the backlog and is answered.
"""

from __future__ import annotations

import logging
import mmap
import os
import signal
import time
from collections import deque

from storage.system.process import die_with_parent

__all__ = ["Deaths", "Supervisor"]

log = logging.getLogger("headrace.supervisor")

BURST, WITHIN_SECONDS, PAUSE_SECONDS = 15, 5.0, 1.0
TRIES = 5

_STOP = (signal.SIGTERM, signal.SIGINT)
_HEARD = {*_STOP, signal.SIGCHLD}


class Deaths:
    """How long to wait before the next child: not at all, unless they die one after the other."""

    def __init__(self) -> None:
        self._at: deque[float] = deque(maxlen=BURST)

    def pause(self, now: float) -> float:
        """Seconds, after a death at `now` (seconds of a clock that never goes back)."""
        self._at.append(now)
        many = len(self._at) == BURST and now - self._at[0] < WITHIN_SECONDS
        return PAUSE_SECONDS if many else 0.0


class Supervisor:
    """Forks the process that serves. To be used by the main thread, before there are others."""

    def __init__(self) -> None:
        self._served = mmap.mmap(-1, 1)  # a byte that the child and this process share
        self._stopped = False

    def serving(self) -> None:
        """To be called by the child once it serves."""
        self._served[0] = 1

    def stay_up(self) -> int | None:
        """None in each child, which serves and ends; in this process the last child's exit status.

        SIGTERM and SIGINT are passed on; a child begins with both blocked, until it can take them.
        A child that is killed, or that ends with an error after it served, is followed by the next
        one. A start that fails is the end, unless one before it served: then it is tried again,
        TRIES times in a row; to find no process for it is such a failure. The child is killed when
        this process ends.
        """
        # who started this may ignore it, and then no child's end would be told
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_BLOCK, _HEARD)
        deaths, failed = Deaths(), TRIES  # the first start has one try
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
        """Wait for the child's end; its exit status, or the signal's number below zero.

        Signals are taken one at a time, so that none reaches a process id that is free again.
        """
        while True:
            number = signal.sigwait(_HEARD)
            if number in _STOP:
                self._stopped = True
                os.kill(child, number)
                continue
            while True:  # in a container this may be process 1: others' orphans end here, too
                ended, code = os.waitpid(-1, os.WNOHANG)
                if ended == child:
                    return os.waitstatus_to_exitcode(code)
                if ended == 0:
                    break


def _fork() -> int:
    """`os.fork`; -1, and a line in the log, when there can be no process now."""
    try:
        return os.fork()
    except OSError as error:
        log.error("no process can be made: %s", error)
        return -1
