"""The highest version, generation and lease that a policy ever got, stored outside `weights/`.

    numbers/{policy_id}.json     version and generation
    numbers/{policy_id}.lease    the number of a follower's lease

If `weights/` is restored from a backup, these files still hold the later numbers, and the next
publication continues after them. So a number that was live stands for one content forever, also for
clients and shards newer than the backup, and no two followers get the same lease number.
"""

from __future__ import annotations

import logging
from pathlib import Path

from storage.errors import WeightsDamaged, WeightsNotFound, WeightStoreError
from storage.system.files import make_directory, replace_file
from storage.weights.files import read_document
from storage.weights.manifest import HighestVersions, Json, seal_document

__all__ = ["HighestFence", "HighestNumbers"]

log = logging.getLogger("headrace.weights")


class _NumberFile:
    """One of these files. Writers hold the lock of the policy's store."""

    kind = ""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._warned = ""

    def _read(self) -> dict[str, Json] | None:
        """The body of the document; None if there is none or it cannot be read."""
        try:
            return read_document(self.kind, self.path)
        except WeightsNotFound:
            pass
        except (WeightStoreError, OSError) as error:
            self._warn(f"{self.path} cannot be read, so a restore may go unnoticed: {error}")
        return None

    def _write(self, body: dict[str, Json]) -> None:
        try:
            if not self.path.parent.is_dir():
                make_directory(self.path.parent)
            replace_file(self.path, seal_document(self.kind, body))
        except PermissionError as error:  # an account that may only write weights/ still publishes
            self._warn(f"{self.path} cannot be written, so a restore may go unnoticed: {error}")
        except OSError as error:
            raise WeightStoreError(f"{self.path}: cannot write: {error}") from error

    def _warn(self, text: str) -> None:
        if text != self._warned:
            log.warning("%s", text)
        self._warned = text


class HighestNumbers(_NumberFile):
    """The highest version and generation of one policy."""

    kind = "numbers"

    def __init__(self, root: Path, policy_id: str) -> None:
        super().__init__(root / "numbers" / f"{policy_id}.json")

    def read(self) -> HighestVersions:
        """The stored numbers; zeros if there are none or they cannot be read."""
        body = self._read()
        if body is not None:
            try:
                return HighestVersions.from_json(body, self.path)
            except WeightsDamaged as error:
                self._warn(f"{self.path} cannot be read, so a restore may go unnoticed: {error}")
        return HighestVersions(version=0, generation=0)

    def note(self, version: int, generation: int) -> bool:
        """Store numbers that are about to go live, durably. A lower number changes nothing.

        Returns whether one of them is higher than before.
        """
        known = self.read()
        higher = HighestVersions(
            version=max(version, known.version), generation=max(generation, known.generation)
        )
        if higher != known:
            self._write(higher.to_json())
        return higher != known


class HighestFence(_NumberFile):
    """The highest lease number (`storage.weights.lease`) of the policy whose folder is given."""

    kind = "fence"

    def __init__(self, directory: Path) -> None:
        super().__init__(directory.parents[1] / "numbers" / f"{directory.name}.lease")

    def read(self) -> int:
        """The stored number; 0 if there is none or it cannot be read."""
        fence = (self._read() or {}).get("fence")
        return fence if isinstance(fence, int) else 0

    def note(self, fence: int) -> None:
        """Store the number of a lease that is about to be taken, durably."""
        if fence > self.read():
            self._write({"fence": fence})
