"""What an earlier build wrote (tests/fixtures), and that build itself."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

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
