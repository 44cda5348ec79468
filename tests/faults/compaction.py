"""`headrace compact` beside a collector, its clients and a follower, all killed at random.

Every acknowledged step is stored once and the follower has each row once. A shard can be read by
its old name during its grace period. New shards have all values of the old ones, and `verify`
agrees at the end.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from headrace import __name__ as HEADRACE
from storage.objects.folder import FolderObjects
from storage.reading.shard_reader import ShardReader
from storage.reading.sources import DirectorySource
from storage.shards.replacements import REPLACED, Replacements
from tests.faults.crash import ROOT, Traffic, judge_root
from tests.faults.scenario import Scenario, Trial, Verdict

PATIENCE = 60.0
LATEST_KILL = 0.3  # s after the application has begun
KILLED = -9


class Follower:
    """A process that follows the shards and stores what it has read with its position."""

    def __init__(self, trial: Trial, root: Path) -> None:
        self.file = trial.folder / "read"
        self._words = [str(root), str(self.file), trial.mutant.name if trial.mutant else ""]
        self._start()

    def _start(self) -> None:
        command = [sys.executable, "-m", "tests.faults.loop.following_reader", *self._words]
        self._process = subprocess.Popen(command, cwd=ROOT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def restart(self) -> None:
        self.kill()
        self._start()

    def rows(self) -> Counter[tuple[str, int, int]]:
        known = json.loads(self.file.read_bytes())["rows"] if self.file.exists() else []
        return Counter((str(stream), int(ordinal), int(t)) for stream, ordinal, t in known)


def run(trial: Trial) -> Verdict:
    verdict, chance = Verdict(), random.Random(trial.seed)
    with Traffic(trial.folder, trial.seed, None) as traffic:
        traffic.warm_up()
        follower = Follower(trial, traffic.root)
        try:
            while trial.goes_on(verdict.counts.get("applications", 0), verdict):
                traffic.wait_for_shards()
                if chance.random() < 0.3:
                    _verify_beside(trial, traffic.root, verdict)
                _apply(trial, traffic.root, verdict, chance.uniform(0.0, LATEST_KILL))
                if chance.random() < 0.3:
                    follower.restart()
                    verdict.count("follower_kills")
                if chance.random() < 0.3:
                    traffic.kill(chance.choice(("collector", "writer")))
                    verdict.count("collector_kills")
            _apply(trial, traffic.root, verdict, None)
            verdict.require(traffic.settle() == 0, "drain", "expected exit status 0")
            _apply(trial, traffic.root, verdict, None)
            _judge_follower(follower, traffic.root, verdict)
        finally:
            follower.kill()
        traffic.account().judge(verdict)
    _judge_values(traffic.root, verdict)
    judge_root(traffic.root, verdict)
    return verdict


def _apply(trial: Trial, root: Path, verdict: Verdict, kill_after: float | None) -> None:
    """Make a plan and apply it; SIGKILL so many seconds after it was made, or never."""
    command = [sys.executable, "-m", HEADRACE]
    if trial.mutant:
        command = [sys.executable, "-m", "tests.faults.launcher", trial.mutant.name, HEADRACE]
    command += ["compact", "--root", str(root), "--apply", "new", "--json"]
    plans = set(root.glob("maintenance/*/plan.json"))
    with DirectorySource(root) as source:
        listed = source.scan()
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        end = time.monotonic() + PATIENCE
        while process.poll() is None and set(root.glob("maintenance/*/plan.json")) == plans:
            if time.monotonic() > end:
                break
            threading.Event().wait(0.01)
        if kill_after is not None:
            threading.Event().wait(kill_after)
            process.kill()
        out, _ = process.communicate(timeout=PATIENCE)
        verdict.count("kills" if process.returncode == KILLED else "whole_applications")
        verdict.count("applications")
        good = process.returncode in (0, KILLED)
        verdict.require(good, "refused", f"status {process.returncode}: {out}")
        for shard in listed:
            try:
                source.read(shard)
            except FileNotFoundError as error:
                verdict.require(False, "gone", error)


def _verify_beside(trial: Trial, root: Path, verdict: Verdict) -> None:
    """`headrace verify` finds nothing while shards are replaced."""
    with ThreadPoolExecutor(1) as pool:
        applying = pool.submit(_apply, trial, root, verdict, None)
        judge_root(root, verdict)
        applying.result()
    verdict.count("verified_beside")


def _judge_follower(follower: Follower, root: Path, verdict: Verdict) -> None:
    """Once it has had the time, the follower has every row once."""
    columns = ["stream", "ordinal", "t"]
    with ShardReader(root, batch_size=500, columns=columns, training_disabled=True) as reader:
        wanted = Counter(
            row for b in reader for row in zip(*(b[name].tolist() for name in columns), strict=True)
        )
    end = time.monotonic() + PATIENCE
    while (found := follower.rows()) != wanted and time.monotonic() < end:
        if found - wanted:
            break
        threading.Event().wait(0.1)
    verdict.counts["followed"] = found.total()
    verdict.require(not wanted - found, "unread", list(wanted - found)[:3])
    verdict.require(not found - wanted, "read_twice", list(found - wanted)[:3])


def _judge_values(root: Path, verdict: Verdict) -> None:
    """Each new shard has the values of the old ones, read by Arrow alone."""
    for made in Replacements.of(FolderObjects(root)).made.values():
        folder = root / "shards" / made.stream
        new = [path for end in ("", REPLACED) if (path := folder / (made.new + end)).exists()]
        old = [folder / (name + REPLACED) for name in made.old]
        if not new or not all(path.exists() for path in old):
            continue  # a record without its shard, or shards whose grace period is over
        verdict.count("new_shards")
        verdict.count("old_shards", len(old))
        same = pq.read_table(new[0]).equals(pa.concat_tables(map(pq.read_table, old)))
        verdict.require(same, "differs", msgspec.to_builtins(made))


SCENARIO = Scenario(
    name="compaction",
    law="compaction, killed at any moment, loses and doubles no row, for readers that follow "
    "and for the account",
    unit="applications",
    quick=8,
    long=40,
    planted=4,
    seconds=60.0,
    run=run,
)
