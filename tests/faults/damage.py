"""Journals with truncated, zeroed or flipped files, each opened as a collector would open it.

A journal with a random history is copied as a dead process would leave it, one of its files is
damaged, and a collector starts on it. It must start; no row may change its bytes; every missing
acknowledged row must be reported and counted; an unreadable database is set aside; and new episodes
must be stored whole. Some runs use a real collector process. Damaged shards must be neither read
nor adopted.
"""

from __future__ import annotations

import asyncio
import math
import shutil
import tempfile
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import storage.journal.sqlite_journal
from ingest.backup import adopt_root
from ingest.collector.adoption import adopt, require_current
from storage.errors import JournalBehind, StorageError
from storage.journal.database import DATABASE
from storage.journal.sqlite_journal import SqliteJournal
from storage.shards.names import ShardDamaged
from storage.shards.shard import ShardWriter, find_shard, read_shard
from tests.collector_process import CollectorProcess, declare, shard_rows
from tests.faults.crash import verify
from tests.faults.scenario import Scenario, Trial, Verdict
from tests.faults.simulated_client import Client, Ledger
from tests.faults.simulation import LIMITS, POLICIES, History, quiet, stored_steps
from tests.faults.stepped_collector import Points, World
from tests.ingest.simulated_collector import MemoryShard, MemoryShelf

WAL, HIGH_WATER = f"{DATABASE}-wal", "high-water"
SMALL_CHECKPOINT = 200_000  # so that a short history fills the database, and recycles its log
TURNS = 150
MEMORY = Path("/dev/shm")
STARTS = 2  # the collector's attempts to start; a service manager would make more


class RecordedJournal(SqliteJournal):
    """Remembers every row that it ever had."""

    ever: dict[int, bytes]

    def commit(self, rows: Any = (), **given: Any) -> None:
        super().commit(rows, **given)
        self.ever.update(rows)


class DiskWorld(World):
    """A world whose journal is a real one in a folder; shards stay in memory."""

    folder: Path
    shards: Mapping[tuple[str, int, int], MemoryShard] = {}
    opened: SqliteJournal | None = None
    adopted: frozenset[int] = frozenset()  # rows whose parts are in shards later than the journal

    def start(self) -> None:
        try:
            super().start()
        except BaseException:
            if self.opened is not None:
                self.opened.close()  # as the end of its process would
            raise

    def find_journal(self) -> RecordedJournal:
        self.writer.dense = False
        ever: dict[int, bytes] = {}
        if isinstance(self.journal, RecordedJournal):
            ever = self.journal.ever
            self.journal.close()
        else:
            self.writer.shards |= self.shards
        journal = self.opened = RecordedJournal.open(self.folder)
        journal.ever = ever
        shelf = MemoryShelf(self.writer)
        try:
            require_current(journal, shelf.ends)
        except JournalBehind:
            before = {row for row, _ in journal.replay()}
            adopt(
                journal,
                self.policies,
                shelf.ends,
                shelf.later,
                self.writer.write,
                received=int(self.now),
            )
            self.adopted |= before - {row for row, _ in journal.replay()}
        return journal


@dataclass(frozen=True)
class Image:
    """A journal as a dead process left it, and the state that it should have."""

    folder: Path
    collector_id: str
    last_row: int
    rows: dict[int, bytes]  # that a start must find
    ever: dict[int, bytes]  # that there ever were
    ledger: Ledger
    shards: dict[tuple[str, int, int], MemoryShard]


def world_in(folder: Path, image: Image | None = None, chance: Random | None = None) -> DiskWorld:
    kind = type("_World", (DiskWorld,), {"folder": folder})
    if image is not None:
        kind.shards = image.shards
    world: DiskWorld = kind(POLICIES, chance or Random(0), Points(set(), set()), LIMITS)
    return world


