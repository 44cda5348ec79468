"""The public names are what the package roots say, and the roots load none of them early."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ["storage", "policy", "ingest"]


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_is_there(package: str) -> None:
    """Each name of `__all__` resolves, is listed by dir(), and comes from the room it is said."""
    root = importlib.import_module(package)
    for name in root.__all__:
        value = getattr(root, name)
        assert name in dir(root)
        assert getattr(value, "__module__", package).partition(".")[0] == package


@pytest.mark.parametrize("package", PACKAGES)
def test_the_type_checker_is_told_the_same_names(package: str) -> None:
    """What the root hands out at run time and what it declares for mypy are one list."""
    tree = ast.parse((ROOT / package / "__init__.py").read_text())
    declared = {
        alias.name: statement.module or package
        for branch in tree.body
        if isinstance(branch, ast.If) and ast.unparse(branch.test) == "TYPE_CHECKING"
        for statement in branch.body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }
    root = importlib.import_module(package)
    assert declared.keys() == set(root.__all__)
    for name, room in declared.items():
        assert getattr(importlib.import_module(room), name) is getattr(root, name)


@pytest.mark.parametrize("package", PACKAGES)
def test_an_unknown_name_is_an_attribute_error(package: str) -> None:
    """A lazy root refuses an unknown name the way a plain module does."""
    root = importlib.import_module(package)
    with pytest.raises(AttributeError, match=f"'{package}' has no attribute 'NoSuchName'"):
        root.NoSuchName  # noqa: B018 - reading the attribute is the test
