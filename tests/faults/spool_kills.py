"""SIGKILL of processes that log with a spool, while the collector is killed and restarted.

    python -m tests.faults.spool_kills ADDRESS FOLDER NUMBER MUTANT OPTIONS

Such a process logs steps until FOLDER/stop exists, and notes each once its call has returned and
nothing is unwritten: from then on the step must survive. Two of them run at a time, on one spool; a
killed one is replaced by another, which delivers the events that it left. The last ones flush.

After that a client that acts by a policy with flow control adopts the events of an earlier process:
its own action waits for its own steps, not for those.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from ingest.client.local_actions import WINDOWS_PER_VERSION
from ingest.client.policy_client import PolicyClient
from ingest.delivery.declarations import ClientPolicy
from ingest.delivery.spool import PIECE_BYTES, SpoolSegment
from ingest.protocol.errors import BufferFull, Refusal
from policy.inference.spec import PolicySpec
from policy.inference.weight_store import WeightStore
from storage.declarations.policy_files import read_declaration
from tests.collector_process import CollectorProcess, declare, shard_rows
from tests.faults import mutants
from tests.faults.account import Account
from tests.faults.scenario import Scenario, Trial, Verdict

OBS = [0.0, 1.0, 2.0, 3.0]
PAUSE_SECONDS = 0.002
SETTLE_SECONDS = 60.0
FEW_NOTES_BYTES = 200
NOTED_SECONDS = 0.02
LEFT_EPISODES = 1_000
WINDOW = 4  # steps of a process that an action follows
R = TypeVar("R")


def log(address: str, folder: Path, number: int, options: Mapping[str, Any]) -> None:
    """One process: episodes of one step, and longer ones that a kill may interrupt.

    A call that finds the disk full raises, and its step need not survive; the number of such calls
    is noted, and so is each call that takes longer than all before it.
    """
    chance = random.Random(number)

    def note_refusal(refusal: Refusal) -> None:
        with (folder / f"refused-{number}").open("a") as refused:
            refused.write(f"{refusal.code} {refusal.episode_id}\n")

    client = PolicyClient(
        address,
        on_full="spool",
        spool_dir=folder / "volume/spool",
        max_pending=chance.choice((5, 50, 1000)),
        policy_file=folder / "root/policies/default.json",
        on_error=note_refusal,
        **options,
    )
    steps, longest = 0, NOTED_SECONDS
    returned: list[float] = []
    with (
        (folder / f"notes-{number}").open("a") as notes,
        (folder / f"episodes-{number}").open("a") as episodes,
        (folder / f"full-{number}").open("a") as full,
        (folder / f"longest-{number}").open("a") as slow,
    ):

        def note(what: str, reward: float) -> None:
            notes.write(json.dumps({what: [reward]}) + "\n")
            notes.flush()

        def reward() -> float:
            nonlocal steps
            steps += 1
            note("sent", found := number * 1e6 + steps)
            return found

        def promise(amount: float) -> None:
            returned.append(amount)
            while returned and not client.stats.unwritten:
                note("acknowledged", returned.pop(0))

        def timed(call: Callable[..., R], *values: Any, **options: Any) -> R:
            nonlocal longest
            began = time.monotonic()
            try:
                return call(*values, **options)
            finally:
                if (took := time.monotonic() - began) > longest:
                    longest = took
                    slow.write(f"{took}\n")
                    slow.flush()

        def episode() -> None:
            amount = reward()
            timed(client.log_step, OBS, 1, amount, action_prob=0.5)
            promise(amount)
            name = timed(client.start_episode)
            for _ in range(chance.randrange(4)):
                amount = reward()
                episodes.write(f"{amount} {name}\n")
                episodes.flush()
                timed(client.log_action, name, OBS, 1)
                timed(client.log_returns, name, amount)
                promise(amount)
            if chance.random() < 0.8:
                timed(client.end_episode, name)

        while not (folder / "stop").exists():
            try:
                episode()
            except BufferFull as error:
                full.write(f"{error}\n")
                full.flush()
            threading.Event().wait(PAUSE_SECONDS)
    # a disk that hangs between a step and its reward may outlast the episode: counted as refused
    with contextlib.suppress(Refusal):
        client.close(SETTLE_SECONDS)


def act(trial: Trial, verdict: Verdict) -> None:
    """An action after a full window of its own process's steps, queued behind another process's
    events: it returns while most of those events are still unsent."""
    from policy.networks.policy import Policy  # noqa: PLC0415  # the processes that log start fast

    root, spool = trial.folder / "acting", trial.folder / "acting-spool"
    declare(root, steps_per_version=WINDOWS_PER_VERSION * WINDOW)
    declared = read_declaration(root / "policies/default.json")
    spec = PolicySpec(declared.observation, declared.action)
    weights = Policy(spec, seed=1).get_weights()
    store = WeightStore(root, "default")
    store.publish(store.add_candidate(weights, spec=spec.to_json(), metrics={}, lineage={}))
    with CollectorProcess(root) as collector, trial.planted():
        options = {
            "policy_file": root / "policies/default.json",
            "on_full": "spool",
            "spool_dir": spool,
            "batch": 50,
        }
        earlier = PolicyClient("http://127.0.0.1:9", timeout=0.01, **options)
        for _ in range(LEFT_EPISODES):
            earlier.log_step(OBS, 1, 1.0)
        earlier.close()
        client = PolicyClient(collector.address, **options)
        name = client.start_episode()
        for _ in range(WINDOW + 1):
            client.get_action(name, OBS)
        waiting = client.stats.waiting
        verdict.count("left_when_acting", waiting)
        verdict.require(waiting > LEFT_EPISODES, "waited", f"{waiting} events were left")
        client.end_episode(name)
        client.close(SETTLE_SECONDS)


class Spooling:
    """Two processes on one spool, and a collector. `options` and `env` are the processes'."""

    def __init__(
        self,
        trial: Trial,
        *,
        options: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.folder = trial.folder
        self.spool = trial.folder / "volume/spool"
        self._mutant = trial.mutant.name if trial.mutant else "none"
        self._options, self._env = json.dumps(options or {}), {**os.environ, **(env or {})}
        self._started = 0
        declare(trial.folder / "root", episode_timeout=1.0)
        self.collector = CollectorProcess(trial.folder / "root")
        self.clients = [self.start(), self.start()]
        self.numbers = [1, 2]

    def start(self) -> subprocess.Popen[bytes]:
        self._started += 1
        module = [sys.executable, "-m", "tests.faults.spool_kills", self.collector.address]
        arguments = [str(self.folder), str(self._started), self._mutant, self._options]
        return subprocess.Popen([*module, *arguments], env=self._env)

    def kill(self, place: int) -> None:
        """SIGKILL of a process that has logged something, and another in its place."""
        self.stop(place)
        self.follow(place)

    def stop(self, place: int) -> None:
        """SIGKILL of a process that has logged something, unless it is dead."""
        while not self.is_logging(place) and self.clients[place].poll() is None:
            threading.Event().wait(PAUSE_SECONDS)
        self.clients[place].send_signal(signal.SIGKILL)
        self.clients[place].wait()

    def is_logging(self, place: int) -> bool:
        notes = self.folder / f"notes-{self.numbers[place]}"
        return notes.exists() and notes.stat().st_size > FEW_NOTES_BYTES

    def acknowledged(self, place: int) -> int:
        """How many steps a process has noted as returned and written."""
        return (self.folder / f"notes-{self.numbers[place]}").read_text().count("acknowledged")

    def follow(self, place: int) -> None:
        """Another process in place of one that is dead."""
        self.numbers[place] = self._started + 1
        self.clients[place] = self.start()

    def finish(self, verdict: Verdict, *, power_was_cut: bool = False) -> None:
        """Let the last two clients deliver everything and the collector store it; then check the
        shards. A power cut, which may tear a write anywhere, may leave damaged files."""
        (self.folder / "stop").touch()
        statuses = [client.wait(2 * SETTLE_SECONDS) for client in self.clients]
        last = self.start()  # for the events that the first one to close has left
        statuses.append(last.wait(2 * SETTLE_SECONDS))
        verdict.require(statuses == [0, 0, 0], "status", statuses)
        left = [path.name for path in self.spool.glob("*segment-*")]
        if power_was_cut:
            left = [name for name in left if not name.startswith("damaged-")]
        verdict.require(not left, "left", left)
        settled = self.collector.empty(SETTLE_SECONDS)  # unended episodes are abandoned
        verdict.require(settled, "unsettled", "steps are in the journal, and count as lost")
        verdict.require(self.collector.stop() == 0, "status", "the collector's")
        judge(self.folder, verdict)

    def end(self) -> None:
        for client in self.clients:
            client.kill()
            client.wait()


def run(trial: Trial) -> Verdict:
    verdict, chance = Verdict(), random.Random(trial.seed)
    spooling = Spooling(trial)
    collector, pause = spooling.collector, threading.Event()
    try:
        with collector:
            kills = 0
            while trial.goes_on(kills, verdict):
                away = chance.random() < 0.5
                if away:
                    collector.kill()
                    verdict.count("outages")
                pause.wait(chance.uniform(0.1, 0.8))
                spooling.kill(chance.randrange(2))
                kills += 1
                if away and chance.random() < 0.5:
                    pause.wait(chance.uniform(0.1, 0.8))
                    spooling.kill(chance.randrange(2))
                    kills += 1
                if away:
                    collector.restart()
            verdict.count("kills", kills)
            spooling.finish(verdict)
    finally:
        spooling.end()
    act(trial, verdict)
    return verdict


def judge(folder: Path, verdict: Verdict) -> None:
    """Compare the processes' notes with the shards; a missing step must still be in the spool, or
    the refusal of its reward counted."""
    account = Account.of(folder / "root", list(folder.glob("notes-*")))
    unrewarded = account.stored.pop(0.0, 0)  # killed between an action and its reward
    account.found.pop(0.0, None)
    counted = refused_rewards(folder, account.lost)
    on_disk = spooled_rewards(folder / "volume/spool") & set(account.lost)
    for reward in (*counted, *on_disk):
        del account.acknowledged[reward]
    account.judge(verdict)
    verdict.count("refused", len(counted))
    verdict.count("on_disk", len(on_disk))
    verdict.count("unrewarded", unrewarded)
    verdict.count("longest_call_ms", round(longest_call(folder) * 1000))
    verdict.count("full", sum(len(path.read_text().splitlines()) for path in folder.glob("full-*")))


def longest_call(folder: Path) -> float:
    """The longest noted call, in seconds."""
    lines = [
        float(line) for path in folder.glob("longest-*") for line in path.read_text().splitlines()
    ]
    return max(lines, default=0.0)


def spooled_rewards(spool: Path) -> set[float]:
    """The unacknowledged events in segments that no process holds."""
    found: set[float] = set()
    for folder in spool.glob("segment-*"):
        segment = SpoolSegment.take_up(folder, PIECE_BYTES, False)
        while segment is not None and (read := segment.read(1000, ClientPolicy)):
            found.update(reward for _, event in read if (reward := getattr(event, "reward", None)))
        if segment is not None:
            segment.let_go()
    return found


def refused_rewards(folder: Path, missing: list[float]) -> list[float]:
    """The missing rewards whose steps are stored without one, and whose refusals a client has
    counted."""
    places = dict(
        line.split() for path in folder.glob("episodes-*") for line in path.read_text().splitlines()
    )
    rows = shard_rows(folder / "root")
    going_on = [row for row in rows if isinstance(row["continues"], str)]
    before = {row["eps_id"]: row["continues"] for row in going_on}

    def first(episode: str) -> str:
        """The episode that the caller began, for an episode that continues it."""
        while episode in before:
            episode = before[episode]
        return episode

    refusals = [
        line.split() for path in folder.glob("refused-*") for line in path.read_text().splitlines()
    ]
    refused = Counter(first(episode) for code, episode in refusals if code == "abandoned")
    bare = Counter(first(row["eps_id"]) for row in rows if row["rewards"] == 0.0)
    found = []
    for reward in missing:
        episode = places.get(str(reward), "")
        if refused[episode] and bare[episode]:
            refused[episode] -= 1
            bare[episode] -= 1
            found.append(reward)
    return found


def main(address: str, folder: str, number: str, mutant: str, options: str) -> None:
    if mutant != "none":
        mutants.find(mutant).plant(mutants.Patch(delay=mutants.DELAY_SECONDS))
    log(address, Path(folder), int(number), json.loads(options))


SCENARIO = Scenario(
    name="spool_kills",
    law="a step whose call returned is stored once, or its reward's refusal counted",
    unit="kills",
    quick=30,
    long=300,
    planted=8,
    run=run,
)


if __name__ == "__main__":
    main(*sys.argv[1:])
