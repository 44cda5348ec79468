"""An idle thread keeps no reference to its last task: parts and rows take megabytes.

And no error ends the thread that has shards written.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

from ingest.collector.group_commit import Committer, Task
from ingest.collector.writer_thread import Sealer, SealJob
from storage.journal.memory_journal import MemoryJournal
from storage.journal.records import Plan
from tests.ingest.simulated_collector import MemoryWriter
from tests.storage.shards.test_shard import make_part

WAIT_SECONDS = 60.0


def at_once(action: Callable[..., Any], *arguments: Any) -> None:
    action(*arguments)


def watched() -> tuple[Callable[[Any], None], threading.Event]:
    """Return a callback for a finished task, and an event that is set once the callback is
    freed.
    """
    gone = threading.Event()

    def done(result: Any) -> None:
        """Do nothing."""

    weakref.finalize(done, gone.set)
    return done, gone


def test_the_sealer_lets_go_of_a_shard_that_is_written():
    sealer = Sealer(MemoryWriter(), notify=at_once, on_moved=lambda error: None)
    sealer.start()
    done, gone = watched()
    parts = [make_part(0, 1).with_ordinals(0, 0)]
    sealer.submit(SealJob(Plan(0, "s", "schema", 0, 0, b""), "{}", parts, done))
    del done
    assert gone.wait(WAIT_SECONDS)
    sealer.stop()


def test_no_error_of_a_writer_ends_the_thread_of_the_sealer():
    """The writer cannot start, for a reason that nobody expected; later it can."""

    class Starting(MemoryWriter):
        def start(self) -> None:
            raise ValueError("planted")

    sealer = Sealer(Starting(), notify=at_once, on_moved=lambda error: None)
    sealer.start()
    written = threading.Event()
    parts = [make_part(0, 1).with_ordinals(0, 0)]
    job = SealJob(Plan(0, "s", "schema", 0, 0, b""), "{}", parts, lambda shard: written.set())
    sealer.submit(job)
    assert written.wait(WAIT_SECONDS)
    sealer.stop()


def test_the_committer_lets_go_of_what_is_committed():
    nothing: list[Any] = []
    callbacks = {
        "on_durable": nothing.append,
        "on_full": nothing.append,
        "on_failed": nothing.append,
    }
    committer = Committer(MemoryJournal(), notify=at_once, **callbacks)
    committer.start()
    done, gone = watched()
    committer.submit(Task(0, row=(1, b"row")))
    committer.submit(Task(0, job=lambda journal: None, done=done))
    del done
    assert gone.wait(WAIT_SECONDS)
    committer.stop()
