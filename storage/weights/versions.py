"""Numbered versions: one immutable folder each, and the records of those that were removed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from storage.errors import WeightsDamaged, WeightsNotFound
from storage.weights.files import (
    MAX_WEIGHTS,
    number_of,
    publish_directory,
    read_document,
    read_file,
    remove_abandoned,
    remove_directory,
    visible,
)
from storage.weights.manifest import (
    LINEAGE_FILE,
    WEIGHTS_FILE,
    Manifest,
    Pruned,
    decode_weights,
    seal_document,
    sha256,
)
from storage.weights.retention import PrunedVersions

__all__ = ["VersionFolders"]


class VersionFolders:
    """The versions of one policy."""

    def __init__(self, directory: Path, policy_id: str) -> None:
        self._policy_id = policy_id
        self._folder = directory / "versions"
        self._pruned = PrunedVersions(directory)

    def folder(self, version: int) -> Path:
        """The folder of a version's files."""
        return self._folder / str(version)

    def numbers(self) -> list[int]:
        """All versions whose content is here, ascending."""
        return sorted(n for path in visible(self._folder) if (n := number_of(path.name)))

    def add(self, manifest: Manifest, files: Mapping[str, bytes]) -> None:
        """Store the content of a version. Raises FileExistsError if the number is taken."""
        described = {"manifest.json": seal_document("manifest", manifest.to_json())}
        publish_directory(self.folder(manifest.version), {**files, **described})

    def remove(self, manifests: Sequence[Manifest]) -> None:
        """Remove the content of versions; their numbers and digests are kept."""
        self._pruned.note(manifests)
        for manifest in manifests:
            remove_directory(self.folder(manifest.version))
        remove_abandoned(self._folder)

    def pruned(self) -> dict[int, Pruned]:
        """The records of versions whose content was removed, by number."""
        return self._pruned.read()

    def manifest(self, version: int) -> Manifest:
        """The manifest of one version. Raises WeightsNotFound, WeightsDamaged."""
        path = self.folder(version) / "manifest.json"
        try:
            manifest = Manifest.from_json(read_document("manifest", path), path)
        except WeightsNotFound as error:
            if (gone := self.pruned().get(version)) is None:
                raise
            raise WeightsNotFound(
                f"{self._policy_id}: version {version} was pruned; it was candidate "
                f"{gone.candidate}"
            ) from error
        if (manifest.version, manifest.policy_id) != (version, self._policy_id):
            raise WeightsDamaged(
                f"{path}: expected version {version} of {self._policy_id}, got "
                f"version {manifest.version} of {manifest.policy_id}"
            )
        return manifest

    def whole(self) -> dict[int, Manifest]:
        """The manifests of all versions, ascending, without damaged ones."""
        found = {}
        for version in self.numbers():
            with contextlib.suppress(WeightsDamaged, WeightsNotFound):
                found[version] = self.manifest(version)
        return found

    def is_whole(self, version: int) -> bool:
        """Whether all files of a version match their digests. Raises OSError."""
        try:
            return all(
                sha256(read_file(self.folder(version) / name, MAX_WEIGHTS)) == digest
                for name, digest in self.manifest(version).digests.items()
            )
        except (WeightsDamaged, WeightsNotFound):
            return False

    def read(self, version: int) -> tuple[Manifest, bytes]:
        """A version's manifest and safetensors bytes, whose digest was checked.

        Raises WeightsNotFound, WeightsDamaged.
        """
        manifest = self.manifest(version)
        path = self.folder(version) / WEIGHTS_FILE
        data = read_file(path, MAX_WEIGHTS)
        if sha256(data) != manifest.digests.get(WEIGHTS_FILE):
            raise WeightsDamaged(f"{path}: the file does not match the digest in its manifest")
        return manifest, data

    def load(self, version: int) -> tuple[Manifest, dict[str, Any]]:
        """A version's manifest and arrays; their digest is verified before they are parsed."""
        manifest, data = self.read(version)
        path = self.folder(version) / WEIGHTS_FILE
        return manifest, decode_weights(data, manifest.digests[WEIGHTS_FILE], path)

    def lineage_file(self, version: int) -> tuple[Path, str]:
        """The path of a version's lineage, and its digest."""
        return self.folder(version) / LINEAGE_FILE, self.manifest(version).digests[LINEAGE_FILE]

    def earlier(self, version: int) -> Iterator[int]:
        """The versions that were live before the content of this version was, latest first.

        If a manifest is damaged, continues from a version with the same weights, or else from the
        next lower number.
        """
        pruned: dict[int, Pruned] | None = None
        there = set(self.numbers())

        def known(number: int) -> Manifest | Pruned | None:
            nonlocal pruned
            if number in there:
                try:
                    return self.manifest(number)
                except WeightsDamaged:
                    return self._guessed(number)
            if pruned is None:
                pruned = self.pruned()
            return pruned.get(number)  # None: no record of its removal

        while (one := known(version)) is not None:
            while one is not None and one.copy_of is not None:  # a rollback's copy
                one = known(one.copy_of)  # continue from the version that it copied
            if one is None or one.parent is None or one.parent >= version:
                return
            version = one.parent
            yield version

    def _guessed(self, version: int) -> Pruned:
        """The probable origin and parent of a version whose manifest is damaged.

        A rollback's copy has the weights of an earlier version.
        """
        try:
            digest = sha256(read_file(self.folder(version) / WEIGHTS_FILE, MAX_WEIGHTS))
        except (WeightsDamaged, WeightsNotFound):
            digest = ""
        same = (n for n, m in self.whole().items() if m.digests[WEIGHTS_FILE] == digest)
        below = (number for number in (*self.numbers(), *self.pruned()) if number < version)
        return Pruned(
            version=version,
            parent=max(below, default=None),
            copy_of=max((number for number in same if number < version), default=None),
            candidate="",
            digests={},
            created=0,
        )
