"""A follower's checkpoints: the latest one, and the one before it for when that is damaged.

    checkpoints/follow.safetensors            the latest
    checkpoints/follow.before.safetensors     the one before
    checkpoints/follow.damaged-{n}.safetensors    set aside, for people

Each is written under another name, synced, and renamed; then the folder is synced.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from policy.algorithms.learner import Learner
from storage.errors import WeightsDamaged
from storage.system.files import make_directory, sync_directory

__all__ = ["BEFORE", "CHECKPOINT", "CheckpointFiles"]

log = logging.getLogger("headrace.trainer")

CHECKPOINT = "follow.safetensors"
BEFORE = "follow.before.safetensors"


class CheckpointFiles:
    """The two files of one follower, which the folder's only writer is."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.loaded = folder / CHECKPOINT  # which one `load` took

    def save(self, learner: Learner, document: Mapping[str, Any]) -> None:
        """Keep a learner and a document that goes with it; durable when it returns.

        Raises OSError; the latest checkpoint is then as it was.
        """
        make_directory(self._folder)
        latest = self._folder / CHECKPOINT
        if latest.exists():
            temporary = self._folder / f".{BEFORE}.{secrets.token_hex(6)}.tmp"
            os.link(latest, temporary)
            os.replace(temporary, self._folder / BEFORE)
            temporary.unlink(missing_ok=True)  # both were one file already: then nothing moved
        learner.save(latest, reader_state=document)

    def load(self, learner: Learner) -> dict[str, Any] | None:
        """Bring a learner to the latest checkpoint that is whole; its document, None without one.

        A damaged one is set aside. Raises OSError, and ValueError for one of another learner.
        """
        for name in (CHECKPOINT, BEFORE):
            path = self._folder / name
            if not path.exists():
                continue
            try:
                document = learner.load(path)
            except WeightsDamaged as error:
                self.set_aside(path, str(error))
                continue
            if document is not None:
                self.loaded = path
                return document
            self.set_aside(path, "it holds no reader's position")
        return None

    def set_aside(self, path: Path, why: str) -> None:
        """Rename a checkpoint that cannot be used, and say so."""
        number = 1
        while (aside := self._folder / f"follow.damaged-{number}.safetensors").exists():
            number += 1
        os.rename(path, aside)
        sync_directory(self._folder)
        log.error("a checkpoint cannot be used and is set aside as %s: %s", aside, why)

    def forget(self) -> None:
        """Remove both: a job that starts over must not fall back to them."""
        for name in (BEFORE, CHECKPOINT):
            (self._folder / name).unlink(missing_ok=True)
        if self._folder.is_dir():
            sync_directory(self._folder)
