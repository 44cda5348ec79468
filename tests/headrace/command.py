"""`headrace` as a process, the way people and schedulers run it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.closing import Closing

ROOT = Path(__file__).parents[2]
STOP_SECONDS = 30


def headrace(
    *words: object, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run one command to its end."""
    return subprocess.run(
        [sys.executable, "-m", "headrace", *map(str, words)],
        cwd=ROOT,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        check=False,
    )


def answer(result: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """The one line that --json leaves on stdout."""
    (line,) = result.stdout.splitlines()
    document: dict[str, Any] = json.loads(line)
    return document


def refused(result: subprocess.CompletedProcess[str], *texts: str, status: int = 2) -> bool:
    """Whether a command refused its user's input: status 2, a message, no traceback, no result."""
    told = all(text in result.stderr for text in texts)
    return (
        result.returncode == status
        and not result.stdout
        and "Traceback" not in result.stderr
        and result.stderr.count("\n") < 12
        and told
    )


class Collect(Closing):
    """`headrace collect` on a free port; leaving the block drains it."""

    def __init__(self, root: Path, *words: str) -> None:
        command = [sys.executable, "-m", "headrace", "collect", "--root", str(root), "--port", "0"]
        self.process = subprocess.Popen(
            [*command, *words],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        if self.process.stdout is None:
            raise RuntimeError("no output")
        self.first_line = self.process.stdout.readline()
        lines = 0 if "--json" in words or not self.first_line else 2
        self.greeting = [self.process.stdout.readline() for _ in range(lines)]

    def stop(self, number: signal.Signals = signal.SIGTERM) -> tuple[str, str, int]:
        """(the rest of stdout, stderr, exit status) after a signal."""
        self.process.send_signal(number)
        out, err = self.process.communicate(timeout=STOP_SECONDS)
        return out, err, self.process.returncode

    def close(self) -> None:
        if self.process.poll() is None:
            self.stop()
