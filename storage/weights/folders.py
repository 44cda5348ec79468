"""Candidates and versions: immutable folders of a description, weights and their lineage."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

from storage.errors import WeightsDamaged, WeightsNotFound
from storage.experience.range_set import RangeSet
from storage.weights.files import MAX_DOCUMENT, MAX_WEIGHTS, PolicyFiles, number_of
from storage.weights.folds import FOLD_WEIGHTS_FILE, FOLDS_FILE, FOLDS_METRIC, Folds, open_folds
from storage.weights.lineage import open_lineage, open_untrained
from storage.weights.manifest import (
    LINEAGE_FILE,
    WEIGHTS_FILE,
    Candidate,
    Json,
    Manifest,
    Pruned,
    decode_weights,
    seal_document,
    sha256,
)
from storage.weights.retention import PrunedVersions
from storage.wording import counted

D = TypeVar("D", bound=Candidate | Manifest)


class WeightsFolders(Generic[D]):
    """The folders `{folder}/{key}/` of one policy, each with a document of one kind."""

    def __init__(
        self, files: PolicyFiles, folder: str, kind: str, parse: Callable[[Json, str], D]
    ) -> None:
        self._files, self._folder = files, folder
        self._kind, self._parse = kind, parse

    def keys(self) -> list[str]:
        """The keys of all folders, sorted."""
        return self._files.names(self._folder)

    def add(self, key: str, described: D, files: Mapping[str, bytes]) -> None:
        """Store a folder. Raises ObjectExists if it is there, and WeightStoreError."""
        document = seal_document(self._kind, described.to_json())
        self._files.add(self._name(key), {**files, f"{self._kind}.json": document})

    def describe(self, key: str) -> D:
        """A folder's document. Raises WeightsNotFound, WeightsDamaged."""
        name = self._name(key, f"{self._kind}.json")
        return self._parse(self._files.document(self._kind, name), self._files.where(name))

    def content(self, key: str, described: D, file: str, limit: int = MAX_WEIGHTS) -> bytes:
        """The bytes of a file, whose digest was checked. Raises WeightsNotFound, WeightsDamaged."""
        name = self._name(key, file)
        data = self._files.read(name, limit)
        if sha256(data) != described.digests[file]:
            raise WeightsDamaged(
                f"{self._files.where(name)}: the file does not match the digest in its {self._kind}"
            )
        return data

    def contents(self, key: str, described: D) -> dict[str, bytes]:
        """The bytes of all files but the document, whose digests were checked."""
        return {file: self.content(key, described, file) for file in described.digests}

    def arrays(self, key: str, described: D) -> dict[str, Any]:
        """The arrays of a folder; their digest is verified before they are parsed."""
        data = self.content(key, described, WEIGHTS_FILE)
        where = self._files.where(self._name(key, WEIGHTS_FILE))
        return decode_weights(data, described.digests[WEIGHTS_FILE], where)

    def lineage(self, key: str, described: D) -> dict[str, RangeSet]:
        """stream -> the ordinals trained on."""
        return open_lineage(*self._lineage(key, described))

    def untrained(self, key: str, described: D) -> dict[str, list[list[int]]]:
        """stream -> runs of rows that were not trained on."""
        return open_untrained(*self._lineage(key, described))

    def _lineage(self, key: str, described: D) -> tuple[bytes, str]:
        data = self.content(key, described, LINEAGE_FILE, MAX_DOCUMENT)
        return data, self._files.where(self._name(key, LINEAGE_FILE))

    def added(self, key: str) -> int:
        """When a folder was stored, in microseconds since the epoch. Raises WeightsNotFound."""
        status = self._files.objects.status(self._files.name(self._name(key)))
        if status is None:
            raise WeightsNotFound(f"expected {self._files.where(self._name(key))}, got nothing")
        return status.written

    def remove(self, key: str) -> None:
        self._files.objects.delete(self._files.name(self._name(key)))

    def _name(self, key: str, file: str | None = None) -> str:
        return f"{self._folder}/{key}" if file is None else f"{self._folder}/{key}/{file}"


