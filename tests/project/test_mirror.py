"""The tests mirror the packages: whoever opens a module finds its tests by name."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.project.tested_by import TESTED_BY

ROOT = Path(__file__).parents[2]
PACKAGES = ("headrace", "ingest", "policy", "storage")
MODULES = {
    ".".join(file.relative_to(ROOT).with_suffix("").parts): file
    for package in PACKAGES
    for file in sorted((ROOT / package).rglob("*.py"))
    if file.name != "__init__.py"
}
DOTTED = re.compile(r"\w+(\.\w+)*")
MIRRORED = sorted(
    file for package in PACKAGES for file in (ROOT / "tests" / package).rglob("test_*.py")
)


def own_tests(module: Path) -> list[Path]:
    """`test_<module>.py` and `test_<module>_<topic>.py`, in the folder that mirrors its own."""
    folder = ROOT / "tests" / module.parent.relative_to(ROOT)
    stem = f"test_{module.stem.strip('_')}"
    return [file for file in folder.glob("test_*.py") if f"{file.stem}_".startswith(f"{stem}_")]


@pytest.mark.parametrize("test", MIRRORED, ids=lambda file: file.relative_to(ROOT).as_posix())
def test_a_test_is_named_after_a_module_of_its_folder(test: Path) -> None:
    """A file of tests says by its name and place which module it is about."""
    folder = ROOT / test.parent.relative_to(ROOT / "tests")
    assert any(test in own_tests(module) for module in folder.glob("*.py"))


@cache
def imports(file: Path) -> frozenset[Path]:
    """The files of the packages and the tests that a file imports, or starts by name."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = [node.value, f"{node.value}.__main__"]
        dotted = [name for name in names if DOTTED.fullmatch(name)]
        files = [ROOT / f"{name.replace('.', '/')}.py" for name in dotted]
        found |= {one for one in files if one.is_file()}
    return frozenset(found)


@cache
def reached_by(*tests: Path, anywhere: bool = False) -> frozenset[Path]:
    """What tests import, and what that imports in turn of its own folder, or of any."""
    seen: set[Path] = set()
    todo = [file for test in tests for file in {test, *imports(test)}]
    while todo:
        file = todo.pop()
        if file not in seen:
            seen.add(file)
            todo += [one for one in imports(file) if anywhere or one.parent == file.parent]
    return frozenset(seen)


@pytest.mark.parametrize("name", MODULES)
def test_a_module_has_tests_by_its_name_or_its_folders(name: str) -> None:
    """Tests of its own name, or of its folder; else `TESTED_BY` says where they are."""
    module = MODULES[name]
    folder = ROOT / "tests" / module.parent.relative_to(ROOT)
    if own_tests(module) or module in reached_by(*sorted(folder.glob("test_*.py"))):
        assert name not in TESTED_BY
    else:
        named = ROOT / "tests" / f"{TESTED_BY[name]}.py"
        assert module in reached_by(named, anywhere=True)


def test_the_table_names_modules_alone() -> None:
    """A module that was renamed or removed leaves the table."""
    assert TESTED_BY.keys() <= MODULES.keys()
