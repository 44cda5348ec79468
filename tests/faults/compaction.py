"""`headrace compact` beside a collector, its clients, an importer and two followers, all killed.

One follower gets no events of new files. Torn and rotten copies of shards come and go. Every
acknowledged step is stored once and each follower has each row once. A shard can be read by its old
name during its grace period. New shards have all values of the old ones, and `verify` agrees at the
end.
"""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from headrace import __name__ as HEADRACE
from storage.experience.range_set import RangeSet
from storage.maintenance.merging import kept_rows
from storage.objects.folder import FolderObjects
from storage.reading.shard_reader import ShardReader
from storage.reading.sources import DirectorySource
from storage.shards.names import ShardName
from storage.shards.replacements import REPLACED, Replacements
from tests.faults.crash import ROOT, Traffic, judge_root
from tests.faults.scenario import Scenario, Trial, Verdict

PATIENCE = 300.0
LATEST_KILL = 0.3  # s after the application has begun
KILLED = -9
IMPORT_KILLS = 0.5, 6.0  # s after its start, which takes most of the time
EACH = 5  # rows of a user in an imported file
FIRST_IMPORTED = 2e9  # their rewards, which no client gives


class Follower:
    """A process that follows the shards and stores what it has read with its position."""

    def __init__(self, trial: Trial, root: Path, how: str) -> None:
        self.file = trial.folder / f"read-{how}"
        self._words = [str(root), str(self.file), how, trial.mutant.name if trial.mutant else ""]
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


class Importer:
    """Imports one file after the other; an import that was killed is repeated.

    Each file has rows of the earlier users and of a new one. `users`: reward -> user.
    """

    def __init__(self, folder: Path, address: str) -> None:
        self.notes = folder / "notes-import"
        self._file, self._address = folder / "import.csv", address
        self.users: dict[float, str] = {}
        self.acknowledged: set[float] = set()
        self._rewards: list[float] = []
        self._files = 0
        self._is_due = False

    def run(self, verdict: Verdict, kill_after: float | None, *, again: bool = False) -> bool:
        """Import the file that is due; SIGKILL so many seconds later. Return whether it is done.

        `again`: also the last one, if that is done.
        """
        if not self._is_due and not (again and self._files):
            self._begin()
        self._is_due = True
        command = [sys.executable, "-m", HEADRACE, "import", str(self._file)]
        for name in "abcd":
            command += ["--observation", name]
        command += ["--action", "action", "--reward", "reward", "--uniform", "--tag", "user=user"]
        process = subprocess.Popen(
            [*command, "--address", self._address, "--json"],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            _, text = process.communicate(timeout=PATIENCE if kill_after is None else kill_after)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            verdict.count("import_kills")
            return False
        if process.returncode == 0:
            self._note("acknowledged")
            self.acknowledged.update(self._rewards)
            self._is_due = False
            verdict.count("imports")
        else:  # as while the collector starts
            verdict.require(process.returncode == 1, "import", text)
        return process.returncode == 0

    def _begin(self) -> None:
        """Write the next file."""
        self._files += 1
        users = [f"user-{user}" for user in range(self._files + 2) for _ in range(EACH)]
        first = FIRST_IMPORTED + len(self.users)
        rows = {first + n: user for n, user in enumerate(users)}
        self._rewards = list(rows)
        self.users |= rows
        lines = [f"{user},0.5,0.5,0.5,0.5,{n % 2},{n}" for n, user in rows.items()]
        self._file.write_text("\n".join(["user,a,b,c,d,action,reward", *lines]))
        self._note("sent")

    def _note(self, what: str) -> None:
        with self.notes.open("a") as file:
            file.write(json.dumps({what: self._rewards}) + "\n")


def run(trial: Trial) -> Verdict:
    verdict, chance = Verdict(), random.Random(trial.seed)
    with Traffic(trial.folder, trial.seed, None) as traffic:
        traffic.warm_up()
        followers = [Follower(trial, traffic.root, how) for how in ("watch", "poll")]
        importer = Importer(trial.folder, traffic.collector.address)
        traffic.add_notes(importer.notes)
        try:
            while trial.goes_on(verdict.counts.get("applications", 0), verdict):
                traffic.wait_for_shards()
                if chance.random() < 0.3:
                    _verify_beside(trial, traffic.root, verdict)
                with damaged_copy(traffic.root, chance, verdict):
                    _apply(trial, traffic.root, verdict, chance.uniform(0.0, LATEST_KILL))
                if chance.random() < 0.5:
                    importer.run(verdict, chance.uniform(*IMPORT_KILLS))
                if chance.random() < 0.6:
                    chance.choice(followers).restart()
                    verdict.count("follower_kills")
                if chance.random() < 0.6:
                    traffic.kill(chance.choice(("collector", "writer")))
                    verdict.count("collector_kills")
            _apply(trial, traffic.root, verdict, None)
            verdict.require(importer.run(verdict, None), "import", "not done in the end")
            verdict.require(traffic.settle() == 0, "drain", "expected exit status 0")
            _apply(trial, traffic.root, verdict, None)
            for follower in followers:
                judge_follower(follower, traffic.root, verdict)
        finally:
            for follower in followers:
                follower.kill()
        killed = [verdict.counts.get(name, 0) for name in verdict.counts if "kills" in name]
        verdict.counts["all_kills"] = sum(killed)
        traffic.account().judge(verdict)
    judge_values(traffic.root, verdict)
    judge_root(traffic.root, verdict)
    return verdict


def _apply(trial: Trial, root: Path, verdict: Verdict, kill_after: float | None) -> None:
    """Make a plan and apply it; SIGKILL so many seconds after it was made, or never."""
    status, out = run_killed(trial, root, verdict, ["compact", "--apply", "new"], kill_after)
    verdict.require(status in (0, KILLED), "refused", f"status {status}: {out}")


def run_killed(
    trial: Trial,
    root: Path,
    verdict: Verdict,
    words: Sequence[str],
    kill_after: float | None,
    *,
    waits: bool = True,
    keeps: bool = True,
) -> tuple[int, str]:
    """Run a command that applies a plan, with SIGKILL after so many seconds, or never.

    `waits`: the seconds begin when it has made a plan. `keeps`: shards listed before have to be
    readable afterwards. Returns its exit status and output.
    """
    command = [sys.executable, "-m", HEADRACE]
    if trial.mutant:
        command = [sys.executable, "-m", "tests.faults.launcher", trial.mutant.name, HEADRACE]
    command += [*words, "--root", str(root), "--json"]
    plans = plans_under(root)
    with DirectorySource(root) as source:
        listed = source.scan() if keeps else []
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        end = time.monotonic() + PATIENCE
        while waits and process.poll() is None and plans_under(root) == plans:
            if time.monotonic() > end:
                break
            threading.Event().wait(0.01)
        if kill_after is not None:
            threading.Event().wait(kill_after)
            process.kill()
        out, _ = process.communicate(timeout=PATIENCE)
        verdict.count("kills" if process.returncode == KILLED else "whole_applications")
        verdict.count("applications")
        for shard in listed:
            try:
                source.read(shard)
            except FileNotFoundError as error:
                verdict.require(False, "gone", error)
    return process.returncode, out


def plans_under(root: Path) -> set[Path]:
    """The files of all plans."""
    return set(root.glob("maintenance/*/plan.json"))


def damaged(data: bytes, chance: random.Random) -> bytes:
    """The data torn, or with one bit flipped."""
    if chance.random() < 0.5:
        return data[: chance.randrange(len(data))]
    at = chance.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :]


