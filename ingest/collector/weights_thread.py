"""The only thread of a collector that accesses `weights/`.

A network file system can hang in any call, even in a stat, and cannot be interrupted. So nothing
under `weights/` is accessed on the event loop or in a pool whose threads are joined at exit. This
thread is a daemon, and waits for it are bounded: if it hangs, logging, starts and SIGTERM still
work.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import TypeVar

from ingest.protocol.errors import Refusal

log = logging.getLogger("headrace.collector")

T = TypeVar("T")

ASK_SECONDS = 30.0
"""Seconds that a request waits for a job; then it gets 429, and the job may still be done."""
END_SECONDS = 0.5
"""Seconds that a collector that ends waits for the thread."""


class WeightsThread:
    """Runs jobs in order, and calls `tick` between them, `interval` seconds after it last ended."""

    def __init__(self, tick: Callable[[], None], interval: float) -> None:
        self._tick, self._interval = tick, interval
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="headrace-weights", daemon=True)
        self._busy_since: float | None = None
        self._stopped = False

    def start(self) -> None:
        """Start; `tell` and `ask` use the event loop that is running now."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def stop(self) -> None:
        """End after the queued jobs. Returns at once."""
        self._stopped = True
        self._jobs.put(None)

    async def ended(self) -> None:
        """Wait until the thread has ended, for at most `END_SECONDS`."""
        until = time.monotonic() + END_SECONDS
        while self._thread.is_alive() and time.monotonic() < until:
            await asyncio.sleep(0.005)

    @property
    def busy_seconds(self) -> float:
        """Seconds since the current job began: many of them mean that `weights/` hangs."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    def submit(self, job: Callable[[], None]) -> None:
        """Queue a job."""
        self._jobs.put(job)

    def tell(self, function: Callable[[], None]) -> None:
        """Run a function on the event loop, from this thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(function)

    async def ask(self, job: Callable[[], T], seconds: float = ASK_SECONDS) -> T:
        """Run a job, and return its result.

        Raises the job's errors, and Refusal: `busy` after `seconds`, `draining` after `stop`.
        """
        if self._stopped:  # as for a long poll that was released and comes again
            raise Refusal("draining", "the collector is shutting down", retry_after=1.0)
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def run() -> None:
            try:
                found = job()
            except Exception as error:
                failure = error  # `error` is unbound when the loop runs the lambda
                self.tell(lambda: None if answer.done() else answer.set_exception(failure))
            else:
                self.tell(lambda: None if answer.done() else answer.set_result(found))

        self.submit(run)
        try:
            return await asyncio.wait_for(answer, seconds)
        except TimeoutError:
            text = "the folder of weights does not respond; the request may still be carried out"
            raise Refusal("busy", text, retry_after=2.0) from None

    def _run(self) -> None:
        due = time.monotonic() + self._interval
        while True:
            try:
                left = due - time.monotonic()
                job = self._jobs.get(timeout=left) if left > 0 else self._tick
            except Empty:
                job = self._tick
            if job is None:
                return
            self._busy_since = time.monotonic()
            try:
                job()
            except Exception:
                log.exception("an error while following the weights; following continues")
            self._busy_since = None
            if job is self._tick:
                due = time.monotonic() + self._interval
