"""The disk of a spool: the power is cut, it fills up, it hangs, under two processes that log.

With `spool_sync` a step whose call has returned, and which is not counted as unwritten, survives a
power cut at any moment. While the disk is full, calls raise BufferFull without waiting, and both
processes continue as soon as there is space, whether the collector runs or not. While no write
returns, calls still return. A bit that flips in a file costs the event that it is in, and that is
counted.
"""

from __future__ import annotations

import random
import threading
from dataclasses import replace

from ingest.client.policy_client import PolicyClient
from tests.collector_process import CollectorProcess, declare, shard_rows
from tests.faults.disk import Disk
from tests.faults.power_loss import wait_until
from tests.faults.scenario import Scenario, Trial, Verdict
from tests.faults.spool_kills import OBS, SETTLE_SECONDS, Spooling, longest_call

MOMENTS = (None, "sync", "write", "dirsync", "rename", "create")
"""A call of either process that is never made; None: whenever."""

LATEST = 40
HANG_SECONDS = 3.0
PATIENCE = 20.0
FLIPPED_EPISODES = 20


def run(trial: Trial) -> Verdict:
    verdict, chance = Verdict(), random.Random(trial.seed)
    for name, part in (("power", cut_power), ("full", fill), ("hang", hang)):
        folder = trial.folder / name
        found = Verdict()
        disk = Disk.create(folder / "volume")
        options = {"spool_sync": name == "power"}
        spooling = Spooling(replace(trial, folder=folder), options=options, env=disk.environment)
        try:
            with spooling.collector:
                part(trial, spooling, disk, chance, found)
                disk.disarm()
                spooling.finish(found, power_was_cut=name == "power")
            if name == "hang":
                took = longest_call(folder)
                found.require(took < HANG_SECONDS / 2, "held", f"a call for {took:.2f} s")
        finally:
            spooling.end()
        for count, number in found.counts.items():
            verdict.count(count, number)
        for kind, texts in found.faults.items():
            verdict.faults.setdefault(kind, []).extend(texts)
    flip(trial, chance, verdict)
    return verdict


def cut_power(
    trial: Trial, spooling: Spooling, disk: Disk, chance: random.Random, verdict: Verdict
) -> None:
    """Both processes die with the power; the collector is on another machine, at times absent."""
    for number in range(trial.size):
        if not trial.in_time:
            break
        away = chance.random() < 0.5
        if away:
            spooling.collector.kill()
        moment = MOMENTS[number % len(MOMENTS)]
        if moment is not None:
            kind, latest = moment, LATEST if moment in ("sync", "write") else 2
            disk.fail("collector", kind, chance.randint(1, latest), -1)
        threading.Event().wait(chance.uniform(0.1, 1.0))
        for place in range(2):
            spooling.stop(place)
        disk.disarm()
        report = disk.cut(chance, "nothing" if trial.mutant else None)
        verdict.count("cuts")
        verdict.count("writes_undone", report.writes)
        verdict.count("names_undone", report.names)
        if away:
            spooling.collector.restart()
        for place in range(2):
            spooling.follow(place)


