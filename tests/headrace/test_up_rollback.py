"""A rollback under a running `headrace up` holds until `headrace resume`."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np

from ingest.client.policy_client import PolicyClient
from policy.inference.weight_store import WeightStore
from tests.headrace.command import ROOT, answer, headrace

QUOTA = 32
UPDATES = 12  # more than lie between two checkpoints, with which a candidate is kept
TRIES = 3000


class Running:
    """`headrace up` as a process, and the output of its children."""

    def __init__(self, root: Path) -> None:
        words = ["up", "--root", str(root), "--port", "0", "--steps-per-version", str(QUOTA)]
        words += ["--observation", "box:4", "--action", "discrete:2", "--json"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "headrace", *words], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        self.address, self.updates = "", 0
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stdout or ():
            message = json.loads(line)
            self.address = message.get("collect", {}).get("address", self.address)
            self.updates = int(message.get("train", {}).get("update", self.updates))

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        status = self.process.wait(60)
        self._reader.join()
        if self.process.stdout is not None:
            self.process.stdout.close()
        return status


def until(holds: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(TRIES):
        if holds():
            return
        pause.wait(0.05)
    raise AssertionError("it never held")


def test_a_rollback_under_a_running_trainer_holds(tmp_path: Path) -> None:
    """After a dozen further updates that content is still served, and no client was held.

    The trainer's candidates are kept; after `resume` it publishes again.
    """
    store, over, rng = WeightStore(tmp_path, "default"), threading.Event(), np.random.default_rng(1)
    up = Running(tmp_path)
    clients: list[PolicyClient] = []

    def play() -> None:
        with PolicyClient(up.address) as client:
            clients.append(client)
            while not over.is_set():
                episode = client.start_episode()
                for _ in range(QUOTA):
                    client.get_action(episode, rng.standard_normal(4))
                    client.log_returns(episode, 1.0)
                client.end_episode(episode)

    def version() -> int:
        live = store.live()
        return 0 if live is None else live.version

    player = threading.Thread(target=play)
    try:
        until(lambda: bool(up.address) and version() > 0)
        player.start()
        until(lambda: version() >= 3)
        back = answer(headrace("rollback", "--root", tmp_path, "--json", "--why", "worse"))
        assert back["served"]["state"] == "served"
        content = store.manifest(back["version"]).candidate
        until(lambda: clients[0].acting_version() == back["version"])
        known, held = up.updates, clients[0]._actor.holds
        until(lambda: up.updates >= known + UPDATES)
        live = store.live()
        assert live is not None
        assert (live.version, store.manifest(live.version).candidate) == (back["version"], content)
        assert live.pinned is not None
        (served,) = store.served.read()
        assert served.version == clients[0].acting_version() == back["version"]
        assert clients[0]._actor.holds == held
        promoted = {store.manifest(n).candidate for n in store.versions()}
        assert set(store.candidates()) - promoted, "the trainer kept no candidate"
        assert headrace("resume", "--root", tmp_path).returncode == 0
        until(lambda: version() > back["version"])
    finally:
        over.set()
        if player.ident is not None:
            player.join()
        status = up.stop()
    assert status == 0
