"""Each folder has a docstring, lists what others use, and imports only what it may."""

from __future__ import annotations

import ast
import importlib
import sys
from copy import deepcopy
from functools import cache
from pathlib import Path

import grimp
import pytest

from tests.project.may_import import MAY_IMPORT, MAY_REACH_PACKAGES, MAY_REACH_STDLIB

ROOT = Path(__file__).parents[2]
FOLDERS = ("headrace", "ingest", "policy", "storage")
MODULES = sorted(file for package in FOLDERS for file in (ROOT / package).rglob("*.py"))
LARGEST_FOLDER = 20
SMALL = 80


def dotted(file: Path) -> str:
    name = ".".join(file.relative_to(ROOT).with_suffix("").parts)
    return name.removesuffix(".__init__")


FILES = {dotted(file): file for file in MODULES}
NAMES = FILES.keys()


@cache
def imported_by(file: Path) -> set[str]:
    """The modules of ours that a file imports, by full name."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            found |= {name, name.rpartition(".")[0]} & NAMES
    return found - {dotted(file.parent / "__init__.py")}


@cache
def shown_modules() -> dict[str, set[str]]:
    """Folder -> its modules that another folder imports, or that hold a public name."""
    shown: dict[str, set[str]] = {}
    for file in MODULES:
        for name in imported_by(file):
            folder, _, module = name.rpartition(".")
            if folder.count(".") and folder != dotted(file.parent / "__init__.py"):
                shown.setdefault(folder, set()).add(module)
    return shown


@pytest.mark.parametrize("folder", sorted({file.parent for file in MODULES}), ids=dotted)
def test_a_folder_says_what_it_is(folder: Path) -> None:
    """At most twenty modules, and an `__init__` that says what they are and what others may use."""
    root = ast.parse((folder / "__init__.py").read_text())
    assert ast.get_docstring(root)
    assert len(list(folder.glob("*.py"))) - 1 <= LARGEST_FOLDER
    name = dotted(folder / "__init__.py")
    if name.count("."):
        package = importlib.import_module(name)
        assert sorted(package.__all__) == package.__all__
        assert set(package.__all__) == shown_modules().get(name, set())


@cache
def small_modules_of_one() -> dict[str, list[str]]:
    """Folder -> its modules of fewer than eighty lines that at most one other module imports."""
    importers: dict[str, set[Path]] = {name: set() for name in NAMES}
    for file in MODULES:
        for name in imported_by(file):
            importers[name].add(file)
    found: dict[str, list[str]] = {}
    for name, file in FILES.items():
        small = len(file.read_text().splitlines()) < SMALL
        if name.count(".") > 1 and small and len(importers[name]) < 2:
            folder, _, module = name.rpartition(".")
            found.setdefault(folder, []).append(module)
    return found


@pytest.mark.parametrize(
    "folder", sorted({dotted(file.parent / "__init__.py") for file in MODULES})
)
def test_a_small_module_of_one_user_says_why_it_is_apart(folder: str) -> None:
    """A small module with one user needs a reason in its package's docstring: otherwise it would be
    a part of its user."""
    docstring = importlib.import_module(folder).__doc__ or ""
    small = small_modules_of_one().get(folder, [])
    assert [name for name in small if f"`{name}`" not in docstring] == []


@cache
def graph() -> grimp.ImportGraph:
    return grimp.build_graph(*FOLDERS, include_external_packages=True, cache_dir=None)


def with_import(importer: str, imported: str) -> grimp.ImportGraph:
    spoilt = deepcopy(graph())
    if imported not in spoilt.modules:
        spoilt.add_module(imported, is_squashed=True)
    spoilt.add_import(importer=importer, imported=imported)
    return spoilt


def folder_of(module: str) -> str:
    """`storage.reading` of one of its modules, `storage` of a module beside the folders."""
    return dotted(FILES[module].parent / "__init__.py")


def is_ours(module: str) -> bool:
    return module.partition(".")[0] in FOLDERS


def imports_of(folder: str, imports: grimp.ImportGraph) -> set[str]:
    """Our folders, and packages of others, that the modules of a folder import directly."""
    found: set[str] = set()
    for module in NAMES - {"headrace"}:
        if folder_of(module) == folder:
            found |= imports.find_modules_directly_imported_by(module)
    ours = {".".join(name.split(".")[:2]) for name in found if is_ours(name)}
    others = {name for name in found if not is_ours(name)}
    return (ours - {folder}) | (others - sys.stdlib_module_names)


def reached_by(folder: str, imports: grimp.ImportGraph) -> tuple[set[str], set[str]]:
    """Modules of the standard library and packages of others, directly or by other modules."""
    reached = imports.find_upstream_modules(folder, as_package=True)
    found = {name for name in reached if not is_ours(name)} - {"__future__"}
    return found & sys.stdlib_module_names, found - sys.stdlib_module_names


def test_every_folder_has_its_line() -> None:
    """A new folder says what it may import."""
    assert MAY_IMPORT.keys() == {folder_of(name) for name in NAMES}


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_a_folder_imports_what_its_line_says(folder: str) -> None:
    """A folder imports exactly what its line permits; unneeded permissions are removed."""
    assert imports_of(folder, graph()) == set(MAY_IMPORT[folder].split())


@pytest.mark.parametrize("folder", MAY_REACH_STDLIB)
def test_a_pure_folder_reaches_what_its_line_says(folder: str) -> None:
    """No clock, randomness, log, signal or file of the standard library, also indirectly."""
    assert reached_by(folder, graph())[0] == set(MAY_REACH_STDLIB[folder].split())


@pytest.mark.parametrize("folder", MAY_REACH_PACKAGES)
def test_a_thin_folder_reaches_what_its_line_says(folder: str) -> None:
    """Only these packages, also indirectly: every service pays for an import."""
    assert reached_by(folder, graph())[1] == set(MAY_REACH_PACKAGES[folder].split())


@pytest.mark.parametrize(
    ("module", "imported"),
    [
        ("policy.inference.spec", "ray"),
        ("policy.inference.spec", "msgspec"),
        ("ingest.delivery.transport", "prometheus_client"),
        ("ingest.collector.collector", "torch"),
        ("policy.ope.estimators", "torch"),
        ("policy.envs.base_env", "policy.networks.policy"),
        ("ingest.web.asgi", "ingest.episodes.judge"),
    ],
)
def test_an_import_that_no_line_allows_is_seen(module: str, imported: str) -> None:
    """The check detects an import that layers and lists of forbidden modules permit."""
    folder = folder_of(module)
    assert imports_of(folder, with_import(module, imported)) != imports_of(folder, graph())


@pytest.mark.parametrize("folder", MAY_REACH_STDLIB)
@pytest.mark.parametrize("imported", ["logging", "random", "uuid", "ctypes", "sys"])
def test_a_module_of_the_outside_world_is_seen(folder: str, imported: str) -> None:
    """The check detects an import planted in a pure folder."""
    module = sorted(graph().find_children(folder))[0]
    assert imported in reached_by(folder, with_import(module, imported))[0]
