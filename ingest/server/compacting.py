"""`collect --compact HOURS`: compaction by a child process, one at a time."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

from ingest.collector.trainer_watch import look_in_thread
from storage import __name__ as STORAGE
from storage.system.process import own_environment

log = logging.getLogger("headrace.collector")


class Compacting:
    """Starts `python -m storage compact` for a root, each time `hours` after the last one ended.

    The child is killed with the thread that started it, which ends with this process.
    """

    def __init__(self, root: Path, hours: float) -> None:
        self._root, self._seconds = root, hours * 3600

    async def follow(self) -> None:
        """Compact at once, then at each interval, until cancelled."""
        await look_in_thread(self.compact, self._seconds, "headrace-compaction")

    def compact(self) -> None:
        """Run the child, and log its result."""
        words = ["compact", "--root", str(self._root), "--parent", str(os.getpid())]
        try:
            done = subprocess.run(
                [sys.executable, "-P", "-m", STORAGE, *words],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                env=own_environment(),
                check=False,
            )
        except OSError as error:
            log.warning("compaction cannot be started: %s", error)
            return
        if done.returncode:
            log.warning("compaction ended with %d: %s", done.returncode, done.stderr.strip()[-500:])
        elif done.stdout:
            log.info("%s", done.stdout.strip())
