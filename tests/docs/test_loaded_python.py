"""The programs that are forked for the tests do not outlive them."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PATIENCE = 60.0  # s; a limit that only a broken build reaches
RUN = """
import os, subprocess, sys
from pathlib import Path
from tests.loaded_python import loaded_python
bins = loaded_python(Path(sys.argv[1]), sys.executable, os.getpid())
subprocess.run([bins / "python", "-c", sys.argv[2]])
"""
PROGRAM = """
import os, time
follower = os.getppid()
with open(f"/proc/{follower}/stat") as file:
    loader = file.read().split()[3]
print(os.getpid(), follower, loader, flush=True)
time.sleep(3600)
"""


def test_no_forked_program_outlives_a_killed_run(tmp_path: Path) -> None:
    """Neither the program, nor the process that follows it, nor the one with the libraries."""
    command = [sys.executable, "-c", RUN, str(tmp_path), PROGRAM]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        running = [os.pidfd_open(int(pid)) for pid in run.stdout.readline().split()]
        assert len(running) == 3
        try:
            assert not select.select(running, [], [], 0.0)[0]
            run.kill()
            for process in running:
                assert select.select([process], [], [], PATIENCE)[0]
        finally:
            for process in running:
                if not select.select([process], [], [], 0.0)[0]:
                    signal.pidfd_send_signal(process, signal.SIGKILL)
                os.close(process)
