"""Random histories of publications by a trainer and by people, with restores and kills.

Each history is one policy's store, two collectors that follow it and a client of each, on a
simulated clock. Backups of `weights/` are made and restored; collectors are killed and restarted.
At each moment a number names one content, a rollback holds until it is resumed, no collector or
client returns to an older generation of the same store by itself, and a collector is registered
exactly while it lives. A version made live is durable when the call returns: every file was synced
before its name was created, and every folder after.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from ingest.collector.weight_follower import WeightFollower
from storage.errors import GenerationConflict, PolicyPinned, WeightsNotFound
from storage.weights.manifest import Live, Manifest
from storage.weights.served import REGISTERED_SECONDS
from storage.weights.store import WeightFolder
from tests.faults.scenario import Scenario, Trial, Verdict

TURNS = 40
NOON = 1_700_000_000.0
TURN_SECONDS = 4.0


class Syncs:
    """Tracks syncs instead of waiting for a disk: `loose` names what a power cut could remove."""

    def __init__(self) -> None:
        self.loose: set[str] = set()
        self._files: set[int] = set()  # inodes of files that were synced

    @contextlib.contextmanager
    def watched(self, root: Path) -> Iterator[None]:
        """Track this process's calls under a folder."""
        before = {name: getattr(os, name) for name in ("fsync", "rename", "replace")}
        inside = f"{root}{os.sep}"

        def fsync(fd: int) -> None:
            path = os.readlink(f"/proc/self/fd/{fd}")
            self._files.add(os.fstat(fd).st_ino)
            self.loose -= {name for name in self.loose if os.path.dirname(name) == path}

        def moved(call: Callable[..., None]) -> Callable[..., None]:
            def move(source: Any, target: Any) -> None:
                call(source, target)
                name = os.fspath(target)
                if name.startswith(inside) and not name.endswith(".tmp"):
                    self._note(name)

            return move

        try:
            os.fsync = fsync
            os.rename, os.replace = moved(before["rename"]), moved(before["replace"])
            yield
        finally:
            for name, call in before.items():
                setattr(os, name, call)

    def _note(self, name: str) -> None:
        self.loose.add(name)
        files = [Path(name)] if os.path.isfile(name) else list(Path(name).iterdir())
        for file in files:
            if file.stat().st_ino not in self._files:
                self.loose.add(f"{file}/content")


@dataclass
class Watcher:
    """A collector and its client: a follower, when it was last alive, and all that it served."""

    follower: WeightFollower[int]
    alive: bool = True
    died: float = float("-inf")
    acted: list[tuple[str, int]] = field(default_factory=list)


