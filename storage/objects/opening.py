"""Which implementation keeps the objects of a root: the only place that knows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from storage.objects.folder import FolderObjects
from storage.objects.interface import Objects

__all__ = ["objects_at"]


def objects_at(
    root: Path | str | Objects,
    *,
    make: bool = True,
    fsync: Callable[[int], None] | None = None,
) -> Objects:
    """The objects under a root: a folder's for a path; anything else is an implementation.

    `make`, `fsync`: of a folder (`FolderObjects`); other stores do not need them.
    """
    if isinstance(root, (Path, str)):
        return FolderObjects(root, make=make, fsync=fsync)
    return root
