"""The one thread of a collector that touches `weights/`.

A network file system may hang in any call, even in a stat, and cannot be interrupted. So nothing
under `weights/` is read or written on the event loop, nor in a pool whose threads are joined at
exit: this thread is a daemon, nobody waits for its end without a bound, and what hangs in it stops
neither logging nor a start nor SIGTERM.
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
"""How long a request waits for a job; then it gets 429, and the job may still be done."""
END_SECONDS = 0.5
"""How long a collector that ends waits for the thread."""


class WeightsThread:
    """Runs jobs in order, and `tick` every `interval` seconds while there are none."""

    def __init__(self, tick: Callable[[], None], interval: float) -> None:
        self._tick, self._interval = tick, interval
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="headrace-weights", daemon=True)
        self._busy_since: float | None = None
        self._stopped = False

    def start(self) -> None:
        """Begin; the event loop that runs now is where `tell` and `ask` answer."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def stop(self) -> None:
        """End after the jobs that wait. Returns at once."""
        self._stopped = True
        self._jobs.put(None)

    async def ended(self) -> None:
        """Wait until the thread has ended, and not long."""
        until = time.monotonic() + END_SECONDS
        while self._thread.is_alive() and time.monotonic() < until:
            await asyncio.sleep(0.005)

    @property
    def busy_seconds(self) -> float:
        """For how long it has been at what it does now: many seconds say that `weights/` hangs."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    def submit(self, job: Callable[[], None]) -> None:
        """Run a job after those that wait."""
        self._jobs.put(job)

    def tell(self, function: Callable[[], None]) -> None:
        """Run a function on the event loop, from this thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody hears it any more
            self._loop.call_soon_threadsafe(function)

    async def ask(self, job: Callable[[], T], seconds: float = ASK_SECONDS) -> T:
        """The result of a job. Raises what it raises, and Refusal: busy when it takes longer,
        draining after `stop`."""
        if self._stopped:  # a long poll that was let go, and comes again
            raise Refusal("draining", "the collector ends", retry_after=1.0)
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def run() -> None:
            try:
                found = job()
            except Exception as error:
                failure = error  # the name of the clause is gone when the loop comes to it
                self.tell(lambda: None if answer.done() else answer.set_exception(failure))
            else:
                self.tell(lambda: None if answer.done() else answer.set_result(found))

        self.submit(run)
        try:
            return await asyncio.wait_for(answer, seconds)
        except TimeoutError:
            text = "the folder of weights does not answer; what was asked may still be done"
            raise Refusal("busy", text, retry_after=2.0) from None

    def _run(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=self._interval)
            except Empty:
                job = self._tick
            if job is None:
                return
            self._busy_since = time.monotonic()
            try:
                job()
            except Exception:
                log.exception("following the weights failed, and goes on")
            self._busy_since = None
