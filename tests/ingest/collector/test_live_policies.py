"""Following many policies costs as much as following a few, and no policy waits for long.

Checks are counted, in the ticks of the thread, so that no result depends on the machine's load.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ingest.collector.flow_control_file import FlowControlFile
from ingest.collector.live_policies import LivePolicies
from ingest.collector.trainer_watch import TrainerWatch
from ingest.collector.weights_thread import WeightsThread
from policy.inference.spec import PolicySpec
from policy.inference.weight_store import WeightStore
from policy.networks.policy import Policy
from storage.declarations.declaration import PolicyDeclaration
from storage.declarations.held_policies import held_version
from storage.spaces.descriptors import parse_space
from storage.weights.store import WeightFolder
from tests.ingest.collector.test_collector import GatedJournal, running

SPEC = PolicySpec(parse_space("box:4"), parse_space("discrete:2"))
MOST_CHECKS = 3_000
"""Checks per second for up to 2,000 policies: at 7 microseconds each, 2 % of a core."""


def declared(count: int) -> dict[str, PolicyDeclaration]:
    one = PolicyDeclaration(observation=SPEC.observation, action=SPEC.action)
    return {f"p{i}": replace(one, policy_id=f"p{i}") for i in range(count)}


def publish(root: Path, policy_id: str) -> None:
    store = WeightStore(root, policy_id)
    weights = Policy(SPEC).get_weights()
    store.publish(store.add_candidate(weights, spec=SPEC.to_json(), metrics={}, lineage={}))


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Policy -> how often its live version was checked."""
    found: Counter[str] = Counter()
    real = WeightFolder.stamp

    def stamp(store: WeightFolder) -> Any:
        found[store.policy_id] += 1
        return real(store)

    monkeypatch.setattr(WeightFolder, "stamp", stamp)
    return found


@pytest.mark.parametrize("count", [1, 3, 20, 130, 200, 2_000])
def test_no_number_of_policies_makes_more_checks(
    tmp_path: Path, checked: Counter[str], count: int
) -> None:
    """In the ticks of a second each policy is checked, and all of them together at most so often.
    One policy alone is checked at each tick of 5 ms."""
    live = LivePolicies(tmp_path, declared(count))
    assert 0.005 <= live.interval <= 0.05
    for _ in range(int(1 / live.interval)):
        live.take_turns()
    assert len(checked) == count
    assert min(checked.values()) >= {1: 200, 3: 200, 20: 149}.get(count, 1)
    assert checked.total() <= MOST_CHECKS


def test_a_version_of_one_of_many_policies_is_served_within_700_ms_of_ticks(
    tmp_path: Path,
) -> None:
    """It is the policy whose turn was just over."""
    live = LivePolicies(tmp_path, declared(2_000))
    live.take_turns()
    publish(tmp_path, "p0")
    ticks = 0
    while live.version("p0") is None:
        live.take_turns()
        ticks += 1
        assert ticks * live.interval <= 0.7
    assert live.version("p0") == 1


def test_a_request_checks_its_own_policies_alone(tmp_path: Path, checked: Counter[str]) -> None:
    """Also a job on a policy's files, which is followed by a check of what it changed."""

    async def main() -> None:
        live = LivePolicies(tmp_path, declared(300))
        await live.look(["p1"])
        await live.look_for_first(["p2", "unknown"])
        assert checked == {"p1": 1, "p2": 1}
        await live.look()
        assert checked.total() == 302
        live._thread = WeightsThread(lambda: None, 3600.0)  # its ticks would be counted too
        live._thread.start()
        checked.clear()
        assert await live.ask("p3", lambda store: store.policy_id) == "p3"
        await live.look(["p4"])
        assert checked == {"p3": 1, "p4": 1}
        live._thread.stop()

    asyncio.run(main())


def test_trainers_of_many_policies_are_read_in_turns(tmp_path: Path) -> None:
    """At most 500 at a look, or a quarter of them; of few policies all."""
    for count, looks in ((3, [3]), (1_100, [500, 1_000, 1_100]), (4_000, [1_000, 2_000])):
        watch = TrainerWatch(tmp_path, declared(count))
        found = []
        for _ in looks:
            watch.look()
            found.append(len(watch.off_chain()))
        assert found == looks


def test_a_change_of_flow_control_reads_no_other_policys_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files of 600 policies are read a few times each when all change, not 600 times."""
    reads: list[str] = []

    def counted(root: Path, name: str) -> int | None:
        reads.append(name)
        return held_version(root, name)

    monkeypatch.setattr("ingest.collector.flow_control_file.held_version", counted)

    async def main() -> None:
        async with running(GatedJournal()) as collector:
            file = FlowControlFile(collector, tmp_path)
            for i in range(600):
                file._changes.put((f"p{i}", None))
            file._changes.put(("last", 7))
            threading.Thread(target=file._write, daemon=True).start()
            async with asyncio.timeout(60):
                while held_version(tmp_path, "last") != 7:
                    await asyncio.sleep(0.01)

    asyncio.run(main())
    assert len(reads) < 3 * 601
    assert set(reads) == {*(f"p{i}" for i in range(600)), "last"}
