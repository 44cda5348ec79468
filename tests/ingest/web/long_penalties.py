"""A collector whose penalties outlast every test, so that its answers show who waits.

A refusal that is charged is held for an hour. A costly body that would have to wait gets 429 at
once. Any other answer therefore proves that its request neither waited nor was charged, however
slow the machine is.
"""

from __future__ import annotations

import time

from ingest.web import cost_limits

HOUR = 3600.0


def plant() -> None:
    """Extend the penalties of this process; measure requests by the processor's time."""
    cost_limits.SHARE = 1e-9  # the least charge has the longest penalty
    cost_limits.MAX_HELD_SECONDS = cost_limits.MAX_PENALTY_SECONDS = HOUR
    cost_limits.MAX_WAIT_SECONDS = 0.0
    cost_limits.perf_counter = time.thread_time  # type: ignore[attr-defined]  # its clock
