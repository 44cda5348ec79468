"""A full disk: events get 507, nothing acknowledged is lost, and service resumes by itself.

Run twice: on a `Disk` that cannot grow and, if this process may mount one, on a small file system
that other files really fill.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import urllib3

from tests.faults.crash import Traffic
from tests.faults.power_loss import DiskTraffic, wait_until
from tests.faults.scenario import Scenario, Trial, Verdict

TMPFS_BYTES = 24_000_000
PATIENCE = 20.0


def run(trial: Trial) -> Verdict:
    verdict = Verdict()
    (trial.folder / "refusing").mkdir()
    with DiskTraffic(replace(trial, folder=trial.folder / "refusing")) as traffic:
        _fill_and_empty(traffic, trial, traffic.disk.fill, verdict)
    with small_file_system(trial.folder / "small" / "root", TMPFS_BYTES) as mounted:
        verdict.counts["small_file_system"] = mounted
        if mounted:
            with Traffic(trial.folder / "small", trial.seed, trial.program) as traffic:
                _fill_and_empty(traffic, trial, Ballast(traffic.root).fill, verdict)
    return verdict


def _fill_and_empty(
    traffic: Traffic, trial: Trial, fill: Callable[[bool], None], verdict: Verdict
) -> None:
    traffic.warm_up()
    for _ in range(trial.size):
        fill(True)
        full = wait_until(lambda: _probe(traffic, verdict) == 507, PATIENCE)
        verdict.require(full, "not_refused", "a full disk was never answered with 507")
        seen = wait_until(lambda: _says_full(traffic, verdict), PATIENCE)
        verdict.require(seen, "not_shown", "the status page does not name the full disk")
        fill(False)
        free = wait_until(lambda: _probe(traffic, verdict) == 200, PATIENCE)
        verdict.require(free, "not_resumed", "there is room, and no event is accepted")
        verdict.count("fillings")
    alive = traffic.collector.process.poll() is None
    verdict.require(alive, "ended", "the collector ended")
    if alive:
        status = traffic.settle()
        verdict.require(status == 0, "drain", f"expected exit status 0, got {status}")
    before = dict(verdict.counts)
    traffic.account().judge(verdict)
    for name in ("acknowledged", "stored", "lost", "doubled"):
        verdict.counts[name] += before.get(name, 0)


def _probe(traffic: Traffic, verdict: Verdict) -> int:
    """The status of a small request that has to reach the disk."""
    try:
        status, body = traffic.collector.post("/v1/instances")
    except Exception as error:  # any other error counts as no answer
        verdict.require(False, "unanswered", repr(error))
        return 0
    verdict.require(status in (200, 201, 429, 507), "status", f"{status}: {body}")
    verdict.count(f"answers_{status}")
    return 200 if status == 201 else status


def _says_full(traffic: Traffic, verdict: Verdict) -> bool:
    """Whether the status page does, after another request that has to reach the disk."""
    _probe(traffic, verdict)
    page: bytes = urllib3.request("GET", traffic.collector.address, retries=False).data
    return b"No, the disk is full" in page and b"The disk had no space" in page


class Ballast:
    """A file that fills its file system."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "ballast"

    def fill(self, full: bool) -> None:
        if not full:
            self._path.unlink()
            return
        with contextlib.suppress(OSError), self._path.open("wb", buffering=0) as file:
            while file.write(bytes(4096)):
                continue


@contextlib.contextmanager
def small_file_system(folder: Path, size: int) -> Iterator[bool]:
    """Mount a small file system on a folder; False if this process may not mount."""
    folder.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        done = False
    try:
        yield done
    finally:
        if done:
            subprocess.run(["umount", str(folder)], check=True)


SCENARIO = Scenario(
    name="full_disk",
    law="a full disk is answered with 507 and loses nothing, and needs no restart",
    unit="fillings",
    quick=3,
    long=20,
    planted=1,
    run=run,
)
