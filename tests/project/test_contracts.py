"""The import contracts hold, and each is broken by the import that it is there to refuse."""

from __future__ import annotations

import ast
import importlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINT = Path(sys.executable).with_name("lint-imports")


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the packages and their contracts, free to be spoilt."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for package in ("headrace", "ingest", "policy", "storage"):
        ignore = shutil.ignore_patterns("__pycache__", ".*")
        shutil.copytree(ROOT / package, tmp_path / package, ignore=ignore)
    return tmp_path


def lint(root: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [LINT, "--no-cache"],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_contracts_hold(copy: Path) -> None:
    """The import contracts of pyproject.toml, as far as the source alone can show them."""
    result = lint(copy)
    assert result.returncode == 0, result.stdout


# contract -> (the module that breaks it, by what it imports)
BREAKS = {
    "packages": ("storage/spaces/descriptors.py", "policy.ope.estimators"),
    "headrace": ("headrace/output/console.py", "headrace.cli.options"),
    "ingest": ("ingest/client/transport.py", "ingest.collector.flow_control"),
    "policy": ("policy/networks/modules.py", "policy.worker.settings"),
    "storage": ("storage/shards/names.py", "storage.reading.ledger"),
    "cycles": ("storage/spaces/descriptors.py", "storage.spaces.codec"),
    "tests": ("policy/ope/estimators.py", "tests"),
    "pure": ("storage/experience/episode.py", "threading"),
    "thin-client": ("ingest/protocol/messages.py", "pyarrow"),
    "inference": ("policy/inference/spec.py", "urllib3"),
    "policy-in-ingest": ("ingest/episodes/judge.py", "policy.ope.estimators"),
}
CONTRACTS = {
    contract["id"]: contract
    for contract in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"][
        "contracts"
    ]
}


def test_every_contract_has_its_break() -> None:
    """A contract without a planted break may hold nothing."""
    assert CONTRACTS.keys() == BREAKS.keys()


def test_each_planted_import_breaks_its_contract(copy: Path) -> None:
    """A contract fails, and says where, when a module imports what it refuses, even in a function.

    All breaks are planted in one copy: the linter takes seconds, and reports by contract.
    """
    for module, planted in BREAKS.values():
        with (copy / module).open("a") as source:
            source.write(f"\n\ndef planted() -> None:\n    import {planted}\n")
    result = lint(copy)
    assert result.returncode == 1, result.stdout
    report = result.stdout.split("Broken contracts", 1)[-1]
    for contract, (module, planted) in BREAKS.items():
        title = re.escape(CONTRACTS[contract]["name"])
        section = re.search(rf"^{title}\n-+\n(.*?)(?=^[^\n]+\n---|\Z)", report, re.M | re.S)
        assert section, f"{contract} holds in spite of the planted import: {report}"
        importer = module.removesuffix(".py").replace("/", ".")
        ends = (importer.rpartition(".")[2], planted.rpartition(".")[2])
        assert all(end in section[1] for end in ends), f"{contract}: {section[1]}"


def test_a_folder_without_a_layer_is_refused(copy: Path) -> None:
    """The layers are exhaustive: a new folder has to be given its place."""
    folder = copy / "storage" / "attic"
    folder.mkdir()
    (folder / "__init__.py").touch()
    result = lint(copy)
    assert result.returncode == 1
    assert "attic" in result.stdout


FOLDERS = ("headrace", "ingest", "policy", "storage")
MODULES = sorted(file for package in FOLDERS for file in (ROOT / package).rglob("*.py"))
LARGEST_FOLDER = 20


def dotted(file: Path) -> str:
    name = ".".join(file.relative_to(ROOT).with_suffix("").parts)
    return name.removesuffix(".__init__")


NAMES = {dotted(file) for file in MODULES}


def imported_by(file: Path) -> set[str]:
    """Our modules that a file imports, by full name."""
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
            if folder.count(".") == 1 and folder != dotted(file.parent / "__init__.py"):
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
