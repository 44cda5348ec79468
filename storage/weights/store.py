"""`WeightStore`: candidates, immutable numbered versions, and the pointer to what is live.

    weights/{policy_id}/
        store.json                     the store's id
        candidates/{digest}/           candidate.json, weights.safetensors, lineage.json
        versions/{n}/                  manifest.json, weights.safetensors, lineage.json
        live.json                      generation, version, canary; changed under `lock`
        leases/{n}.json                who trains it (storage.weights.lease)

A directory is filled under a temporary name, synced, and renamed to its own, which fails if that is
taken: readers never see half of one, and two promotions never share a number. What a killed process
leaves behind is a dot-directory, which nobody reads.

Nothing becomes a candidate, gets a number or goes live that the store's `check` refuses. This
package cannot act with weights, so whoever opens a store for writing brings the check:
`policy.inference.weight_store` has the one for policies.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeAlias

from storage.declarations.declaration import check_policy_id
from storage.errors import (
    GenerationConflict,
    PolicyPinned,
    WeightsDamaged,
    WeightsNotFound,
    WeightStoreError,
)
from storage.experience.range_set import RangeSet
from storage.system.files import (
    FileLock,
    make_directory,
    replace_file,
    sync_directory,
    write_synced,
)
from storage.weights.candidate_files import candidate_files
from storage.weights.lease import require_fence
from storage.weights.lineage import (
    Lineage,
    Untrained,
    open_lineage,
    open_untrained,
)
from storage.weights.manifest import (
    LINEAGE_FILE,
    WEIGHTS_FILE,
    Candidate,
    Json,
    Live,
    Manifest,
    Pin,
    Weights,
    decode_weights,
    open_document,
    seal_document,
    sha256,
)

__all__ = ["Candidate", "Check", "Live", "Manifest", "WeightStore"]

ABANDONED_SECONDS = 3600.0
Check: TypeAlias = Callable[[Candidate, Weights], None]
"""Raises WeightsRefused for weights that the candidate's spec and filter state cannot act with."""


