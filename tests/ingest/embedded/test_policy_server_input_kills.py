"""SIGKILL of a trainer that hosts its collector: with its checkpoint, every step is read once."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import pytest

from ingest.server.listening import bind
from ingest.server.options import Listening
from tests.faults.account import Account

ROOT = Path(__file__).parents[3]
SETTLE_SECONDS = 120.0


class Trainer:
    """The trainer's process, started again after each kill on the same port."""

    def __init__(self, folder: Path, kind: str) -> None:
        with bind(Listening(port=0)) as free:
            port = str(free.getsockname()[1])
        self.root, self.checkpoint = folder / "root", folder / "checkpoint"
        words = [str(self.root), port, str(self.checkpoint), *([kind] if kind else [])]
        self._command = [sys.executable, "-m", "tests.ingest.killed_trainer", *words]
        self.address = f"http://127.0.0.1:{port}"
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(
            self._command,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        if self.process.stdout is None or not self.process.stdout.readline().startswith("ready"):
            raise RuntimeError("the trainer did not start")

    def end(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        code = self.process.wait(SETTLE_SECONDS)
        if self.process.stdout is not None:
            self.process.stdout.close()
        return code

    def await_more(self, known: int) -> None:
        """Wait until it has read more than this many steps, so that it is killed under load."""
        for _ in range(int(SETTLE_SECONDS / 0.02)):
            if self.read.total() > known:
                return
            threading.Event().wait(0.02)
        raise TimeoutError(f"{known} steps were read, and no more come")

    @property
    def read(self) -> Counter[float]:
        if not self.checkpoint.exists():
            return Counter()
        return Counter(json.loads(self.checkpoint.read_bytes())["read"])


def traffic(folder: Path, kills: int, kind: str = "") -> tuple[Counter[float], Account]:
    """Two clients log while the trainer is killed: the steps that it read, and the clients'
    account.
    """
    chance, notes = random.Random(7), [folder / "notes-1", folder / "notes-2"]
    with ExitStack() as stack:
        trainer = Trainer(folder, kind)
        stack.callback(lambda: trainer.process.poll() is None and trainer.end(signal.SIGKILL))
        command = [sys.executable, "-m", "tests.faults.logging_client", trainer.address]
        clients = subprocess.Popen([*command, str(folder), "1", "2"], cwd=ROOT)
        stack.callback(clients.wait)
        stack.callback(clients.kill)
        for _ in range(kills):
            trainer.await_more(trainer.read.total())
            threading.Event().wait(chance.uniform(0.0, 0.5))
            trainer.end(signal.SIGKILL)
            trainer.start()
        threading.Event().wait(0.3)
        (folder / "stop").touch()
        clients.wait(SETTLE_SECONDS)
        known = Account.of(trainer.root, notes)
        for _ in range(int(SETTLE_SECONDS / 0.1)):
            if not known.acknowledged - trainer.read:
                break
            threading.Event().wait(0.1)
        assert trainer.end(signal.SIGTERM) == 0
        return trainer.read, Account.of(trainer.root, notes)


def test_every_acknowledged_step_is_read_once_over_kills(tmp_path: Path) -> None:
    """Each acknowledged step is read once, from the queue or from a shard, before or after a
    restart; and it is in one shard."""
    read, account = traffic(tmp_path, kills=2)
    assert len(account.acknowledged) > 30
    assert account.refused == []
    assert read == account.acknowledged == account.stored
    assert set(read.values()) == {1}


@pytest.mark.long
def test_a_trainer_that_forgets_its_position_is_caught(tmp_path: Path) -> None:
    """The check above can fail."""
    read, account = traffic(tmp_path, kills=1, kind="forgetful")
    assert account.lost == account.doubled == []
    assert set(read) == set(account.acknowledged)
    assert max(read.values()) > 1
