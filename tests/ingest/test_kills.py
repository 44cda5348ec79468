"""SIGKILL of the collector, its writer and its clients in the middle of traffic.

No acknowledged step is lost and none is doubled. The same check on collectors with a planted fault
must find the fault.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.collector_process import CollectorProcess, declare

ROOT = Path(__file__).parents[2]
SETTLE_SECONDS = 30.0


@dataclass
class Account:
    """What clients noted, against what is in shards; steps are named by their rewards."""

    sent: Counter[float] = field(default_factory=Counter)
    acknowledged: Counter[float] = field(default_factory=Counter)
    stored: Counter[float] = field(default_factory=Counter)
    refused: list[object] = field(default_factory=list)

    @classmethod
    def of(cls, root: Path, notes: Sequence[Path]) -> Account:
        account = cls()
        for path in notes:
            lines = path.read_text().splitlines() if path.exists() else []
            for line in lines:
                for what, items in json.loads(line).items():
                    if what == "refused":
                        account.refused.extend(items)
                    else:
                        getattr(account, what).update(items)
        for path in root.glob("shards/*/*.parquet"):
            account.stored.update(pq.read_table(path, columns=["rewards"])[0].to_pylist())
        return account

    @property
    def lost(self) -> list[float]:
        return [step for step in self.acknowledged if step not in self.stored]

    @property
    def doubled(self) -> list[float]:
        return [step for step, count in self.stored.items() if count > 1]

    @property
    def unknown(self) -> list[float]:
        return [step for step in self.stored if step not in self.sent]


class Traffic:
    """A collector under two clients; a killed client is replaced by a new one."""

    def __init__(self, folder: Path, seed: int, program: Sequence[str]) -> None:
        self.root, self._folder = folder / "root", folder
        declare(self.root, part_steps=3, seal_seconds=0.3, episode_timeout=2.0)
        self._random = random.Random(seed)
        self._stack = ExitStack()
        self.collector = self._stack.enter_context(CollectorProcess(self.root, program=program))
        self._notes: list[Path] = []
        self._clients = [self._client(), self._client()]

    def _client(self) -> subprocess.Popen[bytes]:
        number = len(self._notes) + 1
        self._notes.append(self._folder / f"notes-{number}")
        command = [sys.executable, "-m", "tests.ingest.logging_client", self.collector.address]
        command += [str(self._notes[-1]), str(number), str(self._folder / "stop")]
        client = subprocess.Popen(command, cwd=ROOT)
        self._stack.callback(_end, client)
        return client

    def kill(self, target: str, after: tuple[float, float] = (0.05, 0.5)) -> None:
        """SIGKILL after so many seconds of traffic, at random within the two."""
        threading.Event().wait(self._random.uniform(*after))
        if target == "collector":
            self.collector.kill()
            self.collector.restart()
        elif target == "writer":
            pid = self.collector.writer_pid()
            if pid is not None:
                os.kill(pid, signal.SIGKILL)
        else:
            at = self._random.randrange(len(self._clients))
            _end(self._clients[at])
            self._clients[at] = self._client()

    def account(self) -> Account:
        """Let clients end what they began, let the rest be abandoned, drain, and compare."""
        (self._folder / "stop").touch()
        for client in self._clients:
            client.wait(SETTLE_SECONDS)
        for _ in range(int(SETTLE_SECONDS / 0.1)):
            if self.collector.get("/readyz")[1]["episodes_open"] == 0:
                break
            threading.Event().wait(0.1)
        assert self.collector.stop() == 0
        return Account.of(self.root, self._notes)

    def __enter__(self) -> Traffic:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def test_twenty_kills_lose_and_double_nothing(tmp_path: Path) -> None:
    """Kills of collector, writer and clients: all that was acknowledged is there exactly once."""
    targets = ["collector"] * 8 + ["writer"] * 6 + ["client"] * 6
    random.Random(7).shuffle(targets)
    with Traffic(tmp_path, 7, ["-m", "ingest"]) as traffic:
        for target in targets:
            traffic.kill(target)
        account = traffic.account()
    assert (account.lost, account.doubled, account.unknown) == ([], [], [])
    assert account.refused == []
    assert len(account.acknowledged) > 200


@pytest.mark.parametrize(
    ("fault", "symptom"),
    [
        ("acknowledge-early", "lost"),
        ("record-early", "lost"),
        ("forget-numbers", "doubled"),
    ],
)
def test_the_check_finds_a_planted_fault(tmp_path: Path, fault: str, symptom: str) -> None:
    """The same traffic and kills on a broken collector: the account must show it."""
    with Traffic(tmp_path, 3, ["-m", "tests.ingest.broken_collector", fault]) as traffic:
        for _ in range(2):
            traffic.kill("collector", after=(0.5, 0.9))
        account = traffic.account()
    assert getattr(account, symptom)