class CandidateFolders(WeightsFolders[Candidate]):
    """Trained weights without a number, each in a folder named by its digest."""

    def __init__(self, files: PolicyFiles) -> None:
        super().__init__(files, "candidates", "candidate", Candidate.from_json)

    def get(self, digest: str) -> Candidate:
        """The description of one candidate, found by the first 6 or more digits of its digest.

        Raises WeightsNotFound (also if several candidates match) and WeightsDamaged.
        """
        known = self._known(digest)
        candidate = self.describe(known)
        if candidate.digest != known:
            where = self._files.where(self._name(known, "candidate.json"))
            raise WeightsDamaged(
                f"{where}: expected a candidate of digest {known}, got one of {candidate.digest}"
            )
        return candidate

    def folds(self, digest: str) -> Folds | None:
        """The fold policies of a candidate; None without any. Raises WeightsDamaged."""
        digests = self.get(digest).metrics.get(FOLDS_METRIC)
        if digests is None:
            return None
        where = self._files.where(self._name(digest))
        try:
            document, weights = (
                self._files.read(self._name(digest, name), limit)
                for name, limit in ((FOLDS_FILE, MAX_DOCUMENT), (FOLD_WEIGHTS_FILE, MAX_WEIGHTS))
            )
            if sha256(document) != digests[FOLDS_FILE]:
                raise WeightsDamaged(f"{where}: {FOLDS_FILE} does not match its digest")
            arrays = decode_weights(weights, digests[FOLD_WEIGHTS_FILE], where)
        except (KeyError, TypeError) as error:
            text = f"{where}: expected digests of fold policies, got {digests}"
            raise WeightsDamaged(text) from error
        return open_folds(document, arrays, where)

    def superseded(self, checkpoint: str, keep: int, promoted: set[str]) -> set[str]:
        """The unnumbered candidates of a trainer's checkpoint, without the newest `keep`."""
        waiting = []
        for digest in self.keys():
            with contextlib.suppress(WeightsDamaged, WeightsNotFound):  # an unreadable one stays
                if digest not in promoted and self.get(digest).checkpoint == checkpoint:
                    waiting.append((self.added(digest), digest))
        return {digest for _, digest in sorted(waiting)[:-keep]}

    def _known(self, digest: str) -> str:
        if digest in (found := self.keys()):
            return digest
        if len(digest) < 6:
            raise WeightsNotFound(
                f"{self._files.policy_id}: expected the first 6 or more characters of a "
                f"candidate's digest, got {digest!r}"
            )
        matches = [name for name in found if name.startswith(digest)]
        if len(matches) != 1:
            raise WeightsNotFound(
                f"{self._files.policy_id}: expected the digest of one of "
                f"{counted(len(found), 'candidate')}, got "
                f"{digest!r:.80}, which matches {len(matches)}"
            )
        return matches[0]


class VersionFolders(WeightsFolders[Manifest]):
    """Numbered versions, and the records of those that were removed."""

    def __init__(self, files: PolicyFiles) -> None:
        super().__init__(files, "versions", "manifest", Manifest.from_json)
        self.pruned = PrunedVersions(files)

    def numbers(self) -> list[int]:
        """All versions whose content is here, ascending."""
        return sorted(number for key in self.keys() if (number := number_of(key)))

    def prune(self, manifests: Sequence[Manifest], *, forget: bool) -> None:
        """Remove the content of versions; their numbers and digests are kept unless `forget`."""
        if not forget:
            self.pruned.note(manifests)
        for manifest in manifests:
            self.remove(str(manifest.version))

    def manifest(self, version: int) -> Manifest:
        """The manifest of one version. Raises WeightsNotFound, WeightsDamaged."""
        try:
            manifest = self.describe(str(version))
        except WeightsNotFound as error:
            if (gone := self.pruned.read().get(version)) is None:
                raise
            raise WeightsNotFound(
                f"{self._files.policy_id}: version {version} was pruned; it was candidate "
                f"{gone.candidate}"
            ) from error
        policy_id = self._files.policy_id
        if (manifest.version, manifest.policy_id) != (version, policy_id):
            where = self._files.where(self._name(str(version), "manifest.json"))
            raise WeightsDamaged(
                f"{where}: expected version {version} of {policy_id}, got "
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
            self.contents(str(version), self.manifest(version))
        except (WeightsDamaged, WeightsNotFound):
            return False
        return True

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
                pruned = self.pruned.read()
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
            digest = sha256(self._files.read(self._name(str(version), WEIGHTS_FILE)))
        except (WeightsDamaged, WeightsNotFound):
            digest = ""
        same = (n for n, m in self.whole().items() if m.digests[WEIGHTS_FILE] == digest)
        below = (number for number in (*self.numbers(), *self.pruned.read()) if number < version)
        return Pruned(
            version=version,
            parent=max(below, default=None),
            copy_of=max((number for number in same if number < version), default=None),
            candidate="",
            digests={},
            created=0,
        )
