"""Shard writers that are forked from their collector, in which Arrow is loaded.

To load it for each took four times the processor time of all else that such a collector does.
`tests/storage/shards/test_writer_process.py` has the writer that is started by an exec.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import traceback
from functools import partial
from pathlib import Path

from storage.__main__ import main
from storage.shards.writer_process import WriterProcess
from storage.system.startup import leave_out

NAME = "write-shards"
_MOST_FILES = 4_096


def fork_writers() -> None:
    """Load Arrow, and let every WriterProcess of this process's forks start its child by a fork."""
    leave_out("pandas")  # as the writer does; Arrow asks for it once only
    import storage.shards.writer_main  # noqa: PLC0415, F401

    sys.meta_path.pop(0)
    WriterProcess.start = start_forked  # type: ignore[method-assign]


def start_forked(self: WriterProcess) -> None:
    """In the place of `WriterProcess.start`."""
    if self._child is None:
        self._asked = False
        options = [NAME, "--directory", str(self._shards), "--parent", str(os.getpid())]
        self._child = subprocess.Popen(
            [NAME],  # which is not executed
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            preexec_fn=partial(_write_shards, [*options, *self._options]),
        )


def _write_shards(arguments: list[str]) -> None:
    """Be the writer, with its pipes and no other file of the collector; never return."""
    status = 1
    try:
        os.closerange(3, _MOST_FILES)
        sys.stdin, sys.stderr = open(0), open(2, "w")  # noqa: SIM115 - also where pytest captures
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, signal.SIG_DFL)
        Path("/proc/self/comm").write_text(NAME)
        status = main(arguments)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)
