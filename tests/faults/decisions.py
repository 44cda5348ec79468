"""SIGKILL between the reply to a remote `get_action` and the event that follows it.

The disk is slower than the reply, so the decision is lost with the collector. Sometimes a delayed
request reaches the restarted collector first, and the decision is drawn again. No step may be lost,
and each stored action must be the one that the client received.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from ingest.client.policy_client import PolicyClient
from ingest.protocol import messages as wire
from ingest.protocol.errors import Refusal
from policy.inference.spec import PolicySpec
from policy.inference.weight_store import WeightStore
from policy.networks.policy import Policy
from storage.spaces.descriptors import parse_space
from tests.collector_process import CollectorProcess, declare, shard_rows
from tests.faults import slow_disk
from tests.faults.scenario import Scenario, Trial, Verdict

SETTLE_SECONDS = 20.0
ACTIONS = 1000  # two independent draws agree once in this many times


def publish(root: Path) -> None:
    spec = PolicySpec(parse_space("box:4"), parse_space(f"discrete:{ACTIONS}"))
    store = WeightStore(root, "default")
    weights = Policy(spec, seed=1).get_weights()
    store.publish(store.add_candidate(weights, spec=spec.to_json(), metrics={}, lineage={}))


@dataclass
class Acting:
    """Episodes of one remote client, with a kill within each."""

    root: Path
    options: dict[str, Any]
    seed: int
    acted: dict[tuple[str, int], int] = field(default_factory=dict)
    kills: int = 0
    lost: int = 0  # kills that cost the collector a decision

    def run(self, trial: Trial) -> None:
        declare(self.root, action=f"discrete:{ACTIONS}")
        publish(self.root)
        chance = random.Random(self.seed)
        with CollectorProcess(self.root, **self.options) as collector:
            with PolicyClient(collector.address, "remote", timeout=20.0) as client:
                while self.kills < trial.size and trial.in_time:
                    self._episode(collector, client, chance)
            collector.empty(SETTLE_SECONDS)  # a drain on a busy machine may leave some
            assert collector.stop() == 0

    def _episode(
        self, collector: CollectorProcess, client: PolicyClient, chance: random.Random
    ) -> None:
        steps, again = chance.randint(1, 4), chance.random() < 0.5
        fatal = chance.randrange(steps)
        durable = chance.random() < 0.5
        name = client.start_episode(f"e{len(self.acted)}" if durable else None)
        if durable:  # otherwise the start is sent with the first action, and lost with it
            client.flush(20.0)
        for t in range(steps):
            obs = [chance.random() for _ in range(4)]
            seq = client._book.open[name].seq
            self.acted[name, t] = client.get_action(name, obs)
            if t == fatal:
                collector.kill()
                collector.restart()
                self.kills += 1
                self.lost += self._next_seq(collector, name) <= seq
                if again:  # the same request, delayed on its way, arrives only now
                    self._ask(collector, client, wire.GetAction(episode_id=name, seq=seq, obs=obs))
            if chance.random() < 0.5:
                client.log_returns(name, 1.0, {"t": t} if chance.random() < 0.5 else None)
        client.end_episode(name)

    def _next_seq(self, collector: CollectorProcess, name: str) -> int:
        return int(collector.get(f"/v1/episodes/{name}")[1].get("next_seq", 0))

    def _ask(self, collector: CollectorProcess, client: PolicyClient, ask: wire.GetAction) -> None:
        instance = client._outbox.instance
        batch = msgspec.to_builtins(wire.ActionBatch(instance=instance, actions=[ask]))
        assert collector.post("/v1/actions", batch)[0] == 200

    def judge(self, verdict: Verdict) -> None:
        """Compare the actions taken with the stored ones."""
        rows = shard_rows(self.root)
        stored = {(row["eps_id"], row["t"]): row["actions"] for row in rows}
        for step, count in Counter((row["eps_id"], row["t"]) for row in rows).items():
            verdict.require(count == 1, "doubled", step)
            verdict.require(step in self.acted, "unknown", step)
        for step, action in self.acted.items():
            verdict.require(step in stored, "lost", step)
            verdict.require(stored.get(step, action) == action, "differs", step)
        verdict.count("steps", len(self.acted))
        verdict.count("kills", self.kills)
        verdict.count("decisions_lost_by_kills", self.lost)
        verdict.require(self.lost > 0, "idle", "no kill came before its commit")


def run(trial: Trial) -> Verdict:
    """Episodes with a kill each, then the comparison."""
    verdict = Verdict()
    options = slow_disk.options(trial.mutant.name if trial.mutant else None)
    acting = Acting(trial.folder / "root", options, trial.seed)
    with trial.planted():
        try:
            acting.run(trial)
        except Refusal as refusal:
            verdict.require(False, "refused", refusal)
            return verdict
    acting.judge(verdict)
    return verdict


SCENARIO = Scenario(
    name="decisions",
    law="what is stored is what was acted on, whatever is killed after the reply",
    unit="kills",
    quick=100,
    long=200,
    planted=36,
    run=run,
)