def images(seed: int, folder: Path, count: int) -> list[Image]:
    """Journals at random moments of one history; the last one was closed in order."""
    chance = Random(seed)
    live = folder / f"live-{seed}"
    kind = type("_World", (DiskWorld,), {"folder": live})
    history = History(seed, Points(set(), set()), kind)
    found: list[Image] = []
    moments = sorted(chance.sample(range(TURNS // 4, TURNS), count - 1))
    for turn in range(TURNS):
        history.turn()
        if turn in moments:
            found.append(_image(history, folder / f"image-{seed}-{turn}", live))
    history.world.journal.close()
    found.append(_image(history, folder / f"image-{seed}-closed", live))
    return found


def _image(history: History, folder: Path, live: Path) -> Image:
    journal, ledger = history.world.journal, history.ledger
    shutil.copytree(live, folder)
    pristine = folder.with_name(f"{folder.name}-pristine")
    shutil.copytree(live, pristine)
    opened = SqliteJournal.open(pristine)
    rows = dict(opened.replay())
    opened.close()
    if not isinstance(journal, RecordedJournal) or opened.damage:
        raise RuntimeError("an undamaged journal is found damaged")
    known = Ledger(expected=dict(ledger.expected), possible=dict(ledger.possible))
    shards = dict(history.world.writer.shards)
    return Image(
        folder, journal.collector_id, opened.last_row, rows, dict(journal.ever), known, shards
    )


# --- damage --------------------------------------------------------------------------------------


def wreck(folder: Path, chance: Random, rows: Iterable[bytes] = ()) -> tuple[str, str]:
    """Damage one file; (file, how). `rows` are blobs that it may hold."""
    files = [name for name in (DATABASE, WAL, HIGH_WATER) if (folder / name).exists()]
    weights = {DATABASE: 5, WAL: 5, HIGH_WATER: 1}
    name = chance.choices(files, [weights[name] for name in files])[0]
    path = folder / name
    data = bytearray(path.read_bytes())
    kinds = {"cut": 3, "zeroed": 3, "flipped": 4, "noise": 3, "gone": 1, "header": 2, "row": 3}
    how = chance.choices(list(kinds), list(kinds.values()))[0]
    if not data or how == "gone":
        path.unlink()
        return name, "gone"
    at = chance.randrange(len(data))
    if how == "cut":
        del data[at:]
    elif how == "zeroed":
        size = min(chance.choice((1, 8, 512, 4096)), len(data) - at)
        data[at : at + size] = bytes(size)
    elif how == "header":  # size of SQLite's headers: 100 bytes in a database, 32 in a log
        at = chance.randrange(min(100, len(data)))
        data[at] = chance.choice((0, 255, data[at] ^ 1, data[at] ^ 128))
    elif how == "row" and (places := [data.find(blob) for blob in rows if blob in data]):
        at = chance.choice(places) + chance.randrange(20, 40)
        data[min(at, len(data) - 1)] ^= 1
    elif how == "noise":
        size = min(chance.choice((2, 8, 512)), len(data) - at)
        data[at : at + size] = chance.randbytes(size)
    else:
        for _ in range(chance.choice((1, 1, 3))):
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(data)
    return name, how


def trial_of(image: Image, victim: Path, seed: int, verdict: Verdict) -> None:
    """Damage one copy of a journal, start a collector on it, and check the result."""
    chance = Random(seed)
    shutil.copytree(image.folder, victim)
    name, how = wreck(victim, chance, image.rows.values())
    where = f"{image.folder.name}, damage {seed}: {name} {how}"
    verdict.count("journals")
    verdict.count(f"{name} {how}")
    world = _start(victim, image, chance, verdict, where)
    if world is None:
        return
    try:
        _judge_rows(world, image, name, verdict, where)
        _judge_service(world, image, verdict, where)
    except StorageError as error:
        verdict.require(False, "service", f"{where}: {error!r}")
    finally:
        world.journal.close()


def _start(
    victim: Path, image: Image, chance: Random, verdict: Verdict, where: str
) -> DiskWorld | None:
    error: Exception | None = None
    for _ in range(STARTS):
        try:
            return world_in(victim, image, chance)
        except Exception as raised:  # any exception that prevents a start is a violation
            error = raised
    verdict.require(False, "loop", f"{where}: {error!r}")
    return None


def _judge_rows(world: DiskWorld, image: Image, name: str, verdict: Verdict, where: str) -> None:
    """No row has changed, and each missing row is reported."""
    damage, journal = world.collector.damage, world.journal
    rows = dict(journal.replay())
    ever = image.ever | (journal.ever if isinstance(journal, RecordedJournal) else {})
    wrong = [number for number, blob in rows.items() if ever.get(number) != blob]
    verdict.require(not wrong, "wrong", f"{where}: rows {wrong}")
    missing = [one for one in image.rows if one not in rows and one not in world.adopted]
    counted = damage.missing_rows + damage.lost_rows + damage.damaged_rows
    verdict.count("rows_missing", len(missing))
    verdict.count("stated_rows", min(counted, len(missing)))
    verdict.count("set_aside", damage.set_aside is not None)
    verdict.require(not missing or bool(damage), "silent", f"{where}: rows {missing}")
    verdict.require(counted >= len(missing), "uncounted", f"{where}: {damage}, rows {missing}")
    kept = damage.set_aside is None or (damage.set_aside / DATABASE).exists()
    verdict.require(kept, "set aside", f"{where}: {damage}")
    new_name = journal.collector_id != image.collector_id
    verdict.require(
        new_name or journal.last_row >= image.last_row, "reused", f"{where}: {journal.last_row}"
    )


def _judge_service(world: DiskWorld, image: Image, verdict: Verdict, where: str) -> None:
    """New episodes are stored whole, old ones as far as they survive; the next start is clean."""
    ledger = Ledger(next_step=100_000)
    client = Client(99, ledger, Random(1))
    for last in (False, False, True):  # registers, logs, ends
        client.compose(last=last)
        client.deliver(world)
    world.finish()
    failure = world.collector.journal.failure
    verdict.require(failure is None, "service", f"{where}: {failure!r}")
    stored = stored_steps(world.writer.parts)
    served = [len(stored.get(step, ())) for step in ledger.expected]
    whole = bool(served) and served == [1] * len(served)
    verdict.require(whole, "service", f"{where}: new steps are there {served} times")
    found = world.collector.damage  # a plan with damaged rows gives another shard
    is_reported = bool(found.damaged_rows or found.lost_rows)
    doubled = [step for step, found in stored.items() if len(found) > 1]
    verdict.count("doubled_and_told" if is_reported else "doubled", bool(doubled))
    verdict.require(not doubled or is_reported, "doubled", f"{where}: {doubled}")
    _judge_rewards(world, image, stored, verdict, where)
    world.start()
    again = world.collector.damage
    calm = again.set_aside is None and not again.missing_rows
    verdict.require(calm, "again", f"{where}: {again}")


def _judge_rewards(
    world: DiskWorld, image: Image, stored: dict[int, list[float]], verdict: Verdict, where: str
) -> None:
    """Every step has its reward; only the last step of an episode cut short may lack some of it."""
    cut_short = {
        int(step)
        for part in world.writer.parts
        if part.ended in ("broken", "abandoned")
        for step in list(stored_steps([part]))[-1:]
    }
    known = image.ledger
    for step, rewards in stored.items():
        if step >= 100_000:
            continue
        most = known.possible.get(step, math.nan)
        least = step if step in cut_short else known.expected.get(step, step)
        fits = all(least <= reward <= most for reward in rewards)
        verdict.require(fits, "wrong", f"{where}: step {step} has {rewards}, not {least}..{most}")


# --- shards --------------------------------------------------------------------------------------


def flip_shards(image: Image, folder: Path, count: int, seed: int, verdict: Verdict) -> None:
    """A shard with one flipped bit, anywhere, is neither read nor adopted."""
    chance, rules = Random(seed), {d.schema_id: d.canonical_spaces for d in POLICIES.values()}
    for (stream, first, last), shard in list(image.shards.items())[:count]:
        schema = shard.parts[0].schema_id
        written = ShardWriter(folder).write(stream, rules[schema], shard.parts)
        data = bytearray(written.path.read_bytes())
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        written.path.write_bytes(data)
        verdict.count("shards_flipped")
        adopted = find_shard(folder, stream, first, last)
        verdict.require(adopted is None, "unnoticed", f"{written.path.name} was adopted")
        try:
            read_shard(written.path, verify="digest")
            verdict.require(False, "unnoticed", f"{written.path.name} was read")
        except ShardDamaged:
            verdict.count("shards_refused")


# --- the real process ----------------------------------------------------------------------------


def real_start(folder: Path, seed: int, verdict: Verdict) -> None:
    """Kill a collector, damage its journal, restart it; it must serve, and `verify` must report."""
    declare(folder, episode_timeout=1.0)
    chance = Random(seed)
    with CollectorProcess(folder) as collector:
        first = _log(collector, "before", range(1, 41))
        collector.kill()
        name, how = wreck(folder / "journal", chance)
        where = f"process {seed}: {name} {how}"
        verdict.count("processes")
        try:
            if adopt_root(folder) is not None:
                verdict.count("adopted")
            collector.restart()
        except (RuntimeError, StorageError) as error:
            verdict.require(False, "loop", f"{where}: {error}")
            return
        second = _log(collector, "after", range(101, 121))
        _wait_until_sealed(collector)
        verdict.require(collector.stop() == 0, "service", f"{where}: stopped badly")
    stored = [row["rewards"] for row in shard_rows(folder)]
    lost = [reward for reward in first if reward not in stored]
    served = all(stored.count(reward) == 1 for reward in second)
    verdict.require(served, "service", f"{where}: {sorted(stored)}")
    unknown = set(stored) - set(first) - set(second)
    verdict.require(not unknown, "wrong", f"{where}: {unknown}")
    verdict.require(not lost or verify(folder)[0] == 1, "silent", f"{where}: {lost}")


def _log(collector: CollectorProcess, name: str, rewards: Iterable[int]) -> list[float]:
    """Log one-step batches of three episodes; answers the acknowledged rewards."""
    instance = collector.post("/v1/instances")[1]["instance"]
    names = [f"{name}-{n}" for n in range(3)]
    starts = [{"type": "start", "episode_id": each, "start": n} for n, each in enumerate(names)]
    collector.post("/v1/events", {"instance": instance, "events": starts})
    acknowledged: list[float] = []
    for at, reward in enumerate(rewards):
        event = {"type": "log_action", "episode_id": names[at % 3], "seq": at // 3 + 1}
        event |= {"obs": [0.0] * 4, "action": 1, "reward": reward}
        status, answer = collector.post("/v1/events", {"instance": instance, "events": [event]})
        if status == 200 and not answer.get("refused"):
            acknowledged.append(float(reward))
    return acknowledged


def _wait_until_sealed(collector: CollectorProcess) -> None:
    """Wait until all open episodes have been abandoned and written to shards."""
    for _ in range(150):
        counts = collector.get("/readyz")[1]
        if counts["episodes_open"] == counts["bytes_waiting"] == 0:
            return
        threading.Event().wait(0.1)


# --- the scenario --------------------------------------------------------------------------------

IMAGES, EACH = 6, 50  # journals per history, damaged copies per journal
PROCESSES = {False: 3, True: 20}  # real starts in a quick run, and in a long one


def run(trial: Trial) -> Verdict:
    verdict = Verdict()
    before = storage.journal.sqlite_journal.CHECKPOINT_BYTES
    storage.journal.sqlite_journal.CHECKPOINT_BYTES = SMALL_CHECKPOINT
    where = MEMORY if MEMORY.is_dir() else trial.folder  # the cost of syncs does not matter here
    try:
        with trial.planted(), quiet(), tempfile.TemporaryDirectory(dir=where) as folder:
            asyncio.run(_in_process(trial, Path(folder), verdict))
    finally:
        storage.journal.sqlite_journal.CHECKPOINT_BYTES = before
    if trial.mutant is None:
        for number in range(PROCESSES[trial.deadline == math.inf]):
            real_start(trial.folder / f"process-{number}", trial.seed * 1000 + number, verdict)
    return verdict


async def _in_process(trial: Trial, folder: Path, verdict: Verdict) -> None:
    """Run inside an event loop, which a collector requires even if nothing waits."""
    seed = trial.seed * 1_000
    while trial.goes_on(verdict.counts.get("journals", 0), verdict):
        seed += 1
        home = folder / str(seed)
        for image in images(seed, home, IMAGES):
            flip_shards(image, home / "shards", 2, seed, verdict)
            for number in range(EACH):
                trial_of(image, home / "victim", seed * 1_000 + number, verdict)
                shutil.rmtree(home / "victim")
        shutil.rmtree(home)


SCENARIO = Scenario(
    name="damage",
    law="no damage to a journal's files makes a wrong row, goes untold or stops a collector",
    unit="journals",
    quick=1_200,
    long=12_000,
    planted=1_200,
    run=run,
    seconds=35.0,
)
