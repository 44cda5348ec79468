"""`headrace compact`, `retain` and `erase` beside a collector and followers, all killed at random.

Every acknowledged step is stored once, or its episode was erased or retained out. Nothing of an
erased episode is in a shard, whoever was killed; what was kept has all its values. Each follower
has each remaining row once. `verify` agrees at the end.
"""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from collections import Counter

import pyarrow as pa
import pyarrow.parquet as pq

from headrace import __name__ as HEADRACE
from storage.maintenance.search import search
from tests.faults.compaction import (
    KILLED,
    Follower,
    judge_follower,
    judge_values,
    plans_under,
    run_killed,
)
from tests.faults.crash import ROOT, Traffic, judge_root
from tests.faults.mutants import unbroken
from tests.faults.scenario import Scenario, Trial, Verdict

COMMANDS = ("erase", "retain", "compact")  # in turn
AT_ONCE = 3  # episodes of one request
LATEST_KILL = 1.5  # s after the plan was made
IMPORTED = 9e8  # the rewards of imports begin here
HIDDEN = "the name of a person"


def run(trial: Trial) -> Verdict:
    verdict, chance = Verdict(), random.Random(trial.seed)
    with Traffic(trial.folder, trial.seed, None) as traffic:
        work = _Maintenance(trial, traffic, verdict, chance)
        traffic.warm_up()
        followers = [Follower(trial, traffic.root, how) for how in ("watch", "poll")]
        try:
            while trial.goes_on(verdict.counts.get("applications", 0), verdict):
                traffic.wait_for_shards()
                after = chance.uniform(0.0, LATEST_KILL) if chance.random() < 0.6 else None
                work.bring(chance.random() < 0.5)
                work.turn(COMMANDS[verdict.counts.get("turns", 0) % len(COMMANDS)], after)
                verdict.count("turns")
                if chance.random() < 0.3:
                    chance.choice(followers).restart()
                    verdict.count("follower_kills")
                if chance.random() < 0.3:
                    traffic.kill(chance.choice(("collector", "writer")))
                    verdict.count("collector_kills")
            verdict.require(traffic.settle() == 0, "drain", "expected exit status 0")
            work.finish()
            for follower in followers:
                judge_follower(follower, traffic.root, verdict)
        finally:
            for follower in followers:
                follower.kill()
        work.judge_account()
    judge_values(traffic.root, verdict)
    _judge_proof(trial, verdict)
    judge_root(traffic.root, verdict)
    return verdict


