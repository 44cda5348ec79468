"""What an earlier build wrote (tests/fixtures), and that build itself."""

from __future__ import annotations

import atexit
import io
import json
import shutil
import subprocess
import tarfile
import tempfile
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.collector_process import shard_rows
from tests.headrace.command import ROOT, answer, headrace

FIXTURES = Path(__file__).parents[1] / "fixtures"
BUILDS = {"0.1.0": "6f2f31af"}
"""Folder of fixtures -> the commit that wrote it."""

Facts = dict[str, Any]


def unpacked(folder: Path, name: str, build: str = "0.1.0") -> Facts:
    """Unpack the archive of a fixture into a folder; return its facts."""
    with tarfile.open(FIXTURES / build / f"{name}.tgz") as archive:
        archive.extractall(folder, filter="data")
    facts: Facts = json.loads((FIXTURES / build / "facts.json").read_text())[name]
    return facts


def verified(root: Path) -> int:
    """The number of acknowledged steps of a root in which `verify` finds no fault."""
    report = answer(headrace("verify", "--root", root, "--json"))
    assert report["ok"], report
    acknowledged: int = report["acknowledged"]
    return acknowledged


def steps_in_shards(root: Path) -> Counter[tuple[str, str, int]]:
    """(episode, agent, t) -> rows."""
    return Counter((row["eps_id"], row["agent_id"], row["t"]) for row in shard_rows(root))


@cache
def source_of(build: str) -> Path:
    """The packages of an earlier build, as its commit has them.

    Without that commit nothing here can be tested, so this fails: clone with the history.
    """
    folder = Path(tempfile.mkdtemp(prefix="headrace-build-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    command = ["git", "archive", BUILDS[build], "headrace", "ingest", "policy", "storage"]
    archived = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    if archived.returncode:
        pytest.fail(
            f"expected commit {BUILDS[build]} of release {build} in this clone; fetch its history: "
            f"{archived.stderr.decode()}"
        )
    with tarfile.open(fileobj=io.BytesIO(archived.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return folder


def environment(build: str) -> dict[str, str]:
    """The environment in which Python runs the packages of a build; "": today's."""
    source = source_of(build) if build else ROOT
    return {"PYTHONPATH": str(source), "PYTHONSAFEPATH": "1"}
