"""Broken builds of what is published: the store, its numbers, leases and pins."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import storage.objects.folder
import storage.system.files
import storage.weights.lease
import storage.weights.store
from policy.training.follower_state import FollowerState
from storage.weights.highest_numbers import HighestNumbers
from storage.weights.manifest import HighestVersions, Live
from storage.weights.store import WeightFolder
from tests.faults.mutants import Patch, mutant


@mutant(weights_power_loss=("vanished", "reused", "off_chain", "damaged_version", "went_back"))
def version_folders_not_synced(patch: Patch) -> None:
    """The folders of versions, candidates and pointers are not synced after a rename."""
    for module in (storage.system.files, storage.objects.folder):
        patch.replace(module, "sync_directory", lambda directory, fsync=None: None)


@mutant(weights_power_loss=("damaged_version", "vanished"))
def weights_not_synced(patch: Patch) -> None:
    """A version is renamed to its number before its content is synced."""

    def unsynced(path: Path, data: bytes, **given: Any) -> None:
        with open(path, "xb") as file:
            file.write(data)

    for module in (storage.system.files, storage.objects.folder):
        patch.replace(module, "write_synced", unsynced)


@mutant(publishers=("damaged_version", "ended", "stuck"))
def versions_filled_in_place(patch: Patch) -> None:
    """A version's folder has its number before its files are in it."""

    def in_place(target: Path, files: Mapping[str, bytes]) -> None:
        target.mkdir(parents=True)
        for name, data in files.items():
            storage.system.files.write_synced(target / name, data)

    patch.replace(storage.objects.folder, "_put_group", in_place)


@mutant(whole_restore="reused")
def numbers_forgotten(patch: Patch) -> None:
    """The highest numbers are not stored outside `weights/`."""
    patch.replace(HighestNumbers, "read", lambda self: HighestVersions(version=0, generation=0))


@mutant(two_trainers="two")
def lease_for_everybody(patch: Patch) -> None:
    """A lease is granted even if another process holds it."""
    patch.replace(storage.weights.lease, "require_free", lambda files, now: None)


@mutant(two_trainers="two")
def fence_ignored(patch: Patch) -> None:
    """Nothing checks whether a lease has expired."""
    for module in (storage.weights.lease, storage.weights.store):
        patch.replace(module, "require_fence", lambda files, fence: None)


@mutant(two_trainers="undone")
def rollback_not_looked_at(patch: Patch) -> None:
    """A trainer publishes over a rollback."""

    def free(self: WeightFolder, live: Live | None) -> None:
        return

    patch.replace(WeightFolder, "_require_no_hold", free)
    patch.replace(FollowerState, "_still_pinned", lambda self: False)
