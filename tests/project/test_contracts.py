"""The import contracts hold, and each is broken by the imports that it should forbid.

A planted import is an edge of grimp's graph, which is built once: a check takes milliseconds. One
real file per contract shows that `lint-imports` sees the same.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from copy import deepcopy
from functools import cache
from itertools import combinations
from pathlib import Path

import grimp
import pytest
from importlinter import configuration
from importlinter.application.use_cases import read_user_options
from importlinter.contracts.acyclic_siblings import AcyclicSiblingsContract
from importlinter.contracts.forbidden import ForbiddenContract
from importlinter.contracts.layers import LayersContract

ROOT = Path(__file__).parents[2]
LINT = Path(sys.executable).with_name("lint-imports")
PACKAGES = ("headrace", "ingest", "policy", "storage")
TYPES = {
    "acyclic_siblings": AcyclicSiblingsContract,
    "forbidden": ForbiddenContract,
    "layers": LayersContract,
}

configuration.configure()
OPTIONS = read_user_options(str(ROOT / "pyproject.toml"))
CONTRACTS = {contract["id"]: contract for contract in OPTIONS.contracts_options}


@cache
def graph() -> grimp.ImportGraph:
    return grimp.build_graph(*PACKAGES, include_external_packages=True, cache_dir=None)


def kept(contract: str, *planted: tuple[str, str]) -> bool:
    """Whether a contract holds for our code and the planted imports (importer, imported)."""
    options = CONTRACTS[contract]
    spoilt = deepcopy(graph())
    for importer, imported in planted:
        for module in {importer, imported} - spoilt.modules:
            external = module.partition(".")[0] not in PACKAGES
            spoilt.add_module(module, is_squashed=external)
        spoilt.add_import(importer=importer, imported=imported)
    made = TYPES[options["type"]](
        name=options["name"], session_options=OPTIONS.session_options, contract_options=options
    )
    return bool(made.check(spoilt, verbose=False).kept)


@pytest.mark.parametrize("contract", CONTRACTS)
def test_a_contract_holds(contract: str) -> None:
    """The import contracts of pyproject.toml that the source alone can show."""
    assert kept(contract)


PURE = ("ingest.episodes", "ingest.protocol", "policy.ope", "storage.experience")
WORLD = {
    "clock": ("time", "datetime", "sched"),
    "chance": ("random", "secrets", "uuid"),
    "thread": ("threading", "_thread", "queue", "multiprocessing", "concurrent", "asyncio"),
    "process": ("subprocess", "signal", "ctypes", "uvloop"),
    "file": ("os", "io", "pathlib", "glob", "shutil", "tempfile", "mmap", "fcntl", "sqlite3"),
    "log": ("logging", "watchdog"),
    "socket": ("socket", "select", "selectors", "ssl"),
    "HTTP": ("http", "urllib", "urllib3", "requests", "httptools", "uvicorn"),
}
HEAVY = {
    "learning": ("torch", "gymnasium", "ray", "onnx", "onnxruntime", "onnxscript"),
    "tables": ("pyarrow", "blake3", "pandas", "fastparquet", "scipy", "matplotlib"),
    "serving": ("uvicorn", "uvloop", "httptools", "prometheus_client", "watchdog"),
    "commands": ("typer", "rich"),
}
# contract -> the folders that it restricts, and the imports that it forbids, by groups
REFUSED = {
    "pure": (PURE, WORLD),
    "thin-client": (
        ("ingest.client", "ingest.delivery", "ingest.protocol", "policy.inference"),
        HEAVY,
    ),
    "inference": (("policy.inference",), {"HTTP": ("http", "urllib", "urllib3", "requests")}),
    "policy-in-ingest": (
        tuple(sorted(graph().find_children("ingest"))),
        {"policy": ("policy.ope.estimators", "policy.inference.spec", "policy.training.train")},
    ),
    "tests": (PACKAGES, {"ours": ("tests", "benchmarks")}),
}


@pytest.mark.parametrize(
    ("contract", "folder", "group"),
    [
        pytest.param(contract, folder, group, id=f"{contract}-{folder}-{name}")
        for contract, (folders, groups) in REFUSED.items()
        for folder in folders
        for name, group in groups.items()
    ],
)
def test_a_folder_is_refused_what_its_contract_names(
    contract: str, folder: str, group: tuple[str, ...]
) -> None:
    """A new module of the folder breaks the contract, by itself or by a module that it imports."""
    new, between = f"{folder}.planted", "storage.spaces.planted"
    for refused in group:
        assert not kept(contract, (new, refused)), refused
        assert not kept(contract, (new, between), (between, refused)), f"{refused}, indirectly"


def test_a_forbidden_contract_names_the_folders_and_modules_above() -> None:
    """Each folder or module of a contract is also planted here."""
    forbidden = {name for name, one in CONTRACTS.items() if one["type"] == "forbidden"}
    assert forbidden == REFUSED.keys()
    for name in forbidden - {"policy-in-ingest"}:
        folders, groups = REFUSED[name]
        assert set(CONTRACTS[name]["source_modules"]) == set(folders)
        refused = {module for group in groups.values() for module in group}
        assert set(CONTRACTS[name]["forbidden_modules"]) == refused


MAY_IMPORT_POLICY = {"ingest.client.local_inference", "ingest.collector.live_policies"}


def test_two_modules_of_ingest_may_import_policy() -> None:
    """The contract restricts exactly these modules, in any folder."""
    modules = {name for name in graph().modules if name.startswith("ingest.")}
    allowed = {name for name in modules if kept("policy-in-ingest", (name, "policy.ope.new"))}
    assert allowed == MAY_IMPORT_POLICY


def layers(package: str) -> list[str]:
    """The folders and modules of a package from the top, as ARCHITECTURE.md shows them."""
    picture = (ROOT / "ARCHITECTURE.md").read_text()
    found = re.search(rf"^{package}/ .*\n((?: {{4}}.*\n)+)", picture, re.M)
    assert found
    return ["__main__", *found[1].replace(".py", "").split()]


@pytest.mark.parametrize("package", PACKAGES)
def test_what_stands_below_imports_nothing_above(package: str) -> None:
    """The contract refuses every import upwards in ARCHITECTURE.md's picture."""
    names = layers(package)
    for above, below in combinations(names, 2):
        importer, imported = f"{package}.{below}.planted", f"{package}.{above}"
        assert not kept(package, (importer, imported)), f"{below} imports {above}"


