"""`headrace up`: a collector and its trainer as two processes, each started again when it dies.

The collector keeps its port, so that clients find it again. One that dies more than a few times
within a minute is not started again: then everything stops, and the exit status is 1. A trainer
that ends, for whatever reason, is started again with back-off and without end: learning never stops
logging.
"""

from __future__ import annotations

import contextlib
import json
import logging
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from storage.declarations.declaration import PolicyDeclaration
from storage.declarations.policy_files import load_declarations, save_declaration
from storage.system.backoff import Backoff

log = logging.getLogger("headrace.up")

RESTARTS_A_MINUTE = 5
LASTED_SECONDS = 60.0  # a trainer that ran for so long is no failed start
STOP_SECONDS = 30.0


def declare_live(
    root: Path, policy_id: str, steps_per_version: int, max_lag: int | None = None
) -> PolicyDeclaration:
    """Flow control, small parts and quick shards for a policy that is declared already."""
    declared = load_declarations(root).get(policy_id)
    if declared is None:
        raise ValueError(
            f"{root}: no policy {policy_id!r} is declared: give --observation and --action, --env "
            "or --policy"
        )
    live = replace(
        declared,
        steps_per_version=steps_per_version,
        max_policy_lag=max_lag,
        part_steps=min(declared.part_steps, 256),
        part_seconds=min(declared.part_seconds, 0.2),
        seal_seconds=min(declared.seal_seconds, 0.2),
    )
    if live != declared:
        save_declaration(root, live)
    return live


class Child:
    """A headrace command that is kept running; its JSON lines go to `on_line`."""

    def __init__(self, words: Sequence[str], on_line: Callable[[dict[str, Any]], None]) -> None:
        self.words = list(words)
        self._on_line = on_line
        self.restarts = 0
        self.start()

    def start(self) -> None:
        self._began = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "headrace", *self.words, "--json"],
            stdout=subprocess.PIPE,
            text=True,
        )
        threading.Thread(target=self._read, args=(self.process,), daemon=True).start()

    def _read(self, process: subprocess.Popen[str]) -> None:
        for line in process.stdout or ():
            with contextlib.suppress(ValueError):
                self._on_line(json.loads(line))

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    def restart(self) -> None:
        self.restarts += 1
        self.start()

    def stop(self) -> None:
        """SIGTERM, and SIGKILL for a child that does not listen."""
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class CollectorChild(Child):
    """The collector: started again at once, but not more than a few times a minute."""

    def __init__(self, words: Sequence[str], on_line: Callable[[dict[str, Any]], None]) -> None:
        self._died: deque[float] = deque(maxlen=RESTARTS_A_MINUTE)
        super().__init__(words, on_line)

    def revive(self) -> bool:
        """Start it again if it died; False when it died too often."""
        if not self.ended:
            return True
        now = time.monotonic()
        if len(self._died) == RESTARTS_A_MINUTE and now - self._died[0] < 60.0:
            return False
        self._died.append(now)
        self.restart()
        return True


class Training(Child):
    """The trainer: started again for ever, with back-off until one lasted for a while."""

    def __init__(self, words: Sequence[str], on_line: Callable[[dict[str, Any]], None]) -> None:
        self._backoff = Backoff()
        self._due: float | None = None
        super().__init__(words, on_line)

    def revive(self) -> None:
        """Start it again, if it ended and its time has come."""
        if not self.ended:
            return
        now = time.monotonic()
        if self._due is None:
            if now - self._began >= LASTED_SECONDS:
                self._backoff.reset()
            wait = self._backoff.failed()
            self._due = now + wait
            status = self.process.returncode
            how = f"was killed by signal {-status}" if status < 0 else f"ended with {status}"
            log.error("the trainer (process %d) %s; the next starts in %.1f s; logging goes on",
                      self.process.pid, how, wait)  # fmt: skip
        elif now >= self._due:
            self._due = None
            try:
                self.restart()
            except OSError as error:  # no memory or no process for it: later, perhaps
                wait = self._backoff.failed()
                self._due = now + wait
                log.error("no trainer can be started: %s; tried again in %.1f s", error, wait)


class Up:
    """Both children. `on_line(who, document)` gets what they say: "collect" or "train"."""

    def __init__(
        self,
        root: Path,
        policy_id: str,
        *,
        port: int,
        seed: int,
        steps_per_version: int,
        max_lag: int | None = None,
        on_line: Callable[[str, dict[str, Any]], None],
    ) -> None:
        declare_live(root, policy_id, steps_per_version, max_lag)
        self._told = threading.Event()
        self._on_line = on_line
        self.address = ""
        self._first = ["collect", "--root", str(root), "--port", str(port)]
        self.collector = CollectorChild(self._first, self._collector_says)
        if not self._told.wait(STOP_SECONDS):
            self.collector.stop()
            raise ValueError("the collector did not start; its message stands above")
        own = self.address.rpartition(":")[2]
        self.collector.words[-1] = own  # a restart takes the same port
        words = ["train", "--follow", "--root", str(root), "--policy-id", policy_id]
        words += ["--seed", str(seed), "--steps-per-update", str(steps_per_version)]
        words += [] if max_lag is None else ["--max-lag", str(max_lag)]
        self.trainer = Training(words, lambda said: on_line("train", said))

    def _collector_says(self, said: dict[str, Any]) -> None:
        self.address = said.get("address", self.address)
        self._told.set()
        self._on_line("collect", said)

    def watch(self, stop: threading.Event) -> bool:
        """Keep both running until `stop`; False when the collector died too often."""
        while not stop.wait(0.1):
            if not self.collector.revive():
                return False
            self.trainer.revive()
        return True

    def close(self) -> None:
        """Stop the trainer, then drain the collector."""
        self.trainer.stop()
        self.collector.stop()