def fill(
    trial: Trial, spooling: Spooling, disk: Disk, chance: random.Random, verdict: Verdict
) -> None:
    """The disk fills up while both log, with and without a kill, or without the collector."""

    def least_size(what: str) -> int:
        files = [spooling.folder / f"{what}-{number}" for number in spooling.numbers]
        return min(path.stat().st_size if path.exists() else 0 for path in files)

    for number in range(max(1, trial.size // 3)):
        away = number % 2 == 1
        if away:
            spooling.collector.kill()
        if number % 3 == 2:
            spooling.kill(chance.randrange(2))
        wait_until(lambda: all(map(spooling.is_logging, range(2))), PATIENCE)
        before = least_size("full")
        disk.fill(True)
        full = wait_until(lambda before=before: least_size("full") > before, PATIENCE)
        verdict.require(full, "not_raised", "no call said that the disk is full")
        if number % 2:
            spooling.kill(chance.randrange(2))
        disk.fill(False)
        before = least_size("notes")
        going_on = wait_until(lambda before=before: least_size("notes") > before, PATIENCE)
        verdict.require(going_on, "not_resumed", "there is room, and no call succeeds")
        verdict.count("fillings")
        if away:
            spooling.collector.restart()


def hang(
    trial: Trial, spooling: Spooling, disk: Disk, chance: random.Random, verdict: Verdict
) -> None:
    """No write returns for a while, with or without a collector. Calls return until memory is full,
    and then raise. One process is killed meanwhile, or once its late events count as written."""
    for number in range(max(1, trial.size // 3)):
        away, place = number % 2 == 0, chance.randrange(2)
        if away:
            spooling.collector.kill()
        wait_until(lambda: all(map(spooling.is_logging, range(2))), PATIENCE)
        disk.hang(True)
        threading.Event().wait(HANG_SECONDS)
        meanwhile = number % 4 > 1
        if meanwhile:
            spooling.stop(place)
        disk.hang(False)
        if meanwhile:
            spooling.follow(place)
        else:
            before = spooling.acknowledged(place)
            wait_until(
                lambda place=place, before=before: spooling.acknowledged(place) > before, PATIENCE
            )
            spooling.kill(place)
        verdict.count("hangs")
        if away:
            spooling.collector.restart()


def flip(trial: Trial, chance: random.Random, verdict: Verdict) -> None:
    """A process spools episodes of one step and is gone; a bit of its file flips; the next process
    delivers what is left, and counts the rest."""
    root, rounds = trial.folder / "flipped", max(1, trial.size)
    declare(root, episode_timeout=2.0)  # for episodes whose end is lost
    lost = 0
    with CollectorProcess(root) as collector, trial.planted():
        options = {"policy_file": root / "policies/default.json", "on_full": "spool"}
        for number in range(rounds):
            spool = trial.folder / f"flipped-{number}"
            earlier = PolicyClient(
                "http://127.0.0.1:9", timeout=0.01, spool_dir=spool, max_wait=PATIENCE, **options
            )
            for place in range(FLIPPED_EPISODES):
                earlier.log_step(OBS, 1, 1.0 + number * FLIPPED_EPISODES + place)
            earlier.close()
            (piece,) = spool.glob("segment-*/0*")
            content = bytearray(piece.read_bytes())
            content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
            piece.write_bytes(content)
            with PolicyClient(collector.address, spool_dir=spool, **options) as client:
                client.flush(SETTLE_SECONDS)
                stats = client.stats
            judged = stats.acknowledged + sum(stats.refused.values())
            verdict.require(judged == 3 * FLIPPED_EPISODES, "uncounted", f"{stats}")
            damaged = stats.refused.get("unreadable", 0)
            verdict.require(damaged <= 1, "lost", f"{damaged} events by one flipped bit")
            kept = [path.read_bytes() for path in spool.glob("damaged-*")]
            verdict.require(kept == [content] or not damaged, "removed", f"{piece}")
            lost += damaged
        verdict.require(collector.empty(SETTLE_SECONDS), "unsettled", "steps are in the journal")
        verdict.require(collector.stop() == 0, "status", "the collector's")
    rewards = [row["rewards"] for row in shard_rows(root)]
    verdict.require(len(rewards) == len(set(rewards)), "doubled", "a step is stored twice")
    missing = rounds * FLIPPED_EPISODES - len(rewards)
    verdict.require(missing <= lost, "lost", f"{missing} steps are not stored")
    verdict.count("flips", rounds)
    verdict.count("events_damaged", lost)


SCENARIO = Scenario(
    name="spool_disk",
    law="a spooled step survives a cut of the power; a full or hanging disk holds nobody; a flipped"
    " bit costs one event",
    unit="cuts",
    quick=12,
    long=60,
    planted=4,
    run=run,
)
