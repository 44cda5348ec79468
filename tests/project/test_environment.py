"""What pyproject.toml asks for, constraints.txt pins and the environment holds are one thing."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import version
from itertools import chain
from pathlib import Path

ROOT = Path(__file__).parents[2]


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {canonical(name): pinned for name, pinned in pairs}


def test_every_dependency_is_pinned() -> None:
    """No direct dependency, of any extra, is left to the day of the installation."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    asked = chain(project["dependencies"], *extras)
    names = {canonical(re.split(r"[\[<>=~! ]", line)[0]) for line in asked} - {"headrace"}
    assert names - pins().keys() == set()


def test_the_environment_holds_the_pinned_versions() -> None:
    """The tests speak about constraints.txt only if they run on it."""
    held = {name: version(name).partition("+")[0] for name in pins()}
    assert held == pins()


def test_contributing_shows_the_budgets_that_the_tests_print() -> None:
    """CONTRIBUTING's table holds the numbers of pyproject.toml, and a suite has a number."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    budgets = project["tool"]["headrace"]["test-budgets"]
    rows = re.findall(r"^\| `tests/(\w+)` \| (\d+) s", (ROOT / "CONTRIBUTING.md").read_text(), re.M)
    assert {suite: int(seconds) for suite, seconds in rows} == budgets
    suites = {path.parent.relative_to(ROOT / "tests").parts[0] for path in suite_files()}
    assert suites <= budgets.keys()


def suite_files() -> list[Path]:
    return sorted((ROOT / "tests").glob("*/**/test_*.py"))
