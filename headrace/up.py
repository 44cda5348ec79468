"""`headrace up`: a collector and its trainer as two processes, which are restarted if they die.

The collector keeps its port, so that clients find it again. If it dies more than a few times within
a minute, both processes stop, and the exit status is 1. A trainer that ends for any reason is
restarted with back-off, without a limit, so that trouble with training never stops logging.
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

from ingest.server.listening import ServeError
from storage.declarations.declaration import PolicyDeclaration
from storage.declarations.policy_files import load_declarations, save_declaration
from storage.system.backoff import Backoff

log = logging.getLogger("headrace.up")

RESTARTS_A_MINUTE = 5
LASTED_SECONDS = 60.0  # a trainer that ran this long did not fail at its start
STOP_SECONDS = 30.0


def declare_live(
    root: Path, policy_id: str, steps_per_version: int, max_lag: int | None = None
) -> PolicyDeclaration:
    """Set flow control, small parts and quick shards for a declared policy."""
    declared = load_declarations(root).get(policy_id)
    if declared is None:
        raise ValueError(
            f"{root}: no policy {policy_id!r} is declared: pass --observation and --action, --env "
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


def require_settings(words: Sequence[str]) -> None:
    """Raise ValueError unless a trainer can use these options; its message is in the error.

    A process of its own loads torch for that, which the collector and this process do without.
    """
    if not words:
        return
    command = [sys.executable, "-P", "-m", "headrace", "train", "--follow", "--show-settings"]
    done = subprocess.run([*command, *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(done.stderr.strip().removeprefix("headrace: "))


class Child:
    """A headrace command that is kept running; its JSON lines are passed to `on_line`."""

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
        """Send SIGTERM, then SIGKILL if the child does not end."""
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class CollectorChild(Child):
    """The collector: restarted at once, but at most a few times a minute."""

    def __init__(self, words: Sequence[str], on_line: Callable[[dict[str, Any]], None]) -> None:
        self._died: deque[float] = deque(maxlen=RESTARTS_A_MINUTE)
        super().__init__(words, on_line)

    def revive(self) -> bool:
        """Restart it if it died; return False if it died too often."""
        if not self.ended:
            return True
        now = time.monotonic()
        if len(self._died) == RESTARTS_A_MINUTE and now - self._died[0] < 60.0:
            return False
        self._died.append(now)
        self.restart()
        return True


class Training(Child):
    """The trainer: restarted without a limit, with back-off until one ran for a while."""

    def __init__(self, words: Sequence[str], on_line: Callable[[dict[str, Any]], None]) -> None:
        self._failures = 0
        self._due: float | None = None
        super().__init__(words, on_line)

    def revive(self) -> None:
        """Restart it if it ended and the back-off is over."""
        if not self.ended:
            return
        now = time.monotonic()
        if self._due is None:
            if now - self._began >= LASTED_SECONDS:
                self._failures = 0
            wait = self._put_off(now)
            status = self.process.returncode
            how = f"was killed by signal {-status}" if status < 0 else f"ended with {status}"
            log.error("the trainer (process %d) %s; the next starts in %.1f s; logging continues",
                      self.process.pid, how, wait)  # fmt: skip
        elif now >= self._due:
            self._due = None
            try:
                self.restart()
            except OSError as error:  # out of memory or processes: try again later
                wait = self._put_off(now)
                log.error("no trainer can be started: %s; trying again in %.1f s", error, wait)

    def _put_off(self, now: float) -> float:
        self._failures += 1
        wait = Backoff().delay(self._failures)
        self._due = now + wait
        return wait


class Up:
    """Both children. `on_line(who, document)` gets their output; `who` is "collect" or "train".

    `settings` are options of `train` that choose the algorithm and its settings.
    """

    def __init__(
        self,
        root: Path,
        policy_id: str,
        *,
        port: int,
        seed: int,
        steps_per_version: int,
        max_lag: int | None = None,
        settings: Sequence[str] = (),
        on_line: Callable[[str, dict[str, Any]], None],
    ) -> None:
        declare_live(root, policy_id, steps_per_version, max_lag)
        self._listening = threading.Event()
        self._on_line = on_line
        self.address = ""
        self._first = ["collect", "--root", str(root), "--port", str(port)]
        self.collector = CollectorChild(self._first, self._collector_says)
        due = time.monotonic() + STOP_SECONDS
        while not (self._listening.wait(0.05) or self.collector.ended or time.monotonic() > due):
            pass
        if not self._listening.is_set():
            self.collector.stop()
            status = max(self.collector.process.returncode, 1)
            raise ServeError("the collector did not start; its message is above", status)
        own = self.address.rpartition(":")[2]
        self.collector.words[-1] = own  # a restart uses the same port
        words = ["train", "--follow", "--root", str(root), "--policy-id", policy_id]
        words += ["--seed", str(seed), "--steps-per-update", str(steps_per_version)]
        words += [] if max_lag is None else ["--max-lag", str(max_lag)]
        words += settings
        self.trainer = Training(words, lambda message: on_line("train", message))

    def _collector_says(self, message: dict[str, Any]) -> None:
        self.address = message.get("address", self.address)
        self._listening.set()
        self._on_line("collect", message)

    def watch(self, stop: threading.Event) -> bool:
        """Keep both running until `stop`; return False if the collector died too often."""
        while not stop.wait(0.1):
            if not self.collector.revive():
                return False
            self.trainer.revive()
        return True

    def close(self) -> None:
        """Stop the trainer, then drain the collector."""
        self.trainer.stop()
        self.collector.stop()
