"""Shared by the tests that run programs of the documentation."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.loaded_python import loaded_python


@pytest.fixture(scope="session")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a `python` and a `headrace` with torch loaded; one for all workers."""
    folder, own = tmp_path_factory.getbasetemp(), os.getpid()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder, own = folder.parent, os.getppid()
    return loaded_python(folder, sys.executable, own)
