"""`headrace`: its commands in this process or in one of their own, and its collector."""

from __future__ import annotations

import io
import json
import logging
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Mapping
from contextlib import ExitStack, chdir, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from headrace.__main__ import main
from tests.closing import Closing

ROOT = Path(__file__).parents[2]
STOP_SECONDS = 30


Result: TypeAlias = subprocess.CompletedProcess[str]
OWN_PROCESS = ("collect", "up", "demo")
"""Commands that serve, or change the process they run in."""


def headrace(*words: object, env: Mapping[str, str] | None = None) -> Result:
    """Run one command to its end in this process, which loads torch and Arrow once.

    Each command also runs as a process somewhere: by `process`, or on a page of the documentation.
    """
    if words[0] in OWN_PROCESS:
        return process(*words, env=env)
    texts = list(map(str, words))
    out, err, logger = io.StringIO(), io.StringIO(), logging.getLogger()
    handlers, level, status = logger.handlers[:], logger.level, 0
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(sys, "argv", ["headrace", *texts])
        patch.setattr(sys, "meta_path", sys.meta_path[:])  # where main() may leave out modules
        for name, value in (env or {}).items():
            patch.setenv(name, value)
        stack.enter_context(chdir(ROOT))
        stack.enter_context(redirect_stdout(out))
        stack.enter_context(redirect_stderr(err))
        try:
            main()
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:  # as the interpreter would
            traceback.print_exc()
            status = 1
        finally:
            logger.handlers[:] = handlers
            logger.setLevel(level)
    return subprocess.CompletedProcess(texts, status, out.getvalue(), err.getvalue())


def process(*words: object, env: Mapping[str, str] | None = None) -> Result:
    """Run one command to its end in a process of its own, the way people and schedulers run it."""
    return subprocess.run(
        [sys.executable, "-m", "headrace", *map(str, words)],
        cwd=ROOT,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        check=False,
    )


def answer(result: Result) -> dict[str, Any]:
    """The one line that --json leaves on stdout."""
    (line,) = result.stdout.splitlines()
    document: dict[str, Any] = json.loads(line)
    return document


def refused(result: Result, *texts: str, status: int = 2) -> bool:
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
