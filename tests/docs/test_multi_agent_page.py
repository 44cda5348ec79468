"""The page about several agents runs: its client logs, and its reader prints what it states."""

from __future__ import annotations

import re
from pathlib import Path

from tests.collector_process import CollectorProcess, declare
from tests.docs.test_docs import blocks, run_python


def test_the_page_about_several_agents_runs(tmp_path: Path) -> None:
    """The client's block against a collector of two policies, the reader's on its shards."""
    log, read = blocks("docs/multi_agent.md", "python")
    root = tmp_path / "data/run/first"
    declare(root, "box:2", "discrete:3", policy_id="walker")
    declare(root, "box:4", "discrete:2", policy_id="flyer")
    with CollectorProcess(root) as collector:
        run_python(log, tmp_path, collector)
        status, state = collector.get("/v1/episodes/match-1")
        assert (status, state["state"]) == (200, "terminated")
        assert sorted(state["agents"]) == ["flyer_1", "walker_1", "walker_2"]
        assert collector.stop() == 0
        printed = run_python(read, tmp_path, collector).splitlines()
    assert printed == re.findall(r"^ *print\(.*\)  # (.*)$", read, re.MULTILINE)
