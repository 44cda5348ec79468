"""RLlib's `PolicyClient`, for programs that log faster than a collector takes it.

    from headrace.compat.rllib import PolicyClient

A call waits while the queue is full, and `close` delivers everything, however long that takes.
`headrace.PolicyClient` does neither by default, because it is made for services that must not wait.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from ingest.client import policy_client
from storage.wording import counted

log = logging.getLogger("headrace.compat")

PROGRESS_SECONDS = 5.0
"""Between two lines about what `close` still has to deliver."""


class PolicyClient(policy_client.PolicyClient):
    """`headrace.PolicyClient` with `on_full="block"`, which does not give up at the end."""

    def __init__(self, *address: Any, **settings: Any) -> None:
        super().__init__(*address, **{"on_full": "block", **settings})

    def close(self, timeout: float | None = None) -> None:
        """Deliver everything, for at most `timeout` seconds (None: no limit), then stop.

        Raises as `flush`, but for the time that it takes.
        """
        until = None if timeout is None else time.monotonic() + timeout
        try:
            self._drain(until)
        finally:  # also when an event was refused
            super().close(0.0 if self.stats.waiting else None)

    def _drain(self, until: float | None) -> None:
        while self.stats.waiting:
            left = PROGRESS_SECONDS if until is None else until - time.monotonic()
            try:
                self.flush(min(left, PROGRESS_SECONDS))
            except TimeoutError:
                if until is not None and time.monotonic() >= until:
                    break
                log.warning("%s still to be delivered", counted(self.stats.waiting, "event"))
