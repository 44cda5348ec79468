"""Versions off the chain: published, but no later version of their trainer builds on them.

A follower's version comes from its checkpoint. If the checkpoint is lost, the follower continues
from the previous one, and trains on the rows of the lost update again. The version keeps its
number, content and lineage; `versions/{n}/off_chain.json` records that no later one builds on it.
"""

from __future__ import annotations

from pathlib import Path

from storage.errors import StorageError, WeightsNotFound
from storage.system.files import replace_file
from storage.weights.files import number_of, read_document
from storage.weights.manifest import Json, seal_document
from storage.weights.store import WeightFolder

__all__ = ["described", "mark_off_chain", "marked", "off_chain"]

_MARK = "off_chain.json"


def mark_off_chain(directory: Path, version: int, why: str) -> None:
    """Mark a version of the store in `directory`. Raises OSError."""
    replace_file(
        directory / "versions" / str(version) / _MARK, seal_document("off_chain", {"why": why})
    )


def described(store: WeightFolder) -> tuple[list[dict[str, Json]], dict[int, str]]:
    """Return (manifests, damaged) of all versions, for display.

    Each manifest is a dict with `off_chain`: why the version is off the chain, or None. `damaged`
    is version -> why its manifest cannot be read.
    """
    found: list[dict[str, Json]] = []
    damaged: dict[int, str] = {}
    for version in store.versions():
        try:
            why = off_chain(store.directory, version)
            found.append({**store.manifest(version).to_json(), "off_chain": why})
        except (StorageError, OSError) as error:
            damaged[version] = str(error)
    return found, damaged


def marked(directory: Path) -> list[int]:
    """The versions of the store in `directory` that are off the chain, ascending."""
    found = (number_of(path.parent.name) for path in directory.glob(f"versions/*/{_MARK}"))
    return sorted(number for number in found if number)


def off_chain(directory: Path, version: int) -> str | None:
    """Why a version is off the chain; None when it is not. Raises WeightsDamaged."""
    path = directory / "versions" / str(version) / _MARK
    try:
        return str(read_document("off_chain", path)["why"])
    except WeightsNotFound:
        return None
