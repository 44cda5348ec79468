"""The process returns the memory of many bodies, episodes or parts."""

from __future__ import annotations

from pathlib import Path

import pytest

from ingest.server.memory import MUCH, Ebb
from tests.collector_process import CollectorProcess, declare
from tests.ingest.web.test_limits import wait_until

EPISODES, STEPS = 60, 4


@pytest.mark.parametrize(
    ("looks", "expected"),
    [
        ([(MUCH - 1, 0), (0, 0)], [False, False]),  # little
        ([(3 * MUCH, 2 * MUCH), (2 * MUCH, 2 * MUCH)], [False, False]),  # most of it is there
        ([(3 * MUCH, MUCH), (MUCH, MUCH), (MUCH, 0), (0, 0)], [True, False, True, False]),
        ([(0, MUCH), (MUCH, 0)], [False, True]),  # it fell later
    ],
)
def test_it_is_told_once_that_much_is_gone(
    looks: list[tuple[int, int]], expected: list[bool]
) -> None:
    ebb = Ebb()
    assert [ebb.fell(*look) for look in looks] == expected


def test_episodes_that_are_sealed_leave_no_memory_behind(tmp_path: Path) -> None:
    """Blocks of 80 kB, with small long-lived ones between them."""
    declare(tmp_path, observation="box:20000")
    with CollectorProcess(tmp_path, env={}) as collector:
        before = _resident(collector)
        obs = [0.5] * 20_000
        for step in range(STEPS):
            for number in range(EPISODES):
                name = f"e{number}"
                if not step:
                    collector.post("/v1/episodes", {"episode_id": name})
                    collector.post("/v1/episodes", {"episode_id": f"stays{number}"})
                collector.post(f"/v1/episodes/{name}/log_action", {"obs": obs, "action": 0})
        assert _resident(collector) - before > 15
        for number in range(EPISODES):
            collector.post(f"/v1/episodes/e{number}/end", {})
        wait_until(lambda: collector.get("/readyz")[1]["steps_in_shards"] == EPISODES * STEPS)
        wait_until(lambda: _resident(collector) - before < 12)


def _resident(collector: CollectorProcess) -> float:
    """Resident memory in MB."""
    text = Path(f"/proc/{collector.process.pid}/status").read_text()
    return int(text.partition("VmRSS:")[2].split()[0]) / 1_000
