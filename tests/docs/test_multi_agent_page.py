"""The page about several agents runs: its client logs, and its reader prints what it states."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from tests.collector_process import CollectorProcess
from tests.docs.test_docs import blocks, run_python


def test_the_page_about_several_agents_runs(tmp_path: Path, loaded: Path) -> None:
    """The first block declares the policies, a collector of that root gets what the client logs,
    and the reader finds it in the shards."""
    declare, log, read = blocks("docs/multi_agent.md", "python")
    python = loaded / "python"
    subprocess.run([python, "-c", declare], cwd=tmp_path, check=True)
    with CollectorProcess(tmp_path / "data/run/match") as collector:
        run_python(python, log, tmp_path, collector)
        status, state = collector.get("/v1/episodes/match-1")
        assert (status, state["state"]) == (200, "terminated")
        assert sorted(state["agents"]) == ["flyer_1", "walker_1", "walker_2"]
        assert collector.stop() == 0
        printed = run_python(python, read, tmp_path, collector).splitlines()
    assert printed == re.findall(r"^ *print\(.*\)  # (.*)$", read, re.MULTILINE)
