"""The tests mirror the packages: a module's tests are found by its name."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import headrace
from tests.project.tested_by import TESTED_BY

ROOT = Path(__file__).parents[2]
PACKAGES = ("headrace", "ingest", "policy", "storage")
MODULES = {
    ".".join(file.relative_to(ROOT).with_suffix("").parts): file
    for package in PACKAGES
    for file in sorted((ROOT / package).rglob("*.py"))
    if file.name != "__init__.py"
}
FILES = {
    ".".join(file.relative_to(ROOT).with_suffix("").parts): file
    for folder in (*PACKAGES, "tests")
    for file in (ROOT / folder).rglob("*.py")
}
MIRRORED = sorted(
    file for package in PACKAGES for file in (ROOT / "tests" / package).rglob("test_*.py")
)


def own_tests(module: Path) -> list[Path]:
    """The module's `test_<module>.py` and `test_<module>_<topic>.py`, in the test folder that
    mirrors its folder."""
    folder = ROOT / "tests" / module.parent.relative_to(ROOT)
    stem = f"test_{module.stem.strip('_')}"
    return [file for file in folder.glob("test_*.py") if f"{file.stem}_".startswith(f"{stem}_")]


def test_a_test_is_named_after_a_module_of_its_folder() -> None:
    """The name and folder of a test file identify its module."""
    own = {test for module in MODULES.values() for test in own_tests(module)}
    assert [file.relative_to(ROOT).as_posix() for file in MIRRORED if file not in own] == []


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
            if "__name__" in [alias.name for alias in node.names]:
                names.append(f"{node.module}.__main__")
            if node.module == "headrace":
                names += [headrace._HOMES.get(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = [node.value, f"{node.value}.__main__"]
        elif isinstance(node, ast.Name) and node.id == "_STORAGE":  # starts `python -m storage`
            names = ["storage.__main__"]
        found |= {FILES[name] for name in names if name in FILES}
    return frozenset(found)


@cache
def reached_by(test: Path) -> frozenset[Path]:
    """The modules that a test imports, directly or indirectly."""
    seen: set[Path] = set()
    todo = [test]
    while todo:
        file = todo.pop()
        if file not in seen:
            seen.add(file)
            todo += imports(file)
    return frozenset(seen)


def is_about(test: Path, name: str) -> bool:
    """Whether a test imports a module itself, or names it and reaches it by what it imports."""
    module = MODULES[name]
    named = re.search(rf"`{re.escape(name)}`", test.read_text())
    return module in imports(test) or (named is not None and module in reached_by(test))


def test_a_module_has_tests_by_its_name_or_in_the_table() -> None:
    """A module has tests of its name, or `TESTED_BY` lists tests that name or import it."""
    named = {name for name, file in MODULES.items() if own_tests(file)}
    assert TESTED_BY.keys() == MODULES.keys() - named
    wrong = {
        name: test
        for name, test in TESTED_BY.items()
        if not is_about(ROOT / "tests" / f"{test}.py", name)
    }
    assert wrong == {}


def test_the_name_of_another_module_is_not_enough(tmp_path: Path) -> None:
    """The check rejects a test of something else."""
    test = tmp_path / "test_else.py"
    test.write_text("from storage.errors import StorageError\n")
    assert is_about(test, "storage.errors")
    assert not is_about(test, "storage.system.files")
    test.write_text('"""Names `storage.system.files`, and does not use it."""\n')
    assert not is_about(test, "storage.system.files")
