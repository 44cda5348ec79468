"""Which implementation keeps the objects of a root: the only place that knows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from storage.objects.folder import FolderObjects
from storage.objects.interface import Objects

Root: TypeAlias = Path | str | Objects
"""A local folder, an address such as `file:///data/run`, or an implementation."""

STORES: dict[str, Callable[[str], Objects]] = {
    "file": lambda address: FolderObjects(address.removeprefix("file://")),
}
"""Scheme of an address -> what opens it. A store of another kind is a line here."""


def objects_at(
    root: Root,
    *,
    make: bool = True,
    fsync: Callable[[int], None] | None = None,
) -> Objects:
    """The objects under a root. Raises ValueError for an address of an unknown scheme.

    `make`, `fsync`: of a folder (`FolderObjects`); other stores do not need them.
    """
    if not isinstance(root, (Path, str)):
        return root
    scheme, found, _ = str(root).partition("://")
    if not found:
        return FolderObjects(root, make=make, fsync=fsync)
    if scheme not in STORES:
        known = ", ".join(f"{one}://" for one in STORES)
        raise ValueError(f"expected a folder, or an address with {known}; got {root!r:.200}")
    return STORES[scheme](str(root))


def local_folder(root: Root) -> Path | None:
    """The folder of a root on a local disk; None for another root."""
    objects = objects_at(root)
    return objects.root if isinstance(objects, FolderObjects) else None


def require_local(root: Root, purpose: str) -> Path:
    """The folder of a root on a local disk. Raises ValueError, with the purpose, for another."""
    folder = local_folder(root)
    if folder is None:
        raise ValueError(f"{purpose}: expected a root in a local folder, got {root}")
    return folder
