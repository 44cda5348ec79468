"""`evaluate` after failures that never ended, through a collector."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.collector_process import CollectorProcess, declare
from tests.headrace.command import answer, headrace
from tests.policy.judging.test_evaluate_verdicts import probabilities, stored

N, BATCH = 2000, 1000


def test_failures_of_one_action_that_are_abandoned_make_it_no_better(tmp_path: Path) -> None:
    """All actions earn .7, and half of the first one's failures never end: 3.75 % of all.

    Without them its mean would be .82, and the candidate that takes it better.
    """
    declare(tmp_path, "box:2", "discrete:4")
    rng = np.random.default_rng(2)
    actions, earned = rng.integers(4, size=N), rng.random(N) < 0.7
    lost = (actions == 0) & ~earned & (rng.random(N) < 0.5)
    obs = rng.normal(size=(N, 2)).astype(np.float32).tolist()
    with CollectorProcess(tmp_path) as collector:
        for first in range(0, N, BATCH):
            events: list[dict[str, object]] = []
            for i in range(first, first + BATCH):
                whose = {"episode_id": f"e{i}"}
                step = {"obs": obs[i], "action": int(actions[i]), "action_prob": 0.25}
                events += [{"type": "start", **whose}, {"type": "log_action", **whose, **step}]
                if not lost[i]:
                    reward = {"reward": float(earned[i])}
                    events += [{"type": "log_returns", **whose, **reward}, {"type": "end", **whose}]
            assert collector.post("/v1/events", {"events": events})[0] == 200
        collector.turn_clock()
        collector.await_abandoned(f"e{np.flatnonzero(lost)[-1]}")
        collector.settle(N)
    digest = stored(tmp_path, probabilities(0.97, 0.01, 0.01, 0.01))
    words = ("evaluate", digest, "--root", tmp_path, "--split", "all", "--json")
    for limits in (("--reward-range", "0", "1"), ()):
        (found,) = answer(headrace(*words, *limits))["logs"]
        failed = [one["name"] for one in found["diagnostics"] if not one["passed"]]
        assert (found["verdict"], failed) == ("cannot tell", ["lost_by_action"])
        assert found["episodes"] == N
