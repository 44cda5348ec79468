"""A client on Windows and macOS needs nothing that only Linux has."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ingest.access.key_files import create_token
from policy.inference.spec import PolicySpec
from policy.inference.weight_store import WeightStore
from policy.networks.policy import Policy
from storage.spaces.descriptors import parse_space
from tests.collector_process import CollectorProcess, declare, shard_rows

SPEC = PolicySpec(parse_space("box:4"), parse_space("discrete:2"))
PROGRAM = Path(__file__).with_name("foreign_system.py")
SCOPES = ["log", "act", "weights:read", "weights:publish"]


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words], cwd=PROGRAM.parent, capture_output=True, text=True, check=False
    )


def test_a_client_works_where_nothing_of_posix_is(tmp_path: Path) -> None:
    """Without POSIX modules the client imports, publishes, logs and acts in both modes; functions
    that keep a root name what they need.
    """
    declare(tmp_path)
    token = create_token(tmp_path, "service", SCOPES)[1]
    mine = tmp_path / "mine"
    declare(mine)
    weights = Policy(SPEC, seed=0).get_weights()
    digest = WeightStore(mine, "default").add_candidate(
        weights, spec=SPEC.to_json(), metrics={}, lineage={}
    )
    with CollectorProcess(tmp_path) as process:
        words = [process.address, token, str(mine), digest]
        done = run(PROGRAM.name, *words)
        assert done.returncode == 0, done.stderr
        assert "expected Linux or macOS: this system has no file locks" in done.stdout
        assert process.stop() == 0
    assert len(shard_rows(tmp_path)) == 4


@pytest.mark.parametrize(
    "line", ["import fcntl", "import os; os.register_at_fork", "import signal; signal.SIGKILL"]
)
def test_what_is_taken_away_is_gone(line: str) -> None:
    """The simulation is effective: a module that needs a removed module or attribute does not
    load.
    """
    found = run("-c", f"import foreign_system\nforeign_system.take_away()\n{line}")
    assert found.returncode == 1
    assert "fcntl" in found.stderr or "has no attribute" in found.stderr
