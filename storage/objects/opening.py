"""Which implementation keeps the objects of a root."""

from __future__ import annotations

from pathlib import Path

from storage.objects.folder import FolderObjects
from storage.objects.interface import Objects

__all__ = ["objects_at"]


def objects_at(root: Path | str | Objects) -> Objects:
    """The objects under a root: a folder's for a path; anything else is an implementation."""
    return FolderObjects(root) if isinstance(root, (Path, str)) else root
