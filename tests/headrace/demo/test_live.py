"""The live loop as `headrace demo` runs it, with a goal that is near."""

from __future__ import annotations

import json
from pathlib import Path

from headrace.demo.live import run_live
from tests.headrace.command import headrace


def test_clients_act_with_what_they_taught_and_no_step_is_lost(tmp_path: Path) -> None:
    """Versions follow each other; the collector is killed; acted == acknowledged == in shards."""
    said: list[str] = []
    root = tmp_path / "cartpole"
    found = run_live(root, seed=1, say=said.append, goal=40.0, kill_at_version=3)
    assert found["reached"], "\n".join(said)
    assert found["killed"] == 1
    assert found["version"] > 3
    checked = json.loads(headrace("verify", "--root", root, "--json").stdout.splitlines()[-1])
    assert checked["ok"], checked["findings"]
    assert found["acted"] == checked["acknowledged"] == checked["in_shards"]
    assert Path(found["plot"]).stat().st_size > 1_000
