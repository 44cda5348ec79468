"""Run `headrace` commands, in this process or in their own, and its collector."""

from __future__ import annotations

import io
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, chdir, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from headrace.__main__ import main
from tests.closing import Closing
from tests.collector_template import template

ROOT = Path(__file__).parents[2]
STOP_SECONDS = 60


Result: TypeAlias = subprocess.CompletedProcess[str]
OWN_PROCESS = ("up", "demo")
"""Commands that serve or change their process, and so need one of their own."""
FREE_PORT = {"HEADRACE_COLLECT_PORT": "0", "HEADRACE_UP_PORT": "0"}
"""The usual port may be taken on this machine."""


def headrace(*words: object, env: Mapping[str, str] | None = None) -> Result:
    """Run one command to its end in this process, which loads torch and Arrow once.

    Each command also runs as a process somewhere: by `process`, or on a page of the documentation.
    A collector is forked from a process that has its modules loaded.
    """
    texts, env = list(map(str, words)), {**FREE_PORT, **(env or {})}
    if words[0] == "collect":
        return Forked(texts, env).result()
    if words[0] in OWN_PROCESS:
        return process(*words, env=env)
    out, err, logger = io.StringIO(), io.StringIO(), logging.getLogger()
    handlers, level, status = logger.handlers[:], logger.level, 0
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(sys, "argv", ["headrace", *texts])
        for name, value in env.items():
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
    """Run one command to its end in its own process, as people and schedulers do."""
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
    has_texts = all(text in result.stderr for text in texts)
    return (
        result.returncode == status
        and not result.stdout
        and "Traceback" not in result.stderr
        and result.stderr.count("\n") < 12
        and has_texts
    )


class Forked:
    """A command in a process that is forked from one with the collector's modules loaded."""

    def __init__(self, words: Sequence[str], env: Mapping[str, str]) -> None:
        self.words = words
        self._stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by `result`
        with pytest.MonkeyPatch.context() as patch:
            for name, value in env.items():
                patch.setenv(name, value)
            self.process = template().fork(["headrace", *words], self._stderr.fileno())

    def result(self) -> Result:
        """Wait for the end of the process; return its status and the rest of its output."""
        with self.process.stdout as stdout, self._stderr:
            out, status = stdout.read(), self.process.wait(STOP_SECONDS)
            self._stderr.seek(0)
            return subprocess.CompletedProcess(self.words, status, out, self._stderr.read())


class Collect(Closing):
    """`headrace collect` on a free port; leaving the block drains it."""

    def __init__(self, root: Path, *words: str) -> None:
        self._forked = Forked(["collect", "--root", str(root), "--port", "0", *words], {})
        self.process = self._forked.process
        self.first_line = self.process.stdout.readline()
        lines = 0 if "--json" in words or not self.first_line else 2
        self.greeting = [self.process.stdout.readline() for _ in range(lines)]

    def stop(self, number: signal.Signals = signal.SIGTERM) -> tuple[str, str, int]:
        """(the rest of stdout, stderr, exit status) after a signal."""
        self.process.send_signal(number)
        done = self._forked.result()
        return done.stdout, done.stderr, done.returncode

    def close(self) -> None:
        if self.process.returncode is None:
            self.stop()
