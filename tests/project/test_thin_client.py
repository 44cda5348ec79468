"""The modules that a process really loads, from its `sys.modules`.

The linter reads imports; only a running interpreter shows what each `__init__` imports.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# A service that logs episodes imports only these folders.
CLIENT_FOLDERS = [
    "ingest/client",
    "ingest/delivery",
    "ingest/protocol",
    "policy/inference",
    "storage/spaces",
]
NEEDS_GYMNASIUM = {"storage.spaces.gymnasium_spaces"}
CLIENT = [
    ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for folder in CLIENT_FOLDERS
    for file in sorted((ROOT / folder).glob("*.py"))
]
HEAVY_FOR_CLIENT = {"torch", "pyarrow", "pandas", "watchdog", "gymnasium", "scipy", "matplotlib"}
HEAVY_FOR_COLLECTOR = {"torch", "pyarrow", "pandas", "scipy", "matplotlib"}
HEAVY_FOR_COLLECTOR |= {"urllib3", "requests"}


def loaded_by(statement: str) -> set[str]:
    """The top-level modules that a fresh interpreter has loaded after running `statement`."""
    code = f"import json, sys\n{statement}\nprint(json.dumps(list(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return {name.partition(".")[0] for name in json.loads(result.stdout)}


def test_the_clients_folders_load_nothing_heavy() -> None:
    """A service that logs loads neither torch nor pyarrow nor their dependencies."""
    modules = sorted(set(CLIENT) - NEEDS_GYMNASIUM)
    assert not loaded_by(f"import {', '.join(modules)}") & HEAVY_FOR_CLIENT


@pytest.mark.parametrize(
    "name", ["PolicyClient", "AsyncPolicyClient", "Publisher", "PolicySpec", "Box", "Refusal"]
)
def test_a_clients_public_names_load_nothing_heavy(name: str) -> None:
    """The same by the names that users import."""
    assert not loaded_by(f"from headrace import {name}") & HEAVY_FOR_CLIENT


def test_logging_and_acting_load_no_requests() -> None:
    """`requests` is for publishing and administration: a service that logs does not load it."""
    assert "requests" not in loaded_by("from headrace import PolicyClient")
    assert "requests" in loaded_by("from headrace import Publisher")


def test_importing_headrace_loads_none_of_its_packages() -> None:
    """Public names are loaded when they are first used, and not before."""
    assert not loaded_by("import headrace") & {"ingest", "policy", "storage", "numpy"}


def test_the_acknowledging_process_loads_nothing_heavy() -> None:
    """The process that acknowledges starts without pandas, torch, pyarrow, or a client."""
    collector = "import ingest.server.options, ingest.server.process, storage.shards.writer_process"
    assert not loaded_by(collector) & HEAVY_FOR_COLLECTOR


@pytest.mark.parametrize("module", sorted(NEEDS_GYMNASIUM))
def test_a_heavy_import_is_seen(module: str) -> None:
    """The check detects a module that loads gymnasium."""
    assert "gymnasium" in loaded_by(f"import {module}")
