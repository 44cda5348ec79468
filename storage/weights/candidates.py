"""Candidates: trained weights without a number, each in a folder named by its digest."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from storage.errors import WeightsDamaged, WeightsNotFound
from storage.weights.files import (
    MAX_WEIGHTS,
    publish_directory,
    read_document,
    read_file,
    remove_abandoned,
    remove_directory,
    visible,
)
from storage.weights.manifest import (
    WEIGHTS_FILE,
    Candidate,
    decode_weights,
    seal_document,
)
from storage.wording import counted

__all__ = ["Candidates"]


class Candidates:
    """The candidates of one policy."""

    def __init__(self, directory: Path, policy_id: str) -> None:
        self._policy_id = policy_id
        self._folder = directory / "candidates"

    def folder(self, digest: str) -> Path:
        """The folder of a candidate's files."""
        return self._folder / digest

    def add(self, candidate: Candidate, files: Mapping[str, bytes]) -> None:
        """Store a candidate, unless it is already stored."""
        remove_abandoned(self._folder)
        described = {"candidate.json": seal_document("candidate", candidate.to_json())}
        with contextlib.suppress(FileExistsError):
            publish_directory(self.folder(candidate.digest), {**files, **described})

    def digests(self) -> list[str]:
        """The digests of all candidates, sorted."""
        return sorted(path.name for path in visible(self._folder))

    def added(self, digest: str) -> int:
        """When a candidate was stored, in microseconds since the epoch. Raises OSError."""
        return self.folder(digest).stat().st_mtime_ns // 1000

    def get(self, digest: str) -> Candidate:
        """The description of one candidate, found by the first 6 or more digits of its digest.

        Raises WeightsNotFound (also if several candidates match) and WeightsDamaged.
        """
        path = self.folder(self._known(digest)) / "candidate.json"
        candidate = Candidate.from_json(read_document("candidate", path), path)
        if candidate.digest != path.parent.name:
            raise WeightsDamaged(
                f"{path}: expected a candidate of digest {path.parent.name}, got one of "
                f"{candidate.digest}"
            )
        return candidate

    def load(self, digest: str) -> tuple[Candidate, dict[str, Any]]:
        """A candidate and its arrays; their digest is verified before they are parsed."""
        candidate = self.get(digest)
        path = self.folder(candidate.digest) / WEIGHTS_FILE
        data = read_file(path, MAX_WEIGHTS)
        return candidate, decode_weights(data, candidate.digests[WEIGHTS_FILE], path)

    def superseded(self, checkpoint: str, keep: int, promoted: set[str]) -> set[str]:
        """The unnumbered candidates of a trainer's checkpoint, without the newest `keep`."""
        waiting = []
        for digest in self.digests():
            with contextlib.suppress(WeightsDamaged, WeightsNotFound):  # an unreadable one stays
                if digest not in promoted and self.get(digest).checkpoint == checkpoint:
                    waiting.append(digest)
        waiting.sort(key=self.added)
        return set(waiting[:-keep])

    def remove(self, digest: str) -> None:
        remove_directory(self.folder(digest))

    def _known(self, digest: str) -> str:
        if digest in (found := self.digests()):
            return digest
        if len(digest) < 6:
            raise WeightsNotFound(
                f"{self._policy_id}: expected the first 6 or more characters of a candidate's "
                f"digest, got {digest!r}"
            )
        matches = [name for name in found if name.startswith(digest)]
        if len(matches) != 1:
            raise WeightsNotFound(
                f"{self._policy_id}: expected the digest of one of "
                f"{counted(len(found), 'candidate')}, got "
                f"{digest!r:.80}, which matches {len(matches)}"
            )
        return matches[0]
