"""pyproject.toml's requirements, constraints.txt and the environment agree."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterable
from functools import cache
from importlib.metadata import packages_distributions, version
from itertools import chain, pairwise
from pathlib import Path

import pytest

from tests.project.environments import PROJECT, ROOT, canonical, name_of, requirements


def pins(file: str = "constraints.txt") -> dict[str, str]:
    lines = (ROOT / file).read_text().splitlines()
    pairs = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {canonical(name): pinned for name, pinned in pairs}


def test_every_dependency_is_pinned() -> None:
    """Every direct dependency, of every extra, is pinned."""
    asked = chain(PROJECT["dependencies"], *PROJECT["optional-dependencies"].values())
    pinned = pins().keys() | pins("tests/rllib/constraints.txt").keys()
    assert {name_of(line) for line in asked} - {"headrace"} - pinned == set()


def test_the_environment_holds_the_pinned_versions() -> None:
    """The tests run on the versions of constraints.txt."""
    held = {name: version(name).partition("+")[0] for name in pins()}
    assert held == pins()


# --- every dependency has its reason -------------------------------------------------------------

SHIPPED = ("headrace", "ingest", "policy", "storage")
EXTRAS = [extra for extra in PROJECT["optional-dependencies"] if extra not in ("all", "dev")]
DEV = requirements("dev")[len(requirements()) :]


@cache
def imported(*folders: str) -> frozenset[tuple[str, str]]:
    """(package that is installed, module of it that is imported) of the files in some folders."""
    owners = packages_distributions()
    paths = [ROOT / folder for folder in folders]
    files = [file for path in paths for file in ([path] if path.is_file() else path.rglob("*.py"))]
    names = chain.from_iterable(modules_of(file) for file in files)
    return frozenset(
        (canonical(owner), name)
        for name in names
        for owner in owners.get(name.partition(".")[0], ())
    )


def modules_of(file: Path) -> Iterable[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def unused(asked: Iterable[str], *folders: str) -> set[str]:
    """The packages asked for that no file of some folders imports."""
    return {name_of(line) for line in asked} - {owner for owner, _ in imported(*folders)}


def reasons(requirement: str) -> list[str]:
    """The comment beside each line of a requirement in pyproject.toml, or on the line above it."""
    lines = [line.strip() for line in (ROOT / "pyproject.toml").read_text().splitlines()]
    found = []
    for above, line in pairwise(lines):
        if line.startswith(f'"{requirement}",'):
            beside = line.partition("#")[2].strip()
            found.append(beside or (above if above.startswith("#") else ""))
    return found


@pytest.mark.parametrize("requirement", requirements(*EXTRAS))
def test_a_dependency_is_imported_by_shipped_code_and_says_why(requirement: str) -> None:
    """Shipped code imports every required package, and each has a reason; Ray does not declare all
    that it needs."""
    texts = reasons(requirement)
    assert any(text.startswith("for Ray: ") for text in texts) or not unused(
        [requirement], *SHIPPED
    )
    assert texts
    assert all(texts)


@pytest.mark.parametrize("requirement", DEV)
def test_a_dependency_of_the_tests_is_used_and_says_why(requirement: str) -> None:
    """Each is imported by tests, benchmarks or examples, run by name, or has types for mypy."""
    (reason,) = reasons(requirement)
    if reason.startswith("tool: "):
        (called, *_) = re.findall(r"`([^`]+)`", reason)
        runners = [ROOT / "Makefile", *(ROOT / "tests").rglob("*.py")]
        texts = [file.read_text() for file in runners if file != Path(__file__)]
        assert any(called in text for text in texts), called
    elif reason.startswith("types for mypy"):
        stubbed = requirement.removesuffix("-stubs").removeprefix("types-")
        assert not unused([stubbed], *SHIPPED)
    else:
        assert reason
        assert not unused([requirement], "tests", "benchmarks", "examples", "hatch_build.py")


def test_what_nothing_imports_is_found() -> None:
    """The check detects an unused package, also if its module has another name."""
    asked = ["starlette>=1", "no-such-package", "prometheus-client", "numpy"]
    assert unused(asked, *SHIPPED) == {"starlette", "no-such-package"}
    assert reasons("no-such-package") == []


def test_private_modules_have_a_ceiling() -> None:
    """Private modules may change in any release, so their package has an upper bound."""
    private = {
        owner
        for owner, name in imported(*SHIPPED)
        if any(part.startswith("_") and part != "__version__" for part in name.split(".")[:-1])
    }
    assert private == {"uvicorn"}
    asked = {name_of(line): line for line in requirements(*EXTRAS)}
    assert all("<" in asked[name] for name in private)


def test_contributing_shows_the_budgets_that_the_tests_print() -> None:
    """CONTRIBUTING's table has the budgets of pyproject.toml, and every suite has a budget."""
    budgets = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["headrace"][
        "test-budgets"
    ]
    rows = re.findall(r"^\| `tests/(\w+)` \| (\d+) s", (ROOT / "CONTRIBUTING.md").read_text(), re.M)
    assert {suite: int(seconds) for suite, seconds in rows} == budgets
    suites = {path.parent.relative_to(ROOT / "tests").parts[0] for path in suite_files()}
    assert suites <= budgets.keys()


def suite_files() -> list[Path]:
    return sorted((ROOT / "tests").glob("*/**/test_*.py"))
