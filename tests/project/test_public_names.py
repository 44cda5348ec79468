"""The public names are `headrace.__all__`: loaded when first used, the same objects everywhere."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import headrace

ROOT = Path(__file__).parents[2]
PACKAGES = ("headrace", "ingest", "policy", "storage")
MODULES = sorted(
    ".".join(file.relative_to(ROOT).with_suffix("").parts)
    for package in PACKAGES
    for file in (ROOT / package).rglob("*.py")
    if file.name not in ("__init__.py", "__main__.py")
)
# Raised and caught inside one folder, or by a command of ours: no caller sees them.
INTERNAL = {
    "CellError", "DemoFailed", "LiveFailed", "Malformed", "OutOfTurn", "RowError", "ScanIncomplete",
    "StepError", "Stopped", "TooManyEpisodes",
}  # fmt: skip


@pytest.mark.parametrize("name", headrace.__all__)
def test_every_public_name_is_there(name: str) -> None:
    """Each name resolves, is listed by dir(), and is the object of the module it lives in."""
    value = getattr(headrace, name)
    home = headrace._HOMES[name]
    module = importlib.import_module(home)
    assert value is (module if inspect.ismodule(value) else getattr(module, name))
    assert name in dir(headrace)
    if inspect.isclass(value) or inspect.isfunction(value):
        assert value.__module__ == home


def test_the_type_checker_is_told_the_same_names() -> None:
    """What is handed out at run time and what is declared for mypy are one list."""
    tree = ast.parse((ROOT / "headrace" / "__init__.py").read_text())
    declared = {
        alias.name: statement.module or ""
        for branch in tree.body
        if isinstance(branch, ast.If) and ast.unparse(branch.test) == "TYPE_CHECKING"
        for statement in branch.body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }
    homes = {
        name: home.rpartition(".")[0] if home.endswith(f".{name}") else home
        for name, home in headrace._HOMES.items()
    }
    assert declared == homes


def test_an_unknown_name_is_an_attribute_error() -> None:
    """An unknown name is refused the way a plain module refuses it."""
    with pytest.raises(AttributeError, match="'headrace' has no attribute 'NoSuchName'"):
        headrace.NoSuchName  # noqa: B018 - reading the attribute is the test


def exceptions() -> dict[str, str]:
    """Every exception class that we define, with its module."""
    found = {}
    for name in MODULES:
        module = importlib.import_module(name)
        for one, value in vars(module).items():
            ours = inspect.isclass(value) and value.__module__ == name
            if ours and issubclass(value, Exception) and not one.startswith("_"):
                found[one] = name
    return found


def test_every_exception_is_public_and_stands_in_the_tree() -> None:
    """Who catches an error of ours need not know in which folder it lives."""
    ours = exceptions().keys() - INTERNAL
    assert ours == ours & set(headrace.__all__)
    tree = (headrace.__doc__ or "").partition("Exceptions:")[2]
    assert ours <= set(re.findall(r"\w+", tree))


def test_the_trees_lines_are_true() -> None:
    """A class stands in the tree under a class that it derives from."""
    tree = (headrace.__doc__ or "").partition("Exceptions:")[2]
    above: list[tuple[int, str]] = []
    for line in filter(str.strip, tree.splitlines()):
        depth = re.search(r"\w", line)
        assert depth
        names = re.match(r"[\w, ]+", re.sub(r"\s{2,}.*| \(.*", "", line[depth.start() :]))
        assert names, line
        above = [one for one in above if one[0] < depth.start()]
        for name in filter(None, re.split(r",\s*", names[0].strip())):
            if above:
                child, parent = getattr(headrace, name), above[-1][1]
                assert parent in {base.__name__ for base in child.__mro__}, line
        above.append((depth.start(), names[0].strip().split(",")[0]))


IMPORT = re.compile(r"^\s*(?:>>> )?(?:from|import) ((?:ingest|policy|storage|headrace)\b\S*)", re.M)
PAGES = sorted(
    file
    for pattern in ("*.md", "docs/**/*.md", "airflow_dags/**/*.py", "airflow_dags/*.md",
                    "examples/**/*.py", "data/**/*.md")
    for file in ROOT.glob(pattern)
    if ".venv" not in file.parts
)  # fmt: skip


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_pages_import_public_names_alone(page: Path) -> None:
    """Documents, examples and DAGs import from `headrace`, and from nowhere deeper."""
    assert set(IMPORT.findall(page.read_text())) <= {"headrace"}


def test_a_deep_import_on_a_page_is_seen() -> None:
    """The instrument works, inside a block and at a prompt."""
    text = "from headrace import Box\n    from storage.spaces import Box\n>>> import policy\n"
    assert IMPORT.findall(text) == ["headrace", "storage.spaces", "policy"]


def test_an_error_inside_a_module_keeps_its_cause(tmp_path: Path) -> None:
    """`from headrace import X` names the failure, not just "cannot import name 'X'"."""
    code = (
        "import logging, msgspec, numpy, urllib3\n"
        "del logging.getLogger\n"  # stands for what a platform may lack
        "from headrace import PolicyClient\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: headrace.PolicyClient: ")
    assert "has no attribute" in last


def test_a_missing_extra_is_named() -> None:
    """A public name of an extra that is not installed says what to install."""
    code = "import sys; sys.modules['torch'] = None\nfrom headrace import Learner\n"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert "headrace.Learner needs torch" in done.stderr
    assert "pip install 'headrace[train]'" in done.stderr
