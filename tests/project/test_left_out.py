"""The test run names what it leaves out, and each named target exists."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

from tests.project.environments import ROOT, run

HEADRACE = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["headrace"]
LEFT_OUT = HEADRACE["left-out"]


def test_what_is_left_out_is_a_target_of_make() -> None:
    """The targets are those of a whole run, those that test nothing, and those that are named."""
    targets = re.findall(r"^([a-z0-9-]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE)
    run_or_idle = {
        "help",
        "setup",
        "test",
        "lint",
        "dags",
        "unit",
        "format",
        "demo",
        "docs",
        "clean",
    }
    assert sorted(LEFT_OUT) == sorted(set(targets) - run_or_idle)


def test_a_whole_run_names_what_it_leaves_out(tmp_path: Path) -> None:
    """A whole run leaves out the long tests and says so; a run of chosen files does neither."""
    for name in ("conftest.py", "pyproject.toml"):
        source = ROOT / "tests" / name if name == "conftest.py" else ROOT / name
        place = tmp_path / "tests" / name if name == "conftest.py" else tmp_path / name
        place.parent.mkdir(exist_ok=True)
        place.write_text(source.read_text())
    (tmp_path / "tests" / "test_two.py").write_text(
        "import pytest\n\n\n@pytest.mark.long\ndef test_one() -> None: ...\n\n\n"
        "def test_two() -> None: ...\n"
    )
    words = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:schemathesis",
    ]
    line = "left out, because they take longer: make long, "
    for chosen, is_named, ended in (
        ([], True, "1 passed, 1 deselected"),
        (["-m", "long"], False, "1 passed, 1 deselected"),
        (["tests/test_two.py"], False, "2 passed"),
    ):
        output = run(*words, *chosen, cwd=tmp_path).stdout
        assert (line in output) == is_named
        assert ended in output


def test_what_begins_first_is_there() -> None:
    assert [name for name in HEADRACE["first"] if not (ROOT / name).is_file()] == []
