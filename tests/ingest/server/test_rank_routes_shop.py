"""A shop from its first event to a promoted canary: no impossible offer is ever shown."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ingest.client.policy_client import PolicyClient
from policy.inference.action_rule import ActionRule
from policy.inference.spec import ModuleSpec, PolicySpec
from storage.declarations.declaration import PolicyDeclaration
from storage.declarations.policy_files import save_declaration
from storage.spaces.descriptors import Box, Dict, Discrete, MultiBinary
from tests.collector_process import CollectorProcess, shard_rows
from tests.headrace.command import answer, headrace

OFFERS, WINDOW, ROUND = 12, 30.0, 30
KINDS = ("books", "games", "shoes", "tools")
FEATURES = ("price", *(f"kind={kind}" for kind in KINDS))
SPEC = PolicySpec(
    Dict(
        {
            "action_mask": MultiBinary((OFFERS,)),
            "candidates": Box((OFFERS, len(FEATURES)), ragged=True),
            "likes": Box((len(KINDS),)),
        }
    ),
    Discrete(OFFERS),
    ModuleSpec(kind="scorer"),
    action_rule=ActionRule("greedy", explore=1.0),
)
ACTIONS = {
    f"{kind}-{n}": {"price": 0.2 + 0.3 * n, "kind": kind} for n in range(3) for kind in KINDS
}


@dataclass
class Worker:
    """Shows offers, of which others are available each time, and gets clicks later."""

    address: str
    seed: int
    shown: dict[str, str] = field(default_factory=dict)
    clicked: set[str] = field(default_factory=set)
    impossible: list[Any] = field(default_factory=list)
    versions: set[int] = field(default_factory=set)

    def work(self, events: int) -> None:
        rng = random.Random(self.seed)
        self.seed += 1
        with PolicyClient(self.address) as client:
            for _ in range(events // ROUND):
                clicks = [self._show(client, rng) for _ in range(ROUND)]
                rng.shuffle(clicks)  # they come after all decisions, in another order
                for event_id in filter(None, clicks):
                    client.reward(event_id, 1.0)
                    self.clicked.add(event_id)
            client.flush()

    def _show(self, client: PolicyClient, rng: random.Random) -> str:
        """Show a visitor an offer; the event, if they click."""
        kind = rng.randrange(len(KINDS))
        likes = np.eye(len(KINDS))[kind]
        names = rng.sample([*ACTIONS], rng.randint(4, OFFERS))
        gone = rng.sample(names, rng.randint(0, 3))
        reply = client.rank(
            {"likes": likes}, {name: ACTIONS[name] for name in names}, excluded=gone
        )
        item = reply.reward_action_id
        if item not in names or item in gone:
            self.impossible.append((reply, names, gone))
        self.shown[reply.event_id] = item
        self.versions.add(reply.policy_version)
        likely = 0.9 - float(ACTIONS[item]["price"]) * 0.6 if KINDS[kind] in item else 0.05
        return reply.event_id if rng.random() < likely else ""


def work(workers: Sequence[Worker], events: int) -> float:
    """A day of all workers; the share of events with a click."""
    before = sum(len(worker.clicked) for worker in workers)
    with ThreadPoolExecutor(len(workers)) as pool:
        list(pool.map(lambda worker: worker.work(events), workers))
    return (sum(len(worker.clicked) for worker in workers) - before) / (len(workers) * events)


def shelve(collector: CollectorProcess, steps: int) -> None:
    """Let the reward windows pass, and wait for the shards."""
    collector.turn_clock()
    collector.settle(steps)


@pytest.mark.long
def test_a_shop_learns_what_to_offer(tmp_path: Path) -> None:
    """Three workers show 12 offers, a random part of which is available, and clicks come later; two
    nights of training, a verdict, a canary and its promotion. Every event is in a shard once, with
    its clicks and an offer that was possible, and the clicks become more."""
    declared = PolicyDeclaration(
        observation=SPEC.observation,
        action=SPEC.action,
        spec=SPEC.to_json(),
        reward_window=WINDOW,
        candidate_features=FEATURES,
        seal_seconds=0.5,
    )
    save_declaration(tmp_path, declared)
    at_root = ("--root", tmp_path, "--json")
    learn = ("--algorithm", "dm", "--explore", "0.2", "--set", "updates=600")
    with CollectorProcess(tmp_path) as collector:
        workers = [Worker(collector.address, seed) for seed in range(0, 3000, 1000)]
        first = work(workers, 810)
        shelve(collector, 2430)
        answer(headrace("train", *learn, *at_root))
        judged = answer(headrace("evaluate", *at_root))["logs"]
        assert [one["verdict"] for one in judged] == ["better"], [one["reasons"] for one in judged]
        assert answer(headrace("publish", *at_root))["version"] == 1
        work(workers, 300)
        shelve(collector, 3330)
        candidate = answer(headrace("train", *learn, *at_root))["candidate"]
        answer(headrace("publish", candidate, "--canary", "50%", *at_root))
        last = work(workers, 300)
        total, compared = 4230, {"episodes": 0}
        while compared["episodes"] < 100:  # episodes count once others came a window later
            work(workers, ROUND)
            shelve(collector, total := total + 3 * ROUND)
            compared = json.loads(headrace("canary", "--age", WINDOW + 1, *at_root).stdout)
        assert compared["verdict"] != "worse"
        assert answer(headrace("promote", "--no-gate", *at_root))["version"] == 2
        work(workers, ROUND)
        shelve(collector, total := total + 3 * ROUND)
        assert collector.stop() == 0
    assert [worker.impossible for worker in workers] == [[], [], []]
    assert set.union(*(worker.versions for worker in workers)) == {-1, 1, 2}
    rows = shard_rows(tmp_path)
    shown = {name: item for worker in workers for name, item in worker.shown.items()}
    clicked = set.union(*(worker.clicked for worker in workers))
    assert len(rows) == len(shown) == total
    for row in rows:
        rank = json.loads(row["infos"])["rank"]
        assert shown[row["eps_id"]] == rank["item"] == rank["items"][row["actions"]]
        assert row["obs__action_mask"][row["actions"]] == 1
        assert row["rewards"] == (row["eps_id"] in clicked)
    assert last > first + 0.1
