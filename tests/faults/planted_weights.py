"""Broken builds around publishing and serving."""

from __future__ import annotations

from typing import Any

import storage.objects.folder
from ingest.collector.weight_follower import WeightFollower
from storage.weights.highest_numbers import HighestNumbers
from storage.weights.manifest import Served
from storage.weights.served import ServedRecords
from storage.weights.store import WeightFolder
from tests.faults.mutants import Patch, mutant


@mutant(publishing="undurable")
def published_without_syncing_the_folder(patch: Patch) -> None:
    """A version's files are synced, but not the folders with their names."""
    patch.replace(storage.objects.folder, "sync_directory", lambda directory, fsync=None: None)


@mutant(publishing="undone")
def pin_ignored(patch: Patch) -> None:
    """A trainer publishes over a rollback."""
    patch.replace(WeightFolder, "_require_no_hold", lambda self, live: None)


@mutant(publishing="unregistered")
def registration_never_renewed(patch: Patch) -> None:
    """A collector registers only changes, and does not renew its registration."""
    register = patch.original(WeightFollower, "register")

    def once(self: WeightFollower[Any], **given: Any) -> None:
        if self._renew_at == float("-inf"):
            register(self, **given)

    patch.replace(WeightFollower, "register", once)


@mutant(publishing="ghost")
def registration_never_ends(patch: Patch) -> None:
    """A collector that died long ago still counts as registered."""

    def registered(self: ServedRecords, now: float) -> list[Served]:
        return self.read()

    patch.replace(ServedRecords, "registered", registered)


@mutant(publishing="older")
def older_generation_taken_up(patch: Patch) -> None:
    """Weights restored from a backup are served instead of the later ones."""
    patch.replace(WeightFollower, "_require_newer", lambda self, wanted, served: None)


@mutant(publishing="renamed")
def numbers_kept_with_the_weights_alone(patch: Patch) -> None:
    """No file outside `weights/` records the numbers given."""
    patch.replace(HighestNumbers, "note", lambda self, version, generation: None)
