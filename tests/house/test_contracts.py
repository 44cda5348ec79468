"""The import contracts hold, and each is broken by the import that it is there to refuse."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINT = Path(sys.executable).with_name("lint-imports")


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the packages and their contracts, free to be spoilt."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for package in ("storage", "policy", "ingest"):
        ignore = shutil.ignore_patterns("__pycache__", ".*")
        shutil.copytree(ROOT / package, tmp_path / package, ignore=ignore)
    return tmp_path


def lint(root: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [LINT, "--no-cache"],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_contracts_hold(copy: Path) -> None:
    """Laws 1, 2, 3, 5, 6 of the house, as far as the source alone can show them."""
    result = lint(copy)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(
    ("room", "planted", "contract"),
    [
        (
            "storage/spaces/descriptors.py",
            "import policy.ope.estimators",
            "ingest > policy > storage",
        ),
        (
            "policy/ope/estimators.py",
            "import ingest.protocol.messages",
            "ingest > policy > storage",
        ),
        ("storage/spaces/descriptors.py", "import storage.spaces.codec", "No cycles between rooms"),
        ("policy/ope/estimators.py", "import headrace", "No package imports the front door"),
        ("storage/spaces/descriptors.py", "import pyarrow", "The thin client stays thin"),
        ("storage/experience/episode.py", "import threading", "Pure rooms reach no clock"),
        (
            "storage/experience/episode.py",
            "from time import monotonic",
            "Pure rooms reach no clock",
        ),
        ("storage/spaces/codec.py", "from storage import Episode", "imports the root of storage"),
        ("policy/ope/estimators.py", "import policy", "imports the root of policy"),
        (
            "ingest/protocol/messages.py",
            "from ingest import PolicyClient",
            "imports the root of ingest",
        ),
        (
            "ingest/protocol/messages.py",
            "import policy.ope.estimators",
            "Only the two inference doors",
        ),
    ],
)
def test_a_planted_import_breaks_its_contract(
    copy: Path, room: str, planted: str, contract: str
) -> None:
    """Each contract fails when a room imports what the law refuses, inside a function too."""
    with (copy / room).open("a") as source:
        source.write(f"\n\ndef planted() -> None:\n    {planted}\n")
    result = lint(copy)
    assert result.returncode == 1, result.stdout
    broken = [line for line in result.stdout.splitlines() if " BROKEN" in line]
    assert any(contract in line for line in broken), result.stdout
