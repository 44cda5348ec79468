"""The live loop as `headrace demo` runs it, with an easy goal."""

from __future__ import annotations

import json
from pathlib import Path

from headrace.demo.live import moving_average, run_live
from tests.headrace.command import headrace


def test_clients_act_with_what_they_taught_and_no_step_is_lost(tmp_path: Path) -> None:
    """Versions follow each other; the collector is killed; acted == acknowledged == in shards."""
    lines: list[str] = []
    root = tmp_path / "cartpole"
    found = run_live(root, seed=1, say=lines.append, goal=40.0, kill_at_version=3)
    assert found["reached"], "\n".join(lines)
    assert found["killed"] == 1
    assert found["version"] > 3
    checked = json.loads(headrace("verify", "--root", root, "--json").stdout.splitlines()[-1])
    assert checked["ok"], checked["findings"]
    assert found["acted"] == checked["acknowledged"] == checked["in_shards"]
    assert Path(found["plot"]).stat().st_size > 1_000
    for split in ("held_out", "all"):  # "all": the few that were not trained on
        said_of_it = headrace("evaluate", "--root", root, "--split", split, "--json").stdout
        (log,) = json.loads(said_of_it)["logs"]
        assert log["verdict"] == "cannot tell"
        for one in log["target"]:  # once "WIS 33 [33, 33]", of one effective episode
            assert one["ess"] >= 30 or one["interval"] == [None, None]


def test_a_moving_average_is_the_mean_of_each_window() -> None:
    """Each value is the mean of the last `window` numbers; there is none before a window is
    full."""
    assert moving_average([1.0, 2.0, 3.0, 6.0], 2) == [1.5, 2.5, 4.5]
    assert moving_average([1.0], 2) == []
