"""A trainer is denied a resource for a while: disk space, descriptors, readable shards, CPU.

Logging must continue meanwhile, except where the collector shares the full disk: then events get
507 until there is space again. Afterwards the same trainer publishes a newer version.

- full, shared_full: `weights/`, or the whole root, lies on a small file system that is really full,
  where one may be mounted
- no_room, shared: no file of the trainer (or also of the collector) can grow: tests.faults.disk
- unreadable: EIO for whatever the trainer opens
- descriptors: EMFILE, by its limit
- stopped: trainer, collector and shard writer are each stopped
"""

from __future__ import annotations

import contextlib
import errno
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeAlias

from tests.faults.disk import Disk
from tests.faults.full_disk import Ballast, small_file_system
from tests.faults.loop import ledger
from tests.faults.loop.running_loop import Loop, no_descriptors, stopped, wait_until
from tests.faults.scenario import Scenario, Trial, Verdict

Fault: TypeAlias = Callable[[Loop], contextlib.AbstractContextManager[None]]
PATIENCE = 90.0
TMPFS_BYTES = 4_000_000
SHARED_BYTES = 24_000_000


def run(trial: Trial) -> Verdict:
    verdict = Verdict()
    for name, inside, size in (("full", "weights", TMPFS_BYTES), ("shared_full", "", SHARED_BYTES)):
        folder = trial.folder / name
        place = folder / "root" / inside
        with small_file_system(place, size) as mounted:
            verdict.counts["small_file_system"] = mounted
            if mounted:
                fill = Ballast(place).fill
                with Loop(replace(trial, folder=folder)) as loop:
                    _in_turn(loop, {name: lambda _, fill=fill: _while(fill)}, 1, verdict)
    folder = trial.folder / "beside"
    disk = Disk.create(folder / "root")
    with Loop(replace(trial, folder=folder), env=disk.environment, collector_env={}) as loop:
        faults = {
            "no_room": lambda _: _while(disk.fill),
            "unreadable": lambda _: _unreadable(disk),
            "descriptors": lambda loop: no_descriptors(_trainer(loop)),
            "trainer_stopped": lambda loop: stopped(_trainer(loop)),
            "collector_stopped": lambda loop: stopped(loop.collector.process.pid),
            "writer_stopped": lambda loop: stopped(loop.collector.writer_pid() or 0),
        }
        _in_turn(loop, faults, trial.size, verdict)
    folder = trial.folder / "shared"
    disk = Disk.create(folder / "root")
    with Loop(replace(trial, folder=folder), env=disk.environment) as loop:
        _in_turn(loop, {"shared": lambda _: _while(disk.fill)}, 1, verdict)
    return verdict


def _in_turn(loop: Loop, faults: dict[str, Fault], turns: int, verdict: Verdict) -> None:
    """Apply each fault several times to one trainer, which has to survive all of them."""
    before = dict(verdict.counts)
    trainer = loop.start_trainer()
    verdict.require(loop.wait_for_version(2), "stuck", "no version before any fault")
    for _ in range(turns):
        for name, fault in faults.items():
            if not loop.trial.in_time or loop.trial.is_caught(verdict):
                break
            _suffer(loop, name, fault, verdict)
            alive = trainer.alive
            verdict.require(alive, "ended", f"{name}: by itself: {trainer.complaint()}")
            if not alive:
                return
            _catch_up(loop, name, verdict)
            version = loop.live_version()
            came = loop.wait_for_version(version + 1)
            verdict.require(came, "stuck", f"{name}: is over, and no version follows {version}")
    loop.judge(verdict)
    for count in ("acknowledged", "stored", "lost", "doubled", "trained", "excluded", "versions"):
        verdict.counts[count] = verdict.counts.get(count, 0) + before.get(count, 0)


def _catch_up(loop: Loop, name: str, verdict: Verdict) -> None:
    """Check that the surviving trainer reads all shards written so far."""
    there = {path.name for path in loop.shards()}

    def behind() -> bool:
        stored = [one for one in ledger.rows_at_rest(loop.root) if one.shard in there and one.mine]
        unread = ledger.unread_of(ledger.position_of(loop.root), ledger.parts_of(stored))
        return unread.isdisjoint(one.row for one in stored)

    text = f"{name}: is over, and rows of that time are read by nobody"
    verdict.require(wait_until(behind, PATIENCE), "left_behind", text)


def _suffer(loop: Loop, name: str, fault: Fault, verdict: Verdict) -> None:
    """Apply a fault for about a second; report for how long logging was refused."""
    since: float | None = None  # when the first event was refused
    shared = name.startswith("shared")
    with fault(loop):
        began = time.monotonic()
        while time.monotonic() - began < 1.0:
            status = 0 if name == "collector_stopped" else _probe(loop)
            since = time.monotonic() if since is None and status != 201 else since
            known = (201, 507) if shared else (201,)
            sound = name.endswith("_stopped") or status in known
            verdict.require(sound, "refused", f"{name}: an event is answered with {status}")
            threading.Event().wait(0.02)
    taken = wait_until(lambda: _probe(loop) == 201, PATIENCE)
    verdict.require(taken, "not_resumed", f"{name}: is over, and no event is taken")
    verdict.count(name)
    verdict.count(f"{name}_refused_seconds", 0.0 if since is None else time.monotonic() - since)


def _probe(loop: Loop) -> int:
    """The status of a small request that has to reach the disk."""
    return loop.collector.post("/v1/instances")[0]


@contextlib.contextmanager
def _while(switch: Callable[[bool], None]) -> Iterator[None]:
    switch(True)
    try:
        yield
    finally:
        switch(False)


@contextlib.contextmanager
def _unreadable(disk: Disk) -> Iterator[None]:
    disk.fail("trainer", "open", 1, errno.EIO, 10**9)
    try:
        yield
    finally:
        disk.disarm()


def _trainer(loop: Loop) -> int:
    if loop.trainer is None:
        raise RuntimeError("no trainer was started")
    return loop.trainer.pid


SCENARIO = Scenario(
    name="starved",
    law="a full disk, an error of input, missing descriptors and a stop are waited out by the "
    "trainer, and nobody who logs hears of them",
    unit="turns",
    quick=1,
    long=10,
    planted=1,
    run=run,
    seconds=90.0,
)