@pytest.mark.parametrize("package", PACKAGES)
def test_the_picture_shows_every_folder(package: str) -> None:
    """ARCHITECTURE.md names exactly the folders and modules of the package."""
    children = {name.rpartition(".")[2] for name in graph().find_children(package)}
    assert {"__main__", *children} == set(layers(package))


@pytest.mark.parametrize("package", PACKAGES)
def test_a_folder_without_a_layer_is_refused(package: str) -> None:
    """The layers are exhaustive: a new folder must be added to one."""
    assert not kept(package, (f"{package}.attic", "storage.errors"))


def test_the_packages_import_downwards() -> None:
    """headrace > ingest > policy > storage, wherever in them the import is."""
    for above, below in combinations(PACKAGES, 2):
        assert not kept("packages", (f"{below}.planted", f"{above}.planted"))
        assert kept("packages", (f"{above}.planted", f"{below}.planted"))


def within_folders(package: str) -> Iterator[tuple[str, str]]:
    """The first import within each folder."""
    for folder in sorted(graph().find_children(package)):
        for module in sorted(graph().find_children(folder)):
            for imported in sorted(graph().find_modules_directly_imported_by(module)):
                if imported.startswith(f"{folder}."):
                    yield module, imported
                    break
            else:
                continue
            break


@pytest.mark.parametrize("package", PACKAGES)
def test_an_import_in_return_is_refused(package: str) -> None:
    """Two modules of a folder that import each other are a cycle."""
    planted = list(within_folders(package))
    assert planted
    for importer, imported in planted:
        assert not kept("cycles", (imported, importer)), f"{imported} imports {importer}"


# contract -> (the module that breaks it, by what it imports)
BREAKS = {
    "packages": ("storage/spaces/descriptors.py", "policy.ope.estimators"),
    "headrace": ("headrace/output/console.py", "headrace.cli.options"),
    "ingest": ("ingest/delivery/transport.py", "ingest.collector.flow_control"),
    "policy": ("policy/networks/modules.py", "policy.worker.settings"),
    "storage": ("storage/shards/names.py", "storage.reading.ledger"),
    "cycles": ("storage/spaces/descriptors.py", "storage.spaces.codec"),
    "tests": ("policy/ope/estimators.py", "tests"),
    "pure": ("storage/experience/episode.py", "threading"),
    "thin-client": ("ingest/protocol/messages.py", "pyarrow"),
    "inference": ("policy/inference/spec.py", "urllib3"),
    "policy-in-ingest": ("ingest/episodes/judge.py", "policy.ope.estimators"),
}


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the packages and their contracts, for planted violations."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for package in PACKAGES:
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


def test_every_contract_has_its_break() -> None:
    """Every contract has a planted violation; without one it might check nothing."""
    assert CONTRACTS.keys() == BREAKS.keys()


def test_each_planted_import_breaks_its_contract(copy: Path) -> None:
    """A contract fails and names the place if a module has a forbidden import, even in a function.

    All violations are planted in one copy: the linter takes seconds, and reports by contract.
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
