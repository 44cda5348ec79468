"""`headrace compact`, `retain` and `erase` beside a whole loop, all of it killed at random.

A collector, acting and logging clients, a trainer, an importer and two followers, one of which gets
no events of new files. Torn and rotten copies of shards come and go, and shards that count are
damaged; later they are moved to quarantine.

Every acknowledged step is stored once, or its episode was erased or retained out, or its shard is
in quarantine. Nothing of an erased episode is in a shard, whoever was killed; what was kept has all
its values. Each follower has each remaining row once; the trainer has trained on it once, excluded
it by name, or not read it. `verify` agrees at the end.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from headrace import __name__ as HEADRACE
from storage.maintenance.search import search
from tests.faults.compaction import (
    IMPORT_KILLS,
    KILLED,
    Follower,
    Importer,
    damaged,
    damaged_copy,
    judge_follower,
    judge_values,
    parts_gone,
    plans_under,
    run_killed,
)
from tests.faults.crash import ROOT, judge_root
from tests.faults.loop import ledger
from tests.faults.loop.running_loop import Loop
from tests.faults.loop.trainer_witness import Testimony
from tests.faults.mutants import unbroken
from tests.faults.scenario import Scenario, Trial, Verdict

COMMANDS = ("erase", "retain", "compact")  # in turn
AT_ONCE = 2  # episodes of one request
LATEST_KILL = 1.5  # s after the plan was made
HIDDEN = "the name of a person"


def run(trial: Trial) -> Verdict:
    verdict = Verdict()
    with Loop(trial) as loop:
        followers = [Follower(trial, loop.root, how) for how in ("watch", "poll")]
        work = _Maintenance(loop, followers, verdict)
        loop.start_trainer()
        try:
            verdict.require(loop.wait_for_version(0), "stuck", "no version before any fault")
            while trial.goes_on(verdict.counts.get("kills", 0), verdict):
                work.turn(COMMANDS[int(verdict.counts.get("turns", 0)) % len(COMMANDS)])
                verdict.count("turns")
            work.end()
        finally:
            for follower in followers:
                follower.kill()
    judge_values(loop.root, verdict)
    _judge_proof(trial, verdict)
    judge_root(loop.root, verdict)
    return verdict


class _Maintenance:
    """What was asked for so far, and what has to be finished."""

    def __init__(self, loop: Loop, followers: list[Follower], verdict: Verdict) -> None:
        self._loop, self._followers, self._verdict = loop, followers, verdict
        self._root, self._chance = loop.root, loop.chance
        folder = loop.folder / "imports"
        folder.mkdir()
        self._importer = Importer(folder, loop.collector.address)
        self._erased: set[str] = set()
        self._retained: set[str] = set()
        self._gone_users: set[str] = set()
        self._unfinished: list[tuple[str, str, list[str]]] = []  # command, plan, words
        self._is_damaged = False

    def turn(self, command: str) -> None:
        """Import, damage a file, plan and apply a command, and kill some of all that."""
        chance = self._chance
        self._importer.run(
            self._verdict,
            chance.uniform(*IMPORT_KILLS) if chance.random() < 0.5 else None,
            again=chance.random() < 0.5,
        )
        after = chance.uniform(0.0, LATEST_KILL) if chance.random() < 0.8 else None
        with self._damage():
            self._plan(command, after)
        if chance.random() < 0.4:
            chance.choice(self._followers).restart()
            self._verdict.count("follower_kills")
        if chance.random() < 0.4:
            self._strike(chance.choice(("collector", "writer")))
        if chance.random() < 0.4:
            self._strike("trainer")
        self._loop.watch.look()

    def _strike(self, target: str) -> None:
        loop = self._loop
        self._verdict.count(f"{target}_kills")
        if target == "collector":
            loop.end_collector()
            loop.collector.restart()
        elif target == "writer" and (pid := loop.collector.writer_pid()) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        elif target == "trainer" and loop.trainer is not None:
            ended, said = not loop.trainer.alive, loop.trainer.complaint()
            self._verdict.require(not ended, "ended", f"by itself: {said}")
            loop.trainer.kill()
            loop.start_trainer()

    def _damage(self) -> AbstractContextManager[None]:
        """A damaged copy of a shard for a while; or damage a shard that counts, which stays."""
        shards = sorted(self._loop.shards())
        if self._chance.random() < 0.7 or not shards:
            return damaged_copy(self._root, self._chance, self._verdict)
        path = self._chance.choice(shards)
        kept = self._loop.originals / path.relative_to(self._root)
        kept.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # the application that was killed was finished
            content = path.read_bytes()
            kept.write_bytes(content)
            half = self._loop.folder / "damaged"
            half.write_bytes(damaged(content, self._chance))
            half.replace(path)
            self._is_damaged = True
            self._verdict.count("damaged_shards")
        return contextlib.nullcontext()

    def _plan(self, command: str, kill_after: float | None) -> None:
        """Plan and apply one command; SIGKILL so many seconds after the plan was made, or never."""
        known = {one for one in self._ids() if one[0] in "ak"} - self._erased - self._retained
        ids = self._chance.sample(sorted(known), min(AT_ONCE, len(known)))
        words: list[str] = []
        if command == "erase":
            user = f"user-{len(self._gone_users)}"
            words = [word for one in ids for word in ("--episode", one)] + ["--tag", f"user={user}"]
            words += ["--with-damaged"]
            self._loop.end_collector()
            self._set_aside(words)
            self._erased |= {*ids}
            self._gone_users.add(user)
        elif command == "retain":
            self._retained |= {*ids}
            names = ", ".join(f"'{one}'" for one in ids)
            words = ["--where", f"eps_id IN ({names})" if ids else "false"]
        self._apply(command, "new", words, kill_after)
        if command == "erase":
            self._loop.collector.restart()

    def _ids(self) -> set[str]:
        found: set[str] = set()
        for path in self._loop.shards():
            with contextlib.suppress(pa.ArrowException, OSError):  # a damaged one
                found |= set(pq.read_table(path, columns=["eps_id"])["eps_id"].to_pylist())
        return found

    def _set_aside(self, words: Sequence[str]) -> None:
        """A damaged shard is in the way of an erasure until it is in quarantine."""
        if not self._is_damaged:
            return
        status, said = self._headrace("erase", *words)
        fits = status == 0 or "cannot be searched" in said  # it may be in no record yet
        self._verdict.require(fits, "refused", f"beside damage, status {status}: {said}")
        status, said = self._headrace("verify", "--quarantine")
        self._verdict.require(status < 2, "quarantine", said)
        self._is_damaged = False

    def _headrace(self, *words: str) -> tuple[int, str]:
        """The exit status of a command, and what it said to people."""
        command = [sys.executable, "-m", HEADRACE, *words, "--root", str(self._root)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        return done.returncode, done.stderr

    def _apply(self, command: str, plan: str, words: list[str], kill_after: float | None) -> int:
        plans = plans_under(self._root)
        status, out = run_killed(
            *(self._loop.trial, self._root, self._verdict, [command, "--apply", plan, *words]),
            kill_after,
            waits=plan == "new",
            keeps=command != "erase",
        )
        self._verdict.count(f"{command}s")
        if status == KILLED:
            made = plans_under(self._root) - plans
            self._unfinished += [(command, path.parent.name, words) for path in made]
            if not made:  # killed before there was a plan
                self._erased -= {*words}
                self._gone_users -= {word.removeprefix("user=") for word in words}
        done = status in (0, KILLED) or self._is_idle(command, out) or plan != "new"
        self._verdict.require(done, "refused", f"status {status}: {out}")
        return status

    def _is_idle(self, command: str, out: str) -> bool:
        """Whether an erasure only found that the killed one before it had done everything, or that
        short names are parts of other texts: the proof is judged by itself."""
        return command == "erase" and out.startswith("{") and "applied" in json.loads(out)

    def _finish(self) -> None:
        """Apply again what was killed; a plan whose shard is in quarantine is stale: make it anew.

        The collector has ended.
        """
        self._set_aside(["--episode", "none"])
        for command, plan, words in self._unfinished:
            if status := self._apply(command, plan, [], None):
                self._verdict.require(status == 2, "refused", f"{command} again: {status}")
                self._verdict.count("stale_plans")
                self._apply(command, "new", words, None)

    def end(self) -> None:
        """Stop everything, finish what was killed, and judge."""
        loop, verdict = self._loop, self._verdict
        verdict.require(self._importer.run(verdict, None, again=True), "import", "not done")
        loop.stop_clients()
        if loop.trainer is not None:
            loop.trainer.kill()
        loop.drain(verdict)
        self._finish()
        self._judge_rows(loop.read_all(verdict))
        for follower in self._followers:
            judge_follower(follower, self._root, verdict)

    def _judge_rows(self, result: dict[str, Any] | None) -> None:
        """Each acknowledged row is at rest, or it is known why not; the trainer's account fits."""
        loop, verdict, users = self._loop, self._verdict, self._importer.users
        notes, stored = ledger.Notes.of(loop.folder), ledger.rows_at_rest(self._root)
        damaged = {row.place for row in ledger.rows_at_rest(loop.originals)}
        gone = self._erased | self._retained
        acknowledged = {*notes.acknowledged}
        for place in [one for one in acknowledged if one[0] in gone or one in damaged]:
            del notes.acknowledged[place]
        notes.refused = [one for one in notes.refused if "was erased" not in str(one)]
        imported = Counter(row.place[1] for row in stored if row.place[1] in users)
        rest = [row for row in stored if row.place[1] not in imported]
        ledger.judge_stored(notes, rest, verdict)
        verdict.counts |= {
            "gone_steps": len(acknowledged) - len(notes.acknowledged),
            "imported": imported.total(),
        }
        lost = self._importer.acknowledged - {*imported} - {reward for _, reward in damaged}
        lost = {reward for reward in lost if users[reward] not in self._gone_users}
        verdict.require(not lost, "lost", sorted(lost)[:3])
        doubled = [reward for reward, count in imported.items() if count > 1]
        verdict.require(not doubled, "doubled", doubled[:3])
        kept = {row.place[0] for row in stored} & self._erased
        kept |= {users[reward] for reward in imported} & self._gone_users
        verdict.require(not kept, "kept", sorted(kept)[:3])
        parts, testimony = parts_gone(self._root), Testimony.of(loop.trace)
        if result is not None:
            ledger.judge_end(
                *(self._root, loop.watch, testimony, stored, result, verdict), is_less=bool(parts)
            )
        ledger.judge_versions(loop.watch, testimony, stored, verdict, gone=parts)


def _judge_proof(trial: Trial, verdict: Verdict) -> None:
    """A name that only decoding shows is found."""
    folder = trial.folder / "hidden"
    folder.mkdir()
    codes, chance = pa.array([0] * 50, pa.int32()), random.Random(trial.seed)
    texts = ["".join(chance.choices("etaoinshr", k=30)) for _ in range(300)]
    column = pa.DictionaryArray.from_arrays(codes, pa.array([*texts, HIDDEN]))
    pq.write_table(pa.table({"tags": column}), folder / "x", compression="zstd")
    raw = (folder / "x").read_bytes()
    verdict.require(HIDDEN.encode() not in raw, "visible", "the name is not hidden")
    with trial.mutant.applied() if trial.mutant else unbroken():
        verdict.require(not search(folder, [HIDDEN]).is_clear, "unproven", "nothing was found")


SCENARIO = Scenario(
    name="maintenance",
    law="compaction, retention and erasure, killed at any moment, lose and double no row that they "
    "keep, and keep none that they remove, for clients, an importer, followers and a trainer",
    unit="kills",
    quick=8,
    long=100,
    planted=4,
    seconds=90.0,
    run=run,
)
