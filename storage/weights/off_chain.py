"""Versions off the chain: published, but no later version of their trainer builds on them.

A follower's version comes from its checkpoint. If the checkpoint is lost, the follower continues
from the previous one, and trains on the rows of the lost update again. The version keeps its
number, content and lineage; `versions/{n}/off_chain.json` records that no later one builds on it.
"""

from __future__ import annotations

from storage.errors import StorageError, WeightsNotFound
from storage.weights.files import PolicyFiles, number_of
from storage.weights.manifest import Json
from storage.weights.store import WeightFolder


def mark_off_chain(files: PolicyFiles, version: int, why: str) -> None:
    """Mark a version. Raises OSError."""
    files.write("off_chain", _mark(version), {"why": why})


def described(store: WeightFolder) -> tuple[list[dict[str, Json]], dict[int, str]]:
    """Return (manifests, damaged) of all versions, for display.

    Each manifest is a dict with `off_chain`: why the version is off the chain, or None. `damaged`
    is version -> why its manifest cannot be read.
    """
    found: list[dict[str, Json]] = []
    damaged: dict[int, str] = {}
    for version in store.versions():
        try:
            why = off_chain(store.files, version)
            found.append({**store.manifest(version).to_json(), "off_chain": why})
        except (StorageError, OSError) as error:
            damaged[version] = str(error)
    return found, damaged


def marked(files: PolicyFiles) -> list[int]:
    """The versions that are off the chain, ascending."""
    numbers = sorted(number for name in files.names("versions") if (number := number_of(name)))
    return [one for one in numbers if files.objects.status(files.name(_mark(one))) is not None]


def off_chain(files: PolicyFiles, version: int) -> str | None:
    """Why a version is off the chain; None when it is not. Raises WeightsDamaged."""
    try:
        return str(files.document("off_chain", _mark(version))["why"])
    except WeightsNotFound:
        return None


def _mark(version: int) -> str:
    return f"versions/{version}/off_chain.json"
