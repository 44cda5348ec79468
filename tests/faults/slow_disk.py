"""A collector with slow commits, so that kills come before them.

python -m tests.faults.slow_disk none|MUTANT ingest collect --root DIR --port PORT
"""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

from ingest import __name__ as INGEST
from ingest.__main__ import main as collect
from storage.journal.sqlite_journal import SqliteJournal
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


def program(mutant: str | None) -> tuple[str, ...]:
    """The words that start such a collector, instead of `-m ingest`."""
    return ("-m", "tests.faults.slow_disk", mutant or "none", INGEST)


if __name__ == "__main__":
    plant()
    name, package, *arguments = sys.argv[1:]
    sys.exit(collect(arguments) if name == "none" else launcher.main(name, package, *arguments))
