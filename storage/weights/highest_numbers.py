"""The highest version, generation and lease that a policy ever got, stored outside `weights/`.

    numbers/{policy_id}.json     version and generation
    numbers/{policy_id}.lease    the number of a follower's lease

If `weights/` is restored from a backup, these files still hold the later numbers, and the next
publication continues after them. So a number that was live stands for one content forever, also for
clients and shards newer than the backup, and no two followers get the same lease number.
"""

from __future__ import annotations

import logging

from storage.errors import WeightsDamaged, WeightsNotFound, WeightStoreError
from storage.weights.files import PolicyFiles
from storage.weights.manifest import HighestVersions, Json

log = logging.getLogger("headrace.weights")


class _NumberFile:
    """One of these files. Writers hold the lock of the policy's store."""

    kind = ""

    def __init__(self, files: PolicyFiles, ending: str) -> None:
        self._files = files
        self._name = f"numbers/{files.policy_id}.{ending}"
        self.where = files.where(self._name)
        self._warned = ""

    def _read(self) -> dict[str, Json] | None:
        """The body of the document; None if there is none or it cannot be read."""
        try:
            return self._files.document(self.kind, self._name)
        except WeightsNotFound:
            pass
        except (WeightStoreError, OSError) as error:
            self._warn(f"{self.where} cannot be read, so a restore may go unnoticed: {error}")
        return None

    def _write(self, body: dict[str, Json]) -> None:
        try:
            self._files.write(self.kind, self._name, body)
        except PermissionError as error:  # an account that may only write weights/ still publishes
            self._warn(f"{self.where} cannot be written, so a restore may go unnoticed: {error}")
        except OSError as error:
            raise WeightStoreError(f"{self.where}: cannot write: {error}") from error

    def _warn(self, text: str) -> None:
        if text != self._warned:
            log.warning("%s", text)
        self._warned = text


class HighestNumbers(_NumberFile):
    """The highest version and generation of one policy."""

    kind = "numbers"

    def __init__(self, files: PolicyFiles) -> None:
        super().__init__(files, "json")

    def read(self) -> HighestVersions:
        """The stored numbers; zeros if there are none or they cannot be read."""
        body = self._read()
        if body is not None:
            try:
                return HighestVersions.from_json(body, self.where)
            except WeightsDamaged as error:
                self._warn(f"{self.where} cannot be read, so a restore may go unnoticed: {error}")
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
    """The highest lease number (`storage.weights.lease`) of one policy."""

    kind = "fence"

    def __init__(self, files: PolicyFiles) -> None:
        super().__init__(files, "lease")

    def read(self) -> int:
        """The stored number; 0 if there is none or it cannot be read."""
        fence = (self._read() or {}).get("fence")
        return fence if isinstance(fence, int) else 0

    def note(self, fence: int) -> None:
        """Store the number of a lease that is about to be taken, durably."""
        if fence > self.read():
            self._write({"fence": fence})