@contextlib.contextmanager
def damaged_copy(root: Path, chance: random.Random, verdict: Verdict) -> Iterator[None]:
    """A torn or rotten copy of a shard lies beside it, under a digest that it does not have."""
    shards = sorted(root.glob("shards/*/*.parquet"))
    if not shards or chance.random() < 0.5:
        yield
        return
    path = chance.choice(shards)
    try:
        data = path.read_bytes()
    except FileNotFoundError:  # the application that was killed before has been finished
        yield
        return
    copy = path.with_name(f"{path.name[:-24]}{chance.getrandbits(64):016x}.parquet")
    copy.write_bytes(damaged(data, chance))
    verdict.count("damaged_files")
    try:
        yield
    finally:
        copy.unlink(missing_ok=True)  # it may be in quarantine


def _verify_beside(trial: Trial, root: Path, verdict: Verdict) -> None:
    """`headrace verify` finds nothing while shards are replaced."""
    with ThreadPoolExecutor(1) as pool:
        applying = pool.submit(_apply, trial, root, verdict, None)
        judge_root(root, verdict)
        applying.result()
    verdict.count("verified_beside")


def judge_follower(follower: Follower, root: Path, verdict: Verdict) -> None:
    """Once it has had the time, the follower has every row that is left, and none twice."""
    columns = ["stream", "ordinal", "t"]
    with ShardReader(root, batch_size=500, columns=columns, training_disabled=True) as reader:
        wanted = Counter(
            row for b in reader for row in zip(*(b[name].tolist() for name in columns), strict=True)
        )
    gone = parts_gone(root)

    def wrong() -> list[tuple[str, int, int]]:
        more = [row for row in found - wanted if row[1] not in gone.get(row[0], RangeSet())]
        return more + [row for row, count in found.items() if count > 1]

    before, end = -1, 0.0
    while wanted - (found := follower.rows()) and not wrong():
        if found.total() != before:  # a follower that gets on may be slow
            before, end = found.total(), time.monotonic() + PATIENCE
        elif time.monotonic() > end:
            break
        threading.Event().wait(0.1)
    verdict.count("followed", found.total())
    verdict.require(not wanted - found, "unread", list(wanted - found)[:3])
    verdict.require(not wrong(), "read_twice", wrong()[:3])


def parts_gone(root: Path) -> dict[str, RangeSet]:
    """Stream -> the ordinals of parts that were removed, or are in quarantine."""
    gone: dict[str, RangeSet] = {}
    for made in Replacements.of(FolderObjects(root)).removals:
        gone.setdefault(made.stream, RangeSet()).update(made.removed)
    for path in root.glob("quarantine/*/*.parquet"):
        if name := ShardName.parse(path.name):
            gone.setdefault(path.parent.name, RangeSet()).add_range(name.first, name.last)
    return gone


def judge_values(root: Path, verdict: Verdict) -> None:
    """Each new shard has the values of the old ones that were kept, read by Arrow alone."""
    for made in Replacements.of(FolderObjects(root)).made.values():
        folder = root / "shards" / made.stream
        new = [path for end in ("", REPLACED) if (path := folder / (made.new + end)).exists()]
        old = [folder / (name + REPLACED) for name in made.old]
        if not new or not all(path.exists() for path in old):
            continue  # a record without its shard, or shards that were deleted
        verdict.count("new_shards")
        verdict.count("old_shards", len(old))
        wanted = kept_rows(pa.concat_tables(map(pq.read_table, old)), RangeSet(made.removed))
        verdict.require(pq.read_table(new[0]).equals(wanted), "differs", made.place)


SCENARIO = Scenario(
    name="compaction",
    law="compaction, killed at any moment, loses and doubles no row, for readers that follow "
    "and for the account",
    unit="applications",
    quick=8,
    long=60,
    planted=4,
    seconds=60.0,
    run=run,
)
