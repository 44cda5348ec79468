"""The public names are `headrace.__all__`: loaded when first used, the same objects everywhere."""

from __future__ import annotations

import ast
import contextlib
import copy
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
import typing
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

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
PUBLIC_MODULES = {"headrace.compat.rllib", "headrace.rllib"}
"""Imported by their own names: for programs of RLlib, and with Ray in an environment of its own."""
# Raised and caught inside one folder, or by our own commands: no caller sees them.
INTERNAL = {
    "CellError", "DemoFailed", "LiveFailed", "Malformed", "NotRegular", "OutOfTurn", "RowError",
    "ScanIncomplete", "StepError", "Stopped", "TooManyEpisodes",
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


@pytest.mark.parametrize("name", headrace.__all__)
def test_every_public_method_has_a_docstring(name: str) -> None:
    """The site's reference leaves out what has none."""
    public = getattr(headrace, name)
    classes = inspect.getmro(public) if inspect.isclass(public) else ()
    undocumented = [
        f"{base.__qualname__}.{method}"
        for base in classes
        if base.__module__.startswith(PACKAGES)
        for method, given in vars(base).items()
        if not method.startswith("_")
        and (inspect.isfunction(given) or isinstance(given, (classmethod, staticmethod, property)))
        and not inspect.getdoc(getattr(public, method))
    ]
    assert undocumented == []


def test_the_type_checker_is_told_the_same_names() -> None:
    """The names at run time and those declared for mypy are the same."""
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
    """An unknown name raises the same error as in a plain module."""
    with pytest.raises(AttributeError, match="'headrace' has no attribute 'NoSuchName'"):
        headrace.NoSuchName  # noqa: B018 - reading the attribute is the test


@cache
def exceptions() -> dict[str, str]:
    """Every exception class that we define, with its module."""
    found = {}
    for name in MODULES:
        if name.startswith("headrace.rllib."):
            continue  # these import Ray, which has an environment of its own
        module = importlib.import_module(name)
        for one, value in vars(module).items():
            ours = inspect.isclass(value) and value.__module__ == name
            if ours and issubclass(value, Exception) and not one.startswith("_"):
                found[one] = name
    return found


def test_every_exception_is_public_and_stands_in_the_tree() -> None:
    """Every error of ours can be caught by a public name."""
    ours = exceptions().keys() - INTERNAL
    assert ours == ours & set(headrace.__all__)
    tree = (headrace.__doc__ or "").partition("Exceptions:")[2]
    assert ours <= set(re.findall(r"\w+", tree))


def made(kind: type[Exception]) -> Exception:
    for values in (("what",), ("what", "more"), ("code", "text", 400)):
        with contextlib.suppress(TypeError):
            return kind(*values)
    raise AssertionError(f"{kind.__name__}: how is it made?")


def test_an_exception_survives_the_way_between_processes() -> None:
    """An error from another process has the same class and text."""
    kinds = [getattr(headrace, name) for name in exceptions().keys() & {*headrace.__all__}]
    assert kinds
    for kind in kinds:
        error = made(kind)
        again = copy.copy(error)  # by the same protocol as a pickle
        assert (type(again), str(again)) == (kind, str(error))


def test_the_trees_lines_are_true() -> None:
    """The tree lists each class under a base class."""
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
    assert set(IMPORT.findall(page.read_text())) <= {"headrace", *PUBLIC_MODULES}


def test_a_deep_import_on_a_page_is_seen() -> None:
    """The check detects imports inside a block and at a prompt."""
    text = "from headrace import Box\n    from storage.spaces import Box\n>>> import policy\n"
    assert IMPORT.findall(text) == ["headrace", "storage.spaces", "policy"]


CODE = re.compile(r"`([^`\n]+)`")
DOTTED = re.compile(r"(?<![\w./\"'])(?:headrace|ingest|policy|storage)(?:\.[A-Za-z_]\w*)+")
FOR_DEVELOPERS = {ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md", ROOT / "docs/decisions.md"}
LOGGERS = {
    logger
    for package in PACKAGES
    for file in (ROOT / package).rglob("*.py")
    for logger in re.findall(r'getLogger\("(headrace\.\w+)"\)', file.read_text())
}


def dotted_names(text: str) -> set[str]:
    """`package.name` in code between backticks."""
    return {name for code in CODE.findall(text) for name in DOTTED.findall(code)}


def exists(dotted: str) -> bool:
    """Whether a module has this name, or an object in a module."""
    try:
        pkgutil.resolve_name(dotted)
    except (ImportError, AttributeError):
        return False
    return True


@pytest.mark.parametrize(
    "page", sorted({*PAGES} - FOR_DEVELOPERS), ids=lambda page: page.relative_to(ROOT).as_posix()
)
def test_pages_for_users_name_public_names_alone(page: Path) -> None:
    """Names in the text, too, are in `headrace` and exist."""
    public = {"headrace.__all__", *(f"headrace.{name}" for name in headrace.__all__)}
    names = dotted_names(page.read_text()) - LOGGERS
    names = {name for name in names if not name.startswith((*PUBLIC_MODULES,))}
    assert all(".".join(name.split(".")[:2]) in public and exists(name) for name in names), names


@pytest.mark.parametrize("page", sorted(FOR_DEVELOPERS), ids=lambda page: page.name)
def test_pages_for_developers_name_what_exists(page: Path) -> None:
    """Pages for developers may name modules, and these must exist."""
    assert not {name for name in dotted_names(page.read_text()) if not exists(name)}


def test_a_dotted_name_on_a_page_is_seen() -> None:
    """The check detects names within a call, but not in a path."""
    text = "`storage.to_pandas(x)`, `root/policy.json`, `headrace.cli.options`, storage.spaces"
    assert dotted_names(text) == {"storage.to_pandas", "headrace.cli.options"}
    assert exists("headrace.to_pandas")
    assert exists("storage.reading.shard_reader.ShardReader.save")
    assert not exists("storage.to_pandas")


def test_an_error_inside_a_module_keeps_its_cause(tmp_path: Path) -> None:
    """`from headrace import X` names the failure, not just "cannot import name 'X'"."""
    code = (
        "import logging, msgspec, numpy, urllib3\n"
        "del logging.getLogger\n"  # stands for a module that a platform may lack
        "from headrace import PolicyClient\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: headrace.PolicyClient: ")
    assert "has no attribute" in last


def test_dir_lists_what_can_be_loaded() -> None:
    """So that `help(headrace)` and who looks at each name work on the base install."""
    code = (
        "import sys\n"
        "from headrace.extras import EXTRA_OF\n"
        "sys.modules |= dict.fromkeys(EXTRA_OF)\n"  # as if no extra was installed
        "import headrace, pydoc\n"
        "def there(name):\n"
        "    try:\n"
        "        return getattr(headrace, name) is not None\n"
        "    except ModuleNotFoundError as error:\n"
        "        assert 'pip install' in str(error), error\n"
        "names = headrace._HOMES\n"
        "print(set(filter(there, names)) ^ (set(dir(headrace)) & set(names)))\n"
        "print('Exceptions:' in pydoc.render_doc(headrace))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines() == ["set()", "True"], done.stderr
    assert headrace.__version__


@pytest.mark.parametrize("masked", ["['torch']", "['pyarrow']", "EXTRA_OF"])
def test_a_star_import_takes_what_is_installed(masked: str) -> None:
    """`__all__` has every name that loads on this install, and no other."""
    code = (
        "import sys\n"
        "from headrace.extras import EXTRA_OF\n"
        f"sys.modules |= dict.fromkeys({masked})\n"
        "from headrace import *\n"
        "import headrace\n"
        "def loads(name):\n"
        "    try:\n"
        "        return getattr(headrace, name) is globals()[name]\n"
        "    except ModuleNotFoundError as error:\n"
        "        assert 'pip install' in str(error), error\n"
        "print(PolicyClient.__name__, {*filter(loads, headrace._HOMES)} ^ {*headrace.__all__})\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.stdout == "PolicyClient set()\n", done.stderr


def test_a_type_checker_sees_a_misspelt_name(tmp_path: Path) -> None:
    """mypy reports an unknown name, and knows the existing ones."""
    page = tmp_path / "page.py"
    page.write_text(
        "from headrace import PolicyClient, PolicyClinet\n"
        "import headrace\n"
        "headrace.WeightStore, headrace.WieghtStore\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", page],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert re.findall(r"has no attribute \"(\w+)\"", done.stdout) == ["PolicyClinet", "WieghtStore"]


# Parameters that accept any object with some methods, and objects that the library returns.
NOT_NAMED = {
    "HttpSession",  # requests.Session, or urllib3's pool
    "MeanStdFilter",  # what `get_filters` gave
    "NoFilter",  # as above
    "Pin",  # of Live, which the store makes
    "Publishable",  # a policy
    "Resampled",  # of the estimators' call of an interval
    "PartBlock",  # what collectors write: users pass parts
    "ShardSource",  # MultiAgentReader's and PolicyServerInput's own
    "PolicySettings",  # a mapping of `policy_config`
    "Progress",  # a function
    "SamplingWorker",  # a RolloutWorker
}


def parameter_types(name: str) -> set[str]:
    """Our classes in the parameters of a public class or function."""
    value = getattr(headrace, name)
    if inspect.isclass(value):
        calls = [one for key, one in inspect.getmembers(value, inspect.isfunction)
                 if key == "__init__" or not key.startswith("_")]  # fmt: skip
    elif inspect.ismodule(value):
        calls = [getattr(value, one) for one in value.__all__]
    else:
        calls = [value]

    def classes(hint: Any) -> Iterator[type]:
        if inspect.isclass(hint):
            yield hint
        for part in typing.get_args(hint):
            yield from classes(part)

    found = set()
    for call in filter(inspect.isfunction, calls):
        hints = typing.get_type_hints(call)
        hints.pop("return", None)
        found |= {one for hint in hints.values() for one in classes(hint)}
    return {one.__name__ for one in found if one.__module__.partition(".")[0] in PACKAGES}


NAMES = sorted({*headrace.__all__} - {"to_pandas"})  # whose hints need pandas


@pytest.mark.parametrize("name", NAMES)
def test_what_a_public_name_takes_is_public(name: str) -> None:
    """The types of a public name's arguments are public, so that a caller can construct them."""
    assert parameter_types(name) <= {*headrace.__all__, *NOT_NAMED}


def test_a_missing_extra_is_named() -> None:
    """A public name of an extra that is not installed says what to install."""
    code = "import sys; sys.modules['torch'] = None\nfrom headrace import Learner\n"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert "headrace.Learner needs torch" in done.stderr
    assert "pip install 'headrace[train]'" in done.stderr
