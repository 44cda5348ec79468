"""`storage`, `policy` and `ingest` are common words: a stranger under one of them is named."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def run_with_stranger(
    tmp_path: Path, stranger: str, *command: str
) -> tuple[subprocess.CompletedProcess[str], Path]:
    """Run Python with another package of the name `stranger` in front; its file comes back."""
    planted = tmp_path / stranger / "__init__.py"
    planted.parent.mkdir()
    planted.write_text("")
    result = subprocess.run(
        [sys.executable, *command],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    return result, planted


@pytest.mark.parametrize(
    "importer", ["ingest", "ingest.protocol.messages", "policy", "policy.ope.estimators"]
)
def test_a_foreign_storage_stops_the_import(tmp_path: Path, importer: str) -> None:
    """The import fails, says which file won and what to do."""
    result, planted = run_with_stranger(tmp_path, "storage", "-c", f"import {importer}")
    assert result.returncode == 1
    last = result.stderr.splitlines()[-1]
    assert last.startswith("ImportError: ")
    assert str(planted) in last
    assert "Uninstall or rename it" in last


@pytest.mark.parametrize("stranger", ["storage", "policy", "ingest"])
def test_the_front_door_names_a_foreign_package(tmp_path: Path, stranger: str) -> None:
    """`headrace` says the same of each of the three, in one line."""
    result, planted = run_with_stranger(tmp_path, stranger, "-m", "headrace", "--version")
    assert result.returncode == 1
    assert str(planted) in result.stderr
    assert "Uninstall or rename it" in result.stderr
    assert "Traceback" not in result.stderr


def test_without_a_stranger_the_front_door_opens(tmp_path: Path) -> None:
    """A foreign package of any other name disturbs nobody."""
    result, _ = run_with_stranger(tmp_path, "warehouse", "-m", "headrace", "--version")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("headrace ")
