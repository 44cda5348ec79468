"""What a policy was ever given, outside `weights/`: its highest numbers, and its highest lease.

    numbers/{policy_id}.json     version and generation
    numbers/{policy_id}.lease    the number of a follower's lease

A `weights/` that is put back from a backup does not take the memory of later numbers with it: what
is published next goes on after them. A number that was live names one content for ever, also to
clients and shards that the backup knows nothing of; two followers never have one lease number.
"""

from __future__ import annotations

import logging
from pathlib import Path

from storage.errors import WeightsDamaged, WeightsNotFound, WeightStoreError
from storage.system.files import make_directory, replace_file
from storage.weights.files import read_document
from storage.weights.manifest import Json, Numbers, seal_document

__all__ = ["HighestFence", "HighestNumbers"]

log = logging.getLogger("headrace.weights")


class _Kept:
    """One file of one kind. Whoever writes it holds the lock of the policy's store."""

    kind = ""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._warned = ""

    def _read(self) -> dict[str, Json] | None:
        """None where nothing is, also of a file that cannot be read."""
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
        except PermissionError as error:  # an account that may write weights/ alone still publishes
            self._warn(f"{self.path} cannot be written, so a restore may go unnoticed: {error}")
        except OSError as error:
            raise WeightStoreError(f"{self.path}: cannot write: {error}") from error

    def _warn(self, text: str) -> None:
        if text != self._warned:
            log.warning("%s", text)
        self._warned = text


class HighestNumbers(_Kept):
    """The highest version and generation of one policy."""

    kind = "numbers"

    def __init__(self, root: Path, policy_id: str) -> None:
        super().__init__(root / "numbers" / f"{policy_id}.json")

    def read(self) -> Numbers:
        """What is known; zeros where nothing is, also of a file that cannot be read."""
        body = self._read()
        if body is not None:
            try:
                return Numbers.from_json(body, self.path)
            except WeightsDamaged as error:
                self._warn(f"{self.path} cannot be read, so a restore may go unnoticed: {error}")
        return Numbers(version=0, generation=0)

    def note(self, version: int, generation: int) -> None:
        """Keep numbers that are about to be live, durably. They never fall."""
        known = self.read()
        higher = Numbers(
            version=max(version, known.version), generation=max(generation, known.generation)
        )
        if higher != known:
            self._write(higher.to_json())


class HighestFence(_Kept):
    """The highest number of a lease (`storage.weights.lease`) of the policy of a folder."""

    kind = "fence"

    def __init__(self, directory: Path) -> None:
        super().__init__(directory.parents[1] / "numbers" / f"{directory.name}.lease")

    def read(self) -> int:
        """0 where nothing is known, also of a file that cannot be read."""
        fence = (self._read() or {}).get("fence")
        return fence if isinstance(fence, int) else 0

    def note(self, fence: int) -> None:
        """Keep the number of a lease that is about to be taken, durably."""
        if fence > self.read():
            self._write({"fence": fence})