class WeightStore:
    """The weights of one policy under a root directory. Any number of processes may use it.

    `check` judges weights at every entry; without it the store is open for reading alone. `clock`
    gives seconds since the epoch, for `Manifest.created`.
    """

    def __init__(
        self,
        root: Path | str,
        policy_id: str,
        *,
        check: Check | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.policy_id = check_policy_id(policy_id)
        self.directory = Path(root) / "weights" / policy_id
        self._candidates = self.directory / "candidates"
        self._versions = self.directory / "versions"
        self._check = check
        self._passed = ""  # the digest of the candidate that passed the check last
        self._clock = clock
        self._live_file = str(self.directory / "live.json")  # a follower looks many times a second

    @property
    def store_id(self) -> str:
        """12 hex digits, made at first use: generations count within one store only."""
        path = self.directory / "store.json"
        if not path.exists():
            make_directory(self.directory)
            temporary = self.directory / f".store.{secrets.token_hex(6)}.tmp"
            write_synced(temporary, seal_document("store", {"store_id": secrets.token_hex(6)}))
            with contextlib.suppress(FileExistsError):  # another process was first
                os.link(temporary, path)
            temporary.unlink()
            sync_directory(self.directory)
        return str(open_document("store", path.read_bytes(), path)["store_id"])

    # candidates

    def add_candidate(
        self,
        weights: Weights,
        *,
        spec: dict[str, Json],
        metrics: dict[str, Json],
        lineage: Lineage,
        filter_state: dict[str, Json] | None = None,
        checkpoint: str | None = None,
        number: int | None = None,
        untrained: Untrained | None = None,
    ) -> str:
        """Keep a trained checkpoint; its digest. The same content twice is one candidate.

        `lineage`: stream -> the ordinal ranges trained on; `untrained`: the rows of these ordinals
        that were not (storage.weights.lineage). Raises WeightsRefused for weights that
        the spec cannot act with, ValueError for what JSON cannot hold; with `number`,
        GenerationConflict when that is neither the next version nor this checkpoint's, and nothing
        is kept.
        """
        candidate, files = candidate_files(
            self.policy_id, weights, spec, metrics, lineage, filter_state, checkpoint, untrained
        )
        digest = candidate.digest
        self._require_usable(candidate, files[WEIGHTS_FILE])
        if number is not None and not self._may_be(number, digest):
            raise self._not_next(number)
        files["candidate.json"] = seal_document("candidate", candidate.to_json())
        self._remove_abandoned()
        with contextlib.suppress(FileExistsError):
            _publish_directory(self._candidates / digest, files)
        return digest

    def candidates(self) -> list[str]:
        """The digests of all candidates, sorted."""
        return sorted(path.name for path in _visible(self._candidates))

    def candidate(self, digest: str) -> Candidate:
        """The description of one candidate. Raises WeightsNotFound, WeightsDamaged."""
        path = self._candidates / self._known(digest) / "candidate.json"
        candidate = Candidate.from_json(open_document("candidate", path.read_bytes(), path), path)
        if candidate.digest != path.parent.name:
            raise WeightsDamaged(f"{path}: expected a candidate of digest {path.parent.name}")
        return candidate

    def load_candidate(self, digest: str) -> tuple[Candidate, dict[str, Any]]:
        """A candidate and its arrays, verified before they are parsed."""
        candidate = self.candidate(digest)
        path = self._candidates / candidate.digest / WEIGHTS_FILE
        return candidate, decode_weights(_read(path), candidate.digests[WEIGHTS_FILE], path)

    # versions

    def promote(self, digest: str, *, number: int | None = None) -> int:
        """Give a candidate the next version number. It is not live yet.

        Raises GenerationConflict when the next one is not `number`.
        """
        candidate = self.candidate(digest)
        source = self._candidates / candidate.digest
        return self._number(source, candidate, copy_of=None, expected=number)

    def _not_next(self, number: int | None) -> GenerationConflict:
        return GenerationConflict(
            f"{self.policy_id}: expected the next version, {self.next_version}, got {number}"
        )

    def _may_be(self, number: int, digest: str) -> bool:
        """Whether a candidate may become, or is, the version of that number."""
        if number in self.versions():
            return self.manifest(number).candidate == digest
        return number == self.next_version

    @property
    def next_version(self) -> int:
        """The number that the next version gets."""
        live = self.live()
        return max([*self.versions(), live.version if live else 0], default=0) + 1

    def versions(self) -> list[int]:
        """All version numbers, ascending; the first is 1."""
        return sorted(int(path.name) for path in _visible(self._versions) if path.name.isdigit())

    def manifest(self, version: int) -> Manifest:
        """The manifest of one version. Raises WeightsNotFound, WeightsDamaged."""
        path = self._versions / str(version) / "manifest.json"
        manifest = Manifest.from_json(open_document("manifest", _read(path), path), path)
        if (manifest.version, manifest.policy_id) != (version, self.policy_id):
            raise WeightsDamaged(
                f"{path}: expected version {version} of {self.policy_id}, got "
                f"version {manifest.version} of {manifest.policy_id}"
            )
        return manifest

    def read(self, version: int) -> tuple[Manifest, bytes]:
        """A version's manifest and its safetensors bytes, digest checked: what a server sends."""
        manifest = self.manifest(version)
        path = self._versions / str(version) / WEIGHTS_FILE
        data = _read(path)
        if sha256(data) != manifest.digests.get(WEIGHTS_FILE):
            raise WeightsDamaged(f"{path}: the file does not fit the digest in its manifest")
        return manifest, data

    def load(self, version: int) -> tuple[Manifest, dict[str, Any]]:
        """A version's manifest and its arrays, verified before they are parsed."""
        manifest, data = self.read(version)
        path = self._versions / str(version) / WEIGHTS_FILE
        return manifest, decode_weights(data, manifest.digests[WEIGHTS_FILE], path)

    def lineage(self, version: int) -> dict[str, RangeSet]:
        """stream -> the ordinals that a version was trained on."""
        return open_lineage(self._lineage_of(version))

    def untrained(self, version: int) -> dict[str, list[list[int]]]:
        """stream -> [ordinal, first row, count]: rows of the lineage's ordinals not trained on."""
        return open_untrained(self._lineage_of(version))

    def _lineage_of(self, version: int) -> tuple[Path, str]:
        digest = self.manifest(version).digests[LINEAGE_FILE]
        return self._versions / str(version) / LINEAGE_FILE, digest

    def candidate_lineage(self, digest: str) -> dict[str, RangeSet]:
        """stream -> the ordinals that a candidate was trained on."""
        candidate = self.candidate(digest)
        path = self._candidates / candidate.digest / LINEAGE_FILE
        return open_lineage((path, candidate.digests[LINEAGE_FILE]))

    # what is live

    def live(self) -> Live | None:
        """What is live, None before the first time. Raises WeightsDamaged."""
        path = self.directory / "live.json"
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        return Live.from_json(open_document("live", data, path), path)

    def stamp(self) -> Hashable:
        """Changes when something else is live, as cheap as a look at one file's dates."""
        try:
            status = os.stat(self._live_file)
        except OSError:
            return None
        return status.st_mtime_ns, status.st_ino

    def set_live(
        self,
        version: int,
        *,
        expected_generation: int | None = None,
        canary: tuple[int, float] | None = None,
        fence: int | None = None,
    ) -> Live:
        """Point to a version, in a new generation. `canary`: (version, share of episodes).

        `expected_generation` (0: nothing is live) makes it a compare-and-set. `fence` is the number
        of a follower's lease (storage.weights.lease). The versions are verified first. Raises
        WeightsNotFound, WeightsDamaged, WeightsRefused, PolicyPinned, GenerationConflict,
        LeaseHeld, ValueError.
        """
        return self._point(
            version, expected_generation=expected_generation, canary=canary, fence=fence
        )

    def _point(
        self,
        version: int,
        *,
        expected_generation: int | None,
        canary: tuple[int, float] | None = None,
        fence: int | None = None,
        pin: Pin | None = None,
    ) -> Live:
        """`set_live`; with `pin` it is a rollback, which a pin does not keep out."""
        canary_version, share = canary if canary is not None else (None, 0.0)
        if not 0.0 <= share <= 1.0:
            raise ValueError(f"canary: expected a share of 0 to 1, got {share}")
        if not self.directory.is_dir():
            raise WeightsNotFound(f"expected {self.directory}, which does not exist")
        with FileLock(self.directory / "lock"):
            if fence is not None:
                require_fence(self.directory, fence)
            for number in (version, canary_version):
                if number is not None:  # under the lock: `prune` could remove it in between
                    manifest, data = self.read(number)
                    self._require_usable(_candidate_of(manifest), data)
            before = self.live()
            if pin is None:
                self._require_no_pin(before)
            generation = before.generation if before else 0
            if expected_generation not in (None, generation):
                raise GenerationConflict(
                    f"{self.policy_id}: expected generation {expected_generation} to be live, "
                    f"got {generation}"
                )
            live = Live(
                generation=generation + 1,
                version=version,
                canary_version=canary_version,
                canary_share=float(share),
                pinned=pin,
            )
            self._write_live(live)
        return live

    def _write_live(self, live: Live) -> None:
        try:
            replace_file(self.directory / "live.json", seal_document("live", live.to_json()))
        except OSError as error:
            raise WeightStoreError(f"{self.directory}: cannot write: {error}") from error

    def publish(
        self, digest: str, *, expected_generation: int | None = None, fence: int | None = None
    ) -> Live:
        """Promote a candidate and make it live. What is live already is left so: safe to retry.

        With `expected_generation` (0: nothing) GenerationConflict also tells of what somebody else
        did since that one was live. Raises what `set_live` raises. While a rollback pins the policy
        that is PolicyPinned, and the candidate stays as it is.
        """
        live = self.live()
        self._require_no_pin(live)
        candidate = self.candidate(digest).digest
        if live and not live.canary_version and self.manifest(live.version).candidate == candidate:
            return live
        found = live.generation if live else 0
        if expected_generation not in (None, found):
            raise GenerationConflict(
                f"{self.policy_id}: expected generation {expected_generation} to be live, got "
                f"{found}"
            )
        if fence is not None:  # before a number is given; asked again under the lock
            require_fence(self.directory, fence)
        return self.set_live(self.promote(candidate), expected_generation=found, fence=fence)

    def publish_as(self, digest: str, version: int) -> Live:
        """Publish a candidate under the number that its publisher proposes: safe to retry.

        Raises GenerationConflict, which names the next number, when that is not it, and what
        `publish` raises.
        """
        live = self.live()
        self._require_no_pin(live)
        candidate = self.candidate(digest).digest
        if version in self.versions() and self.manifest(version).candidate == candidate:
            known = self.manifest(version)  # an earlier try came so far
            if live and live.version == version:
                return live
            if known.copy_of is not None or known.parent != (live.version if live else None):
                raise GenerationConflict(f"{self.policy_id}: version {version} was live before")
        else:
            self.promote(candidate, number=version)
        return self.set_live(version, expected_generation=live.generation if live else 0)

    def rollback(
        self,
        to: int | None = None,
        *,
        expected_generation: int | None = None,
        by: str = "a program",
        why: str = "",
    ) -> Live:
        """Make a new version with the content of an old one live, and pin the policy to it.

        Without `to`: what was live before the content that is live now. `by` and `why` are for
        whoever asks what pins it; until `resume` nothing but another rollback changes what is live.
        Raises WeightsNotFound when there is nothing before it, GenerationConflict when somebody
        else acted in between, also since `expected_generation` was live.
        """
        live = self.live()
        if live is None:
            raise WeightsNotFound(f"{self.policy_id}: nothing is live, so nothing to roll back")
        if expected_generation not in (None, live.generation):
            raise GenerationConflict(
                f"{self.policy_id}: expected generation {expected_generation} to be live, got "
                f"{live.generation}"
            )
        target = self._before(live.version) if to is None else to
        manifest, _ = self.read(target)
        version = self._number(
            self._versions / str(target),
            _candidate_of(manifest),
            copy_of=target,
            digest=manifest.candidate,
        )
        why = why or f"rolled back from version {live.version} to the content of {target}"
        pin = Pin(by=by, when=int(self._clock() * 1_000_000), why=why)
        return self._point(version, expected_generation=live.generation, pin=pin)

    def resume(self) -> Pin | None:
        """End what a rollback pinned: from here on the policy may be published again.

        Gives the pin that it ended, None when there was none. What is live, and its generation,
        stay as they are. Raises WeightsNotFound when nothing is live.
        """
        if self.live() is None:
            raise WeightsNotFound(f"{self.policy_id}: nothing is live, so nothing is pinned")
        with FileLock(self.directory / "lock"):
            live = self.live()
            if live is None or live.pinned is None:
                return None
            self._write_live(replace(live, pinned=None))
            return live.pinned

    def prune(self, keep: int) -> list[int]:
        """Remove all versions but the newest `keep`; which ones went.

        What is live or a canary stays, with its parent and what a rollback would go back to, and so
        does the newest version, from which numbers go on. A removed version's candidate goes when
        no other version came from it; candidates that were never promoted stay. Readers see a
        version whole or not at all. Raises ValueError for `keep` below 1.
        """
        if keep < 1:
            raise ValueError(f"keep: expected 1 or more, got {keep}")
        with FileLock(self.directory / "lock"):
            versions = self.versions()
            kept = set(versions[-keep:]) | self._needed()
            gone = [version for version in versions if version not in kept]
            candidates = {self.manifest(version).candidate for version in gone}
            if gone:
                candidates -= {self.manifest(version).candidate for version in kept}
            for path in (
                *(self._versions / str(version) for version in gone),
                *(self._candidates / digest for digest in candidates),
            ):
                _remove_directory(path)
        return gone

    # inside

    def _require_usable(self, candidate: Candidate, data: bytes) -> None:
        """Raise WeightsRefused unless one can act with these weights, the bytes of their file."""
        if self._check is None:
            raise WeightStoreError(
                f"{self.directory} is open for reading: expected a store that checks weights, as "
                "headrace.WeightStore does"
            )
        if candidate.digest == self._passed:
            return
        self._check(candidate, decode_weights(data, candidate.digests[WEIGHTS_FILE], "weights"))
        self._passed = candidate.digest

    def _require_no_pin(self, live: Live | None) -> None:
        if live is not None and live.pinned is not None:
            pin = live.pinned
            raise PolicyPinned(
                f"{self.policy_id}: version {live.version} is pinned by {pin.by} ({pin.why}); "
                f"`headrace resume --policy-id {self.policy_id}` ends that"
            )

    def _needed(self) -> set[int]:
        """The versions that are live, and those that a rollback of them reads."""
        live = self.live()
        needed: set[int | None] = set()
        for version in (live.version, live.canary_version) if live else ():
            if version is not None:
                manifest = self.manifest(version)
                needed |= {version, manifest.parent, manifest.copy_of}
                if manifest.copy_of is not None:  # `rollback` goes on from the content's own place
                    needed.add(self.manifest(manifest.copy_of).parent)
        return {version for version in self.versions() if version in needed}

    def _before(self, version: int) -> int:
        manifest = self.manifest(version)
        if manifest.copy_of is not None:  # rolled back already: go on from the content's own place
            manifest = self.manifest(manifest.copy_of)
        if manifest.parent is None:
            raise WeightsNotFound(f"{self.policy_id}: there is no version before {version}")
        return manifest.parent

    def _number(
        self,
        source: Path,
        candidate: Candidate,
        *,
        copy_of: int | None,
        digest: str | None = None,
        expected: int | None = None,
    ) -> int:
        files = {name: _read(source / name) for name in candidate.digests}
        for name, data in files.items():
            if sha256(data) != candidate.digests[name]:
                raise WeightsDamaged(f"{source / name}: the file does not fit its digest")
        self._require_usable(candidate, files[WEIGHTS_FILE])
        while True:
            live = self.live()
            version = self.next_version
            if expected not in (None, version):
                raise self._not_next(expected)
            manifest = Manifest(
                **asdict(candidate),
                store_id=self.store_id,
                version=version,
                parent=live.version if live else None,
                copy_of=copy_of,
                candidate=digest or candidate.digest,
                created=int(self._clock() * 1_000_000),
            )
            files["manifest.json"] = seal_document("manifest", manifest.to_json())
            with contextlib.suppress(FileExistsError):  # taken meanwhile: the next number
                _publish_directory(self._versions / str(version), files)
                return version

    def _known(self, digest: str) -> str:
        """The full digest of a candidate, of which the first 6 or more digits are enough."""
        if digest in (found := self.candidates()):
            return digest
        matches = [name for name in found if len(digest) >= 6 and name.startswith(digest)]
        if len(matches) != 1:
            raise WeightsNotFound(
                f"{self.policy_id}: expected the digest of one of {len(found)} candidates, got "
                f"{digest!r:.80}, which fits {len(matches)}"
            )
        return matches[0]

    def _remove_abandoned(self) -> None:
        """Remove what killed processes left, once nobody can still be filling it."""
        limit = time.time() - ABANDONED_SECONDS
        for folder in (self._candidates, self._versions):
            for path in folder.glob(".*.tmp"):
                with contextlib.suppress(OSError):
                    if path.stat().st_mtime < limit:
                        shutil.rmtree(path)


def _candidate_of(manifest: Manifest) -> Candidate:
    """What a version was made of."""
    names = Candidate.__dataclass_fields__
    return Candidate(**{name: getattr(manifest, name) for name in names})


def _visible(folder: Path) -> list[Path]:
    try:
        return [path for path in folder.iterdir() if not path.name.startswith(".")]
    except FileNotFoundError:
        return []


def _remove_directory(path: Path) -> None:
    """Make a directory disappear at once; what a kill leaves of it is a dot-directory."""
    with contextlib.suppress(FileNotFoundError):
        hidden = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
        os.rename(path, hidden)
        shutil.rmtree(hidden, ignore_errors=True)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise WeightsNotFound(f"expected {path}, which does not exist") from error


def _publish_directory(target: Path, files: Mapping[str, bytes]) -> None:
    """Make `target` with `files` in it appear at once. Raises FileExistsError when it is there."""
    make_directory(target.parent)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(6)}.tmp")
    temporary.mkdir()
    try:
        for name, data in files.items():
            write_synced(temporary / name, data)
        sync_directory(temporary)
        os.rename(temporary, target)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            raise FileExistsError(target) from error
        raise WeightStoreError(f"{target} cannot be written: {error}") from error
    sync_directory(target.parent)
