"""Versions off the chain: published, and not what later versions of their trainer went on from.

A follower's version comes from its checkpoint. When that is lost the follower goes on from the one
before it, and trains on the rows of the lost update again. The version keeps its number, content
and lineage; `versions/{n}/off_chain.json` says that no later one has it behind it.
"""

from __future__ import annotations

from pathlib import Path

from storage.system.files import replace_file
from storage.weights.manifest import open_document, seal_document

__all__ = ["mark_off_chain", "off_chain"]

_MARK = "off_chain.json"


def mark_off_chain(directory: Path, version: int, why: str) -> None:
    """Mark a version of the store in `directory`. Raises OSError."""
    replace_file(
        directory / "versions" / str(version) / _MARK, seal_document("off_chain", {"why": why})
    )


def off_chain(directory: Path, version: int) -> str | None:
    """Why a version is off the chain; None when it is not. Raises WeightsDamaged."""
    path = directory / "versions" / str(version) / _MARK
    try:
        return str(open_document("off_chain", path.read_bytes(), path)["why"])
    except FileNotFoundError:
        return None
