"""Functions shared by the stages of `headrace demo`: commands that are printed, then run."""

from __future__ import annotations

import contextlib
import json
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import urllib3

from storage.wording import counted

IN_SHARDS_SECONDS = 30.0
STOP_SECONDS = 30.0


class DemoFailed(RuntimeError):
    """A stage failed; the text names it and has its output."""


@dataclass
class CollectorCommand:
    """`headrace collect` as a process of its own."""

    name: str
    root: Path
    process: subprocess.Popen[str]
    address: str

    def counts(self) -> dict[str, Any]:
        """The counts in the answer of /readyz."""
        response = urllib3.request("GET", f"{self.address}/readyz", retries=False, timeout=10.0)
        found: dict[str, Any] = response.json()
        return found

    def stop(self) -> None:
        """Stop it with SIGTERM, which drains. Raises DemoFailed unless it ends well."""
        self.process.send_signal(signal.SIGTERM)
        if self.process.wait(STOP_SECONDS) != 0:
            raise DemoFailed(f"the collector of {self.name} ended with {self.process.returncode}")


@dataclass
class Demo:
    """The demo's folder, and how its stages run commands."""

    root: Path
    data: Path
    seed: int

    def say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def command(self, *words: object, accept: tuple[int, ...] = (0,)) -> dict[str, Any]:
        """Run a headrace command; return its --json line."""
        arguments = [str(word) for word in words]
        began = time.monotonic()
        self.say(f"$ headrace {shlex.join(arguments)}")
        done = subprocess.run(
            [sys.executable, "-P", "-m", "headrace", *arguments, "--json"],
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        if done.returncode not in accept:
            raise DemoFailed(f"headrace {arguments[0]} ended with {done.returncode}")
        self.say(f"  {time.monotonic() - began:.1f} s")
        document: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return document

    @contextlib.contextmanager
    def collecting(self, name: str, *words: object) -> Iterator[CollectorCommand]:
        """Run `headrace collect` for a log on a free port; `words` declare its policy."""
        root = self.root / name
        arguments = ["collect", "--root", str(root), "--port", "0", *map(str, words)]
        self.say(f"$ headrace {shlex.join(arguments)} &")
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "headrace", *arguments, "--json"],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            line = process.stdout.readline() if process.stdout else ""
            if not line:
                raise DemoFailed(f"the collector of {name} did not start")
            address = json.loads(line)["address"]
            self.say(f"  {address}")
            yield CollectorCommand(name, root, process, address)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
            if process.stdout:
                process.stdout.close()

    def await_shards(self, collector: CollectorCommand) -> int:
        """Wait until all acknowledged steps are in shards; return their number.

        That is some seconds after the last episode ended.
        """
        limit = time.monotonic() + IN_SHARDS_SECONDS
        while (counts := collector.counts())["steps_in_shards"] < counts["steps"]:
            if time.monotonic() > limit:
                raise DemoFailed(f"{collector.name}: steps are not in shards in time: {counts}")
            time.sleep(0.05)
        steps: int = counts["steps_in_shards"]
        self.say(f"  {collector.name}: {steps:,} steps in {counted(counts['shards'], 'shard')}")
        return steps
