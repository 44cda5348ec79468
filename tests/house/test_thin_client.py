"""What a module drags into a process, seen in `sys.modules` of a process of its own.

The linter reads imports; only a running interpreter shows what a package root does on the way.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

THIN_CLIENT = [
    "ingest",
    "ingest.client.policy_client",
    "ingest.protocol.messages",
    "policy",
    "policy.inference.filters",
    "policy.inference.numpy_policy",
    "policy.inference.preprocessors",
    "policy.inference.spec",
    "storage",
    "storage.spaces.codec",
    "storage.spaces.descriptors",
    "storage.weights.store",
]
COLLECTOR = [
    "ingest.server.collect",
    "ingest.episodes.assembler",
    "ingest.collector.collector",
    "ingest.collector.live_policies",
    "ingest.server.process",
    "storage.journal.sqlite_journal",
    "storage.shards.writer_process",
]

HEAVY_FOR_CLIENT = {"torch", "pyarrow", "pandas", "watchdog", "gymnasium", "scipy", "matplotlib"}
HEAVY_FOR_COLLECTOR = {"torch", "pyarrow", "pandas", "scipy", "matplotlib", "urllib3"}


def loaded_by(module: str) -> set[str]:
    """The top-level modules that a fresh interpreter holds after it imported `module`."""
    code = f"import json, sys, {module}; print(json.dumps(list(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return {name.partition(".")[0] for name in json.loads(result.stdout)}


@pytest.mark.parametrize("module", THIN_CLIENT)
def test_the_thin_client_loads_nothing_heavy(module: str) -> None:
    """Law 2: a service that logs loads neither torch nor pyarrow nor what comes with them."""
    assert not loaded_by(module) & HEAVY_FOR_CLIENT


@pytest.mark.parametrize("module", COLLECTOR)
def test_the_acknowledging_process_loads_nothing_heavy(module: str) -> None:
    """Law 4: the process that acknowledges starts without pandas, torch, pyarrow, or a client."""
    assert not loaded_by(module) & HEAVY_FOR_COLLECTOR


def test_a_heavy_import_is_seen() -> None:
    """The instrument works: a module that does load pyarrow is found out."""
    assert "pyarrow" in loaded_by("pyarrow")
