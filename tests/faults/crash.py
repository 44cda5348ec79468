"""SIGKILL of the collector, its supervisor or its shard writer at random moments, under load.

Nothing acknowledged is lost, nothing is duplicated, no reader ever sees a partial shard, and
`headrace verify` agrees at the end; a supervised collector is soon ready again. A client repeats a
batch unchanged until it is answered.
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from storage.declarations.declaration import PolicyDeclaration
from storage.declarations.policy_files import save_declaration
from storage.spaces.descriptors import Discrete
from tests.closing import Closing
from tests.collector_process import PLAIN, CollectorProcess, declare
from tests.faults.account import UNREWARDED, Account, ShardWatch
from tests.faults.logging_client import SHOP
from tests.faults.scenario import Scenario, Trial, Verdict

ROOT = Path(__file__).parents[2]
PROCESSES, CLIENTS_EACH = 2, 4
SETTLE_SECONDS = 120.0
PAUSES = ((0.0, 0.1), (0.1, 0.3), (0.3, 1.0))  # short, and long enough for a shard to be written
TARGETS = ("collector", "collector", "collector", "supervisor", "writer", "writer")
READY_SHARE = 0.7  # of a start: the time until a supervised collector serves again after a kill
STARTS = 3  # at least so many are measured
PLANTED_PAUSE = (0.5, 1.5)  # longer than a planted fault keeps its window open


class Traffic(Closing):
    """A collector under eight clients in two processes. Killed clients are replaced by new ones."""

    def __init__(
        self,
        folder: Path,
        seed: int,
        program: Sequence[str] | None = ("-m", PLAIN),
        *,
        episode_timeout: float = 20.0,
        env: Mapping[str, str] | None = None,
        supervise: bool = False,
        ranks: bool = False,
    ) -> None:
        self.root, self._folder = folder / "root", folder
        self._is_forked = program is None and env is None
        declare(self.root, part_steps=3, seal_seconds=0.3, episode_timeout=episode_timeout)
        self._rank = ["rank"] if ranks else []
        if ranks:
            shop = {"observation": SHOP, "action": Discrete(4), "policy_id": "shop"}
            rules = {"seal_seconds": 0.3, "reward_window": 15.0, "reward_default": UNREWARDED}
            save_declaration(self.root, PolicyDeclaration(**shop, **rules))
        self._random = random.Random(seed)
        self._stack = ExitStack()
        self.collector = self._stack.enter_context(
            CollectorProcess(
                self.root, program=program, env=env, supervise=supervise, drain_seconds=3.0
            )
        )
        self.seconds: dict[str, list[float]] = {"ready_again": [], "started_again": []}
        self.watch = ShardWatch(self.root)
        self._notes: list[Path] = []
        self._others: list[Path] = []
        self._processes = [self._clients() for _ in range(PROCESSES)]

    def _clients(self) -> subprocess.Popen[bytes]:
        first = len(self._notes) + 1
        numbers = [str(number) for number in range(first, first + CLIENTS_EACH)]
        self._notes += [self._folder / f"notes-{number}" for number in numbers]
        command = [sys.executable, "-m", "tests.faults.logging_client", self.collector.address]
        clients = subprocess.Popen([*command, str(self._folder), *self._rank, *numbers], cwd=ROOT)
        self._stack.callback(_end, clients)
        return clients

    def add_notes(self, path: Path) -> None:
        """Count the steps that another client of this collector notes."""
        self._others.append(path)

    def warm_up(self) -> None:
        """Wait until every client has an answer, so that kills happen under load."""
        for _ in range(int(SETTLE_SECONDS / 0.05)):
            if all(path.exists() for path in self._notes):
                return
            threading.Event().wait(0.05)
        raise TimeoutError("a client got no answer")

    def wait_for_shards(self) -> None:
        """Wait until the shard writer runs: on a busy machine its start takes long."""
        before = self._shards()
        for _ in range(int(SETTLE_SECONDS / 0.05)):
            if self._shards() - before:
                return
            threading.Event().wait(0.05)

    def _shards(self) -> set[Path]:
        return set(self.root.glob("shards/*/*"))

    def kill(self, target: str, after: tuple[float, float] = (0.05, 0.5)) -> None:
        """SIGKILL after so many seconds of traffic, at random within the two.

        A supervised collector becomes ready again by itself; an unsupervised one, or a killed
        supervisor, is restarted from here.
        """
        threading.Event().wait(self._random.uniform(*after))
        if target == "collector" and self.collector.supervise:
            began = time.monotonic()
            self.collector.kill_serving()
            self.seconds["ready_again"].append(time.monotonic() - began)
        elif target in ("collector", "supervisor"):
            self.collector.kill()
            self.watch.look()
            began = time.monotonic()
            self.collector.restart()
            self.seconds["started_again"].append(time.monotonic() - began)
        elif target == "writer":
            pid = self.collector.writer_pid()
            if pid is not None:
                os.kill(pid, signal.SIGKILL)
        else:
            at = self._random.randrange(PROCESSES)
            _end(self._processes[at])
            self._processes[at] = self._clients()
        self.watch.look()

    def settle(self) -> int:
        """Let clients end their episodes and the rest be abandoned, then drain the collector;
        return its exit status."""
        (self._folder / "stop").touch()
        for clients in self._processes:
            clients.wait(SETTLE_SECONDS)
        if self._is_forked:
            self.collector.turn_clock()
        self.collector.empty(SETTLE_SECONDS)
        return self.collector.stop()

    def account(self) -> Account:
        account = Account.of(self.root, [*self._notes, *self._others])
        account.partial += self.watch.partial
        return account

    def judge(self, verdict: Verdict) -> None:
        """Drain, then check the exit status and the shards."""
        status = self.settle()
        verdict.require(status == 0, "drain", f"expected exit status 0, got {status}")
        self.account().judge(verdict)

    def close(self) -> None:
        self._stack.close()


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def verify(root: Path) -> tuple[int, list[str]]:
    """The exit status and the findings of `headrace verify`."""
    command = [sys.executable, "-m", "headrace", "verify", "--root", str(root), "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    findings = json.loads(done.stdout)["findings"] if done.returncode < 2 else [done.stderr]
    return done.returncode, [str(finding) for finding in findings]


def judge_root(root: Path, verdict: Verdict) -> None:
    """Report each finding of `headrace verify` as a violation."""
    status, findings = verify(root)
    verdict.require(status == 0, "verify", findings)


def run(trial: Trial) -> Verdict:
    verdict, chance = Verdict(), random.Random(trial.seed)
    timeout = 2.0 if trial.mutant else 20.0  # a fault may make clients forget their episodes
    given = {"episode_timeout": timeout, "supervise": True, "ranks": True}
    with Traffic(trial.folder, trial.seed, trial.program, **given) as traffic:
        traffic.warm_up()
        verdict.counts["clients"] = PROCESSES * CLIENTS_EACH
        for _ in range(trial.size):
            if not trial.in_time:
                break
            target = "collector" if trial.mutant else chance.choice(TARGETS)
            if trial.mutant:
                traffic.wait_for_shards()
            traffic.kill(target, PLANTED_PAUSE if trial.mutant else chance.choice(PAUSES))
            verdict.count(f"{target}_kills")
        judged = "slow" in trial.symptoms or not trial.mutant
        while judged and len(traffic.seconds["started_again"]) < STARTS:
            traffic.kill("supervisor")
            verdict.count("supervisor_kills")
        traffic.judge(verdict)
        tell_restarts(verdict, traffic.seconds, judged=judged)
    judge_root(traffic.root, verdict)
    return verdict


def tell_restarts(
    verdict: Verdict, seconds: Mapping[str, list[float]], *, judged: bool = True
) -> None:
    """Report how soon a killed collector was ready again.

    A supervised one has to be quicker than a start, which the machine's load slows down alike. A
    broken build with another symptom is not `judged`, because its faults may slow it down.
    """
    for what, all_of in seconds.items():
        if len(all_of) > 1:
            verdict.counts[f"{what}_p50"] = statistics.median(all_of)
            verdict.counts[f"{what}_p95"] = statistics.quantiles(all_of, n=20)[-1]
    half, start = (verdict.counts.get(f"{what}_again_p50", 0.0) for what in ("ready", "started"))
    if judged:
        text = f"ready again after {half:.2f} s, in the median, and after {start:.2f} s by a start"
        verdict.require(half <= READY_SHARE * start, "slow", text)


SCENARIO = Scenario(
    name="crash",
    law="no acknowledged step is lost, none is doubled, no shard is ever seen in part, "
    "and a killed collector is ready again at once",
    unit="kills",
    quick=100,
    long=200,
    planted=3,
    seconds=53.0,
    run=run,
)
