"""A follower's checkpoints: the latest one, and the previous one in case that is damaged.

    checkpoints/follow.{fence}.safetensors           the latest of the lease with that number
    checkpoints/follow.{fence}.before.safetensors    the previous one
    checkpoints/*.damaged-{n}                        unusable files, kept for examination

The holder of a lease (storage.weights.lease) writes only files with the lease's number, so a
process that has lost its lease cannot overwrite a newer checkpoint. Each file is written under
another name, synced, and renamed; then the folder is synced.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from policy.algorithms.learner import Learner
from storage.errors import WeightsDamaged, WeightsNotFound
from storage.system.files import make_directory, sync_directory

log = logging.getLogger("headrace.trainer")

CHECKPOINT = "follow.safetensors"
"""The name of the checkpoint in a follower's candidates, the same for all of its files."""

_NAME = re.compile(r"follow(?:\.(?P<fence>\d+))?(?P<before>\.before)?\.safetensors")


class CheckpointFiles:
    """The checkpoints of one policy's followers, for the holder of lease `fence`."""

    def __init__(self, folder: Path, fence: int) -> None:
        self._folder, self._fence = folder, fence
        self.latest = folder / f"follow.{fence}.safetensors"
        self._before = folder / f"follow.{fence}.before.safetensors"
        self.loaded = self.latest  # which one `load` took

    def found(self) -> list[Path]:
        """The checkpoint files, latest first."""
        known = []
        for path in self._folder.glob("follow*.safetensors"):
            if match := _NAME.fullmatch(path.name):
                known.append((-int(match["fence"] or 0), bool(match["before"]), path))
        return [path for _, _, path in sorted(known)]

    def save(self, learner: Learner, document: Mapping[str, Any]) -> None:
        """Save a learner and a document with it; durable on return.

        Raises OSError; the latest checkpoint is then unchanged.
        """
        make_directory(self._folder)
        rotates = self.latest.exists()
        if rotates:
            temporary = self._folder / f".{self._before.name}.{secrets.token_hex(6)}.tmp"
            os.link(self.latest, temporary)
            os.replace(temporary, self._before)
            temporary.unlink(missing_ok=True)  # still there if both names were one file already
        learner.save(self.latest, reader_state=document)
        if rotates:  # this lease has two checkpoints: those of earlier leases are not needed
            for path in self.found():
                if path not in (self.latest, self._before) and not self._is_later(path):
                    self._remove(path)

    def _is_later(self, path: Path) -> bool:
        match = _NAME.fullmatch(path.name)
        return match is not None and int(match["fence"] or 0) > self._fence

    def load(self, learner: Learner) -> dict[str, Any] | None:
        """Load the latest intact checkpoint into a learner; return its document, or None.

        Damaged ones are set aside. Raises OSError, and ValueError for a checkpoint of a learner
        with other settings.
        """
        for path in self.found():
            try:
                document = learner.load(path)
            except (WeightsDamaged, WeightsNotFound) as error:
                self.set_aside(path, str(error))
                continue
            if document is not None:
                self.loaded = path
                return document
            self.set_aside(path, "expected the position of a reader in it, got none")
        return None

    def set_aside(self, path: Path, why: str) -> None:
        """Rename a checkpoint that cannot be used, and log `why`."""
        number = 1
        while (aside := path.with_name(f"{path.name}.damaged-{number}")).exists():
            number += 1
        os.rename(path, aside)
        sync_directory(self._folder)
        log.error("a checkpoint cannot be used and is set aside as %s: %s", aside, why)

    def _remove(self, path: Path) -> None:
        if path.is_dir() and not path.is_symlink():
            self.set_aside(path, "expected a file, found a folder")
        else:
            path.unlink(missing_ok=True)

    def forget(self) -> None:
        """Remove all checkpoints, so that a job that starts over does not fall back to them."""
        for path in self.found():
            self._remove(path)
        if self._folder.is_dir():
            sync_directory(self._folder)
