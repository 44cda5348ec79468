"""A collector with slow commits, so that kills come before their end.

python -m tests.faults.slow_disk MUTANT tests.plain_collector collect --root DIR --port PORT
"""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

from storage.journal.sqlite_journal import SqliteJournal
from tests.collector_process import PLAIN
from tests.faults import launcher

SECONDS = "HEADRACE_SLOW_DISK_SECONDS"
COMMIT_SECONDS = float(os.environ.get(SECONDS, "0.03"))


def plant() -> None:
    """Delay every commit of this process."""
    commit = SqliteJournal.commit

    def slow(self: SqliteJournal, *args: Any, **given: Any) -> None:
        threading.Event().wait(COMMIT_SECONDS)
        commit(self, *args, **given)

    SqliteJournal.commit = slow  # type: ignore[method-assign]  # a disk as slow as real ones


def options(mutant: str | None) -> dict[str, Any]:
    """The arguments of `CollectorProcess` for such a collector."""
    if mutant is None:
        return {"plant": __name__}
    return {"program": ("-m", __name__, mutant, PLAIN)}


if __name__ == "__main__":
    plant()
    sys.exit(launcher.main(*sys.argv[1:]))