class _Maintenance:
    """What was asked for so far, and what has to be finished."""

    def __init__(
        self, trial: Trial, traffic: Traffic, verdict: Verdict, chance: random.Random
    ) -> None:
        self._trial, self._traffic, self._verdict = trial, traffic, verdict
        self._chance, self._root = chance, traffic.root
        self.erased: set[str] = set()
        self.retained: set[str] = set()
        self._unfinished: list[tuple[str, str]] = []  # commands and plans
        self._files = 0
        self._sent: set[float] = set()
        self._imported: dict[float, str] = {}  # reward -> user
        self._gone_users: set[str] = set()

    def bring(self, is_known: bool) -> None:
        """Import a file with a person to be erased, and one who was before. `is_known`: again."""
        self._files += not (is_known and self._files)
        rows = [
            (f"user-{user}", IMPORTED + 1e3 * self._files + 10 * user + t)
            for user in range(self._files + 3)
            for t in range(3)
        ]
        file = self._trial.folder / f"import-{self._files}.csv"
        lines = [f"{user},0,1,2,3,1,{reward}" for user, reward in rows]
        file.write_text("\n".join(["user,a,b,c,d,arm,paid", *lines]) + "\n")
        kept = [reward for user, reward in rows if user not in self._gone_users]
        self._sent.update(reward for _, reward in rows)
        words = [word for name in "abcd" for word in ("--observation", name)]
        words += ["--action", "arm", "--reward", "paid", "--tag", "user=user"]
        command = [sys.executable, "-m", HEADRACE, "import", str(file), *words]
        command += ["--address", self._traffic.collector.address]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        self._verdict.count("imports")
        self._verdict.require(done.returncode == 0, "import", done.stderr)
        self._imported |= {reward: user for user, reward in rows if reward in kept}

    def turn(self, command: str, kill_after: float | None) -> None:
        """Plan and apply one command; SIGKILL so many seconds after the plan was made, or never."""
        logged = {one for one in self._ids() if re.fullmatch(r"\d+-\d+", one)}
        known = sorted(logged - self.erased - self.retained)
        ids = self._chance.sample(known, min(AT_ONCE, len(known)))
        words: list[str] = []
        if command == "erase":
            self.erased |= {*ids}
            user = f"user-{len(self._gone_users)}"
            self._gone_users.add(user)
            words = [word for one in ids for word in ("--episode", one)] + ["--tag", f"user={user}"]
            self._traffic.collector.kill()
        elif command == "retain":
            self.retained |= {*ids}
            names = ", ".join(f"'{one}'" for one in ids)
            words = ["--where", f"eps_id IN ({names})" if ids else "false"]
        if ids or command == "compact":
            self._apply(command, "new", words, kill_after)
        if command == "erase":
            self._traffic.collector.restart()

    def finish(self) -> None:
        """Apply again what was killed."""
        for command, plan in self._unfinished:
            self._apply(command, plan, [], None)

    def _ids(self) -> set[str]:
        found: set[str] = set()
        for path in self._root.glob("shards/*/*.parquet"):
            found |= set(pq.read_table(path, columns=["eps_id"])["eps_id"].to_pylist())
        return found

    def _apply(self, command: str, plan: str, words: list[str], kill_after: float | None) -> None:
        plans = plans_under(self._root)
        status, out = run_killed(
            *(self._trial, self._root, self._verdict, [command, "--apply", plan, *words]),
            kill_after,
            waits=plan == "new",
            keeps=command != "erase",
        )
        self._verdict.count(f"{command}s")
        if status == KILLED:
            made = plans_under(self._root) - plans
            self._unfinished += [(command, path.parent.name) for path in made]
            if not made:  # killed before there was a plan
                self.erased -= {*words}
                self._gone_users -= {word.removeprefix("user=") for word in words}
        done = status in (0, KILLED) or self._is_idle(command, out)
        self._verdict.require(done, "refused", f"status {status}: {out}")

    def _is_idle(self, command: str, out: str) -> bool:
        """Whether an erasure only found that the killed one before it had done everything, or that
        short names are parts of other texts: the proof is judged by itself."""
        return command == "erase" and out.startswith("{") and "applied" in json.loads(out)

    def judge_account(self) -> None:
        """Every acknowledged step is stored once, or its episode is gone; erased ones are gone."""
        account, gone = self._traffic.account(), self.erased | self.retained
        account.sent.update(self._sent)
        account.refused = [one for one in account.refused if "was erased" not in str(one)]
        missing = [step for step in account.lost if account.episodes.get(step) in gone]
        for step in missing:
            del account.acknowledged[step]
        self._verdict.counts["gone_steps"] = len(missing)
        stored = Counter(self._imported[step] for step in account.stored if step in self._imported)
        lost = [s for s, user in self._imported.items() if user not in self._gone_users]
        lost = [step for step in lost if step not in account.stored]
        self._verdict.counts["imported"] = stored.total()
        self._verdict.require(not lost, "lost", lost[:3])
        kept = self._ids() & self.erased | {*stored} & self._gone_users
        self._verdict.require(not kept, "kept", sorted(kept))
        account.judge(self._verdict)


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
    "keep, and keep none that they remove",
    unit="applications",
    quick=10,
    long=60,
    planted=6,
    seconds=90.0,
    run=run,
)
