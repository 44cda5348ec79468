"""`headrace up` with players, as processes: its output, and child processes to kill or stop."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import urllib3

from tests.closing import Closing

ROOT = Path(__file__).parents[2]
DEADLINE = 120.0  # s; only a limit: a longer wait is a failure


class LiveLoop(Closing):
    """A collector, its trainer and clients that play CartPole."""

    def __init__(self, root: Path, *words: str, players: int = 1, cwd: Path = ROOT) -> None:
        self.root, self.condition = root, threading.Condition()
        self.address, self.versions = "", [0]
        self.began = -1
        self.updates: list[dict[str, Any]] = []
        self.times: dict[int, float] = {}
        program = Path(sys.executable).with_name("headrace")
        self.players: list[subprocess.Popen[bytes]] = []
        self._log = (root.parent / f"{root.name}.stderr").open("w+")
        command = ["up", "--root", str(root), "--env", "CartPole-v1", "--port", "0", "--json"]
        self.process = subprocess.Popen(
            [program, *command, *words],
            cwd=cwd, stdout=subprocess.PIPE, stderr=self._log, text=True,
        )  # fmt: skip
        threading.Thread(target=self._read, daemon=True).start()
        self.wait(lambda: bool(self.address))
        for _ in range(players):
            self.play()

    def play(self) -> None:
        """Start a player, with a seed of its own."""
        seed = 1000 * (len(self.players) + 1)
        self.players.append(
            subprocess.Popen(
                [sys.executable, "-m", "headrace.demo.play", self.address, "CartPole-v1",
                 "--seats", "4", "--seed", str(seed)],
                cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )
        )  # fmt: skip

    def _read(self) -> None:
        for line in self.process.stdout or ():
            with contextlib.suppress(ValueError), self.condition:
                document = json.loads(line)
                self.address = document.get("collect", {}).get("address", self.address)
                train = document.get("train", {})
                self.began = train.get("start_version", self.began)
                if "version" in train:
                    self.updates.append(train)
                    self.times[int(train["version"])] = time.monotonic()
                self.condition.notify_all()

    @property
    def version(self) -> int:
        return int(self.updates[-1]["version"]) if self.updates else 0

    def wait(self, holds: Callable[[], bool]) -> None:
        """Wait until a condition holds. Raises TimeoutError with the content of stderr."""
        end = time.monotonic() + DEADLINE
        with self.condition:
            while not holds():
                if time.monotonic() > end or self.process.poll() is not None:
                    raise TimeoutError(f"version {self.version}; stderr: {self.stderr()[-4000:]}")
                self.condition.wait(0.05)

    def stderr(self) -> str:
        return Path(self._log.name).read_text()

    def child(self, word: str) -> int:
        """The process id of collector ("collect") or trainer ("train"); 0 during a restart."""
        for path in Path(f"/proc/{self.process.pid}/task").glob("*/children"):
            for pid in path.read_text().split():
                with contextlib.suppress(OSError):
                    if word in Path(f"/proc/{pid}/cmdline").read_text().split("\0"):
                        return int(pid)
        return 0

    def metric(self, name: str, **labels: str) -> float:
        """A sample of /metrics; -1 if it is missing."""
        text = urllib3.request("GET", f"{self.address}/metrics", retries=False).data.decode()
        for line in text.splitlines():
            if re.match(rf"{name}(\{{|\s)", line) and all(
                f'{key}="{value}"' in line for key, value in labels.items()
            ):
                return float(line.rpartition(" ")[2])
        return -1.0

    def _settled(self) -> bool:
        """Whether clients wait, and all their steps are in shards."""
        held = self.metric("headrace_policy_held", policy="default") == 1
        return held and self.metric("headrace_pending_bytes") == 0

    def damage_an_unread_shard(self) -> tuple[int, int]:
        """Stop the trainer, flip a byte in each shard written meanwhile, and let it continue.

        Return the version that is held then, and the number of damaged shards.
        """
        pause = threading.Event()
        while True:
            trainer = self.child("train")
            os.kill(trainer, signal.SIGSTOP)
            try:
                before = set(self.root.glob("shards/*/*.parquet"))  # it may have read these
                end = time.monotonic() + DEADLINE
                while not self._settled():
                    if time.monotonic() > end:
                        raise TimeoutError(f"nothing is held: {self.stderr()[-4000:]}")
                    pause.wait(0.02)
                fresh = set(self.root.glob("shards/*/*.parquet")) - before
                for path in fresh:
                    data = bytearray(path.read_bytes())
                    data[len(data) // 2] ^= 1
                    path.write_bytes(bytes(data))
                held = int(self.metric("headrace_live_version", policy="default"))
            finally:
                self.resumed = time.monotonic()
                os.kill(trainer, signal.SIGCONT)
            if fresh:
                return held, len(fresh)
            pause.wait(0.3)

    def stop(self) -> int:
        """End the players, then `up`; its exit status."""
        for player in self.players:
            player.terminate()
        for player in self.players:
            player.wait(60)
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(90)

    def close(self) -> None:
        for process in (*self.players, self.process):
            if process.poll() is None:
                process.kill()
            process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
        self._log.close()
