"""`numbers/{policy_id}.json`: the highest version and generation that a policy was ever given.

It lies outside `weights/`, so that a `weights/` that is put back from a backup does not take the
memory of later numbers with it: what is published next goes on after them. A number that was
live names one content for ever, also to clients and shards that the backup knows nothing of.
"""

from __future__ import annotations

import logging
from pathlib import Path

from storage.errors import WeightsNotFound, WeightStoreError
from storage.system.files import make_directory, replace_file
from storage.weights.files import read_document
from storage.weights.manifest import Numbers, seal_document

__all__ = ["HighestNumbers"]

log = logging.getLogger("headrace.weights")


class HighestNumbers:
    """The file of one policy. Whoever calls `note` holds the lock of the policy's store."""

    def __init__(self, root: Path, policy_id: str) -> None:
        self.path = root / "numbers" / f"{policy_id}.json"
        self._warned = ""

    def read(self) -> Numbers:
        """What is known; zeros where nothing is, also of a file that cannot be read."""
        try:
            return Numbers.from_json(read_document("numbers", self.path), self.path)
        except WeightsNotFound:
            pass
        except (WeightStoreError, OSError) as error:
            self._warn(f"{self.path} cannot be read, so a restore may go unnoticed: {error}")
        return Numbers(version=0, generation=0)

    def note(self, version: int, generation: int) -> None:
        """Keep numbers that are about to be live, durably. They never fall."""
        known = self.read()
        higher = Numbers(
            version=max(version, known.version), generation=max(generation, known.generation)
        )
        if higher == known:
            return
        try:
            if not self.path.parent.is_dir():
                make_directory(self.path.parent)
            replace_file(self.path, seal_document("numbers", higher.to_json()))
        except PermissionError as error:  # an account that may write weights/ alone still publishes
            self._warn(f"{self.path} cannot be written, so a restore may go unnoticed: {error}")
        except OSError as error:
            raise WeightStoreError(f"{self.path}: cannot write: {error}") from error

    def _warn(self, text: str) -> None:
        if text != self._warned:
            log.warning("%s", text)
        self._warned = text