class History:
    """One policy under `root`."""

    def __init__(self, root: Path, seed: int, verdict: Verdict) -> None:
        self.root, self.seed, self.verdict = root, seed, verdict
        self.chance = Random(seed)
        self.now, self.value = 0.0, 0.0
        self.syncs = Syncs()
        self.named: dict[int, str] = {}
        self.watchers = [self._watcher(name) for name in ("aaaa", "bbbb")]

    @property
    def store(self) -> WeightFolder:
        return WeightFolder(
            self.root, "default", check=lambda candidate, weights: None, clock=self._wall
        )

    def _wall(self) -> float:
        return NOON + self.now

    def _watcher(self, name: str) -> Watcher:
        follower = WeightFollower(self.store, _number, monotonic=lambda: self.now, clock=self._wall)
        follower.collector_id = name
        return Watcher(follower)

    def run(self) -> None:
        weighed = [(self.publish, 8), (self.roll_back, 2), (self.resume, 2), (self.back_up, 1)]
        weighed += [(self.restore, 1), (self.kill, 1), (self.wait, 2)]
        deeds, weights = zip(*weighed, strict=True)
        with self.syncs.watched(self.root):
            for _ in range(TURNS):
                self.chance.choices(deeds, weights)[0]()
                self.now += self.chance.random() * TURN_SECONDS
                self.look()
                self.judge()

    # what happens

    def publish(self) -> None:
        self.value += 1.0
        store = self.store
        before = store.live()
        weights = {"w": np.array([self.value])}
        digest = store.add_candidate(weights, spec={}, metrics={}, lineage={})
        with contextlib.suppress(PolicyPinned, GenerationConflict):
            live = store.publish(digest)
            self.verdict.count("published")
            held = before is not None and before.pinned is not None
            self.verdict.require(not held, "undone", f"{self.seed}: {before} became {live}")
        self._require_durable("publish")

    def roll_back(self) -> None:
        with contextlib.suppress(WeightsNotFound):
            self.store.rollback(by="a person")
            self.verdict.count("rolled_back")
        self._require_durable("rollback")

    def resume(self) -> None:
        with contextlib.suppress(WeightsNotFound):
            self.store.resume()
        self._require_durable("resume")

    def back_up(self) -> None:
        shutil.rmtree(self.root / "backup", ignore_errors=True)
        if (self.root / "weights").exists():
            shutil.copytree(self.root / "weights", self.root / "backup")

    def restore(self) -> None:
        if (self.root / "backup").exists():
            shutil.rmtree(self.root / "weights", ignore_errors=True)
            shutil.copytree(self.root / "backup", self.root / "weights")
            self.verdict.count("restored")

    def kill(self) -> None:
        """Kill a collector, or restart a killed one."""
        one = self.chance.choice(self.watchers)
        if one.alive:
            one.alive, one.died = False, self.now
        else:
            self.watchers[self.watchers.index(one)] = self._watcher(one.follower.collector_id)

    def wait(self) -> None:
        """Publish nothing for longer than a registration lasts; live collectors poll meanwhile."""
        until = self.now + 2 * REGISTERED_SECONDS
        while self.now < until:
            self.now += TURN_SECONDS
            self.look()
            self.judge()

    def look(self) -> None:
        for one in self.watchers:
            if not one.alive:
                continue
            one.follower.look()
            one.follower.register()
            served = one.follower.served
            if served is not None:
                one.acted.append((served.store_id, served.generation))

    # what has to hold

    def _require_durable(self, what: str) -> None:
        loose = {name.removeprefix(f"{self.root}{os.sep}") for name in self.syncs.loose}
        durable = {name for name in loose if "/served/" not in name}  # written every 10 s
        self.verdict.require(not durable, "undurable", f"{self.seed}: {what}: {durable}")
        self.syncs.loose.clear()

    def judge(self) -> None:
        store = self.store
        for number in store.versions():
            content = store.manifest(number).candidate
            same = self.named.setdefault(number, content) == content
            self.verdict.require(same, "renamed", f"{self.seed}: version {number}")
        for one in self.watchers:
            for (a, before), (b, after) in zip(one.acted, one.acted[1:], strict=False):
                older = a == b and after < before
                self.verdict.require(not older, "older", f"{self.seed}: {before} then {after}")
            del one.acted[:-1]
        self._judge_registered(store, store.live())

    def _judge_registered(self, store: WeightFolder, live: Live | None) -> None:
        if live is None:
            return
        registered = {one.collector_id for one in store.served.registered(self._wall())}
        for one in self.watchers:
            name, there = one.follower.collector_id, one.follower.collector_id in registered
            if one.alive:
                known = there or one.follower.served is None
                self.verdict.require(known, "unregistered", f"{self.seed}: {name} at {self.now}")
            elif self.now - one.died > REGISTERED_SECONDS:
                self.verdict.require(not there, "ghost", f"{self.seed}: {name} at {self.now}")


def _number(manifest: Manifest, data: bytes) -> int:
    return manifest.version


def run(trial: Trial) -> Verdict:
    verdict = Verdict(counts={"histories": 0})
    logging.disable(logging.WARNING)  # each restore is reported
    try:
        with trial.planted():
            while trial.goes_on(verdict.counts["histories"], verdict):
                seed = trial.seed * 1_000_000 + int(verdict.counts["histories"])
                History(trial.folder / str(seed), seed, verdict).run()
                shutil.rmtree(trial.folder / str(seed), ignore_errors=True)
                verdict.count("histories")
    finally:
        logging.disable(logging.NOTSET)
    fewest = min(verdict.counts.get(name, 0) for name in ("published", "rolled_back", "restored"))
    verdict.require(fewest > 0 or trial.is_caught(verdict), "idle", "something never happened")
    return verdict


SCENARIO = Scenario(
    name="publishing",
    law="a version names one content, a rollback holds, and who serves what is known",
    unit="histories",
    quick=60,
    long=2_000,
    planted=60,
    run=run,
)
