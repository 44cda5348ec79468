"""`WeightFolder`: candidates, immutable numbered versions, and the pointer to the live one.

    weights/{policy_id}/
        store.json                     the store's id
        candidates/{digest}/           candidate.json, weights.safetensors, lineage.json, and with
                                       fold policies folds.json, folds.safetensors (`...folds`)
        versions/{n}/                  manifest.json, weights.safetensors, lineage.json
        live.json, live.copy.json      generation, version, canary, pin; changed under `lock`
        leases/{n}.json                who trains it (`storage.weights.lease`)
        served/{collector_id}.json     what each collector serves (`storage.weights.served`)
        pruned.jsonl                   names of versions without content (`...retention`)
    numbers/{policy_id}.json           the highest numbers given (`...highest_numbers`)

All of it is objects (`storage.objects`) of a folder or another store. A version appears whole, and
only where there is none, so two promotions never share a number.

Weights that the store's `check` refuses never become a candidate, get a number or go live. This
package cannot act with weights, so the caller that opens a store for writing passes the check:
`policy.inference.weight_store` has the one for policies.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeAlias

from storage.errors import (
    GenerationConflict,
    LeaseHeld,
    LiveChanged,
    ObjectExists,
    PolicyPinned,
    WeightsDamaged,
    WeightsNotFound,
    WeightStoreError,
)
from storage.experience.range_set import RangeSet
from storage.objects.memory import MemoryObjects
from storage.objects.opening import Root
from storage.weights.decisions import record
from storage.weights.files import PolicyFiles
from storage.weights.folders import CandidateFolders, VersionFolders
from storage.weights.folds import FOLDS_METRIC, Folds
from storage.weights.highest_numbers import HighestNumbers
from storage.weights.lease import current_lease, require_fence
from storage.weights.lineage import Lineage, Untrained, lineage_document
from storage.weights.manifest import (
    LINEAGE_FILE,
    WEIGHTS_FILE,
    Candidate,
    Json,
    Live,
    Manifest,
    Pin,
    Pruned,
    Weights,
    decode_weights,
    encode_weights,
    plain_document,
    seal_document,
    sha256,
)
from storage.weights.pointer import LivePointer
from storage.weights.retention import hourly
from storage.weights.served import ServedRecords, ever_served

log = logging.getLogger("headrace.weights")

_STORE = "store.json"

Check: TypeAlias = Callable[[Candidate, Weights], None]
"""Raises WeightsRefused if a policy with the candidate's spec and filter state cannot act with the
weights."""


class WeightFolder:
    """The weights of one policy under a root: a directory, or other `Objects`.

    Any number of processes may use it. `check` validates weights wherever they enter; without it
    the store is read-only. `admit` runs before, for a new candidate alone: what it passed is known
    by its digest from then on. `clock` returns seconds since the epoch.
    """

    def __init__(
        self,
        root: Root,
        policy_id: str,
        *,
        check: Check | None = None,
        admit: Check | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.policy_id = policy_id
        self.files = PolicyFiles(root, policy_id)
        self._candidates = CandidateFolders(self.files)
        self._versions = VersionFolders(self.files)
        self._check, self._admit = check, admit
        self._passed = ""  # the digest of the candidate that passed the check last
        self._logged_damage: set[str] = set()  # damage that was logged
        self._clock = clock
        self._numbers = HighestNumbers(self.files)
        self.served = ServedRecords(self.files)
        self._pointer = LivePointer(self.files, self._versions, self._numbers, self.served)

    def __repr__(self) -> str:
        return f"WeightStore({str(self.files.objects)!r}, {self.policy_id!r})"

    @property
    def in_memory(self) -> bool:
        """Whether the store ends with its process."""
        return isinstance(self.files.objects, MemoryObjects)

    @property
    def directory(self) -> Path:
        """The policy's folder under a root that is a directory."""
        return Path(str(self.files))

    @property
    def store_id(self) -> str:
        """12 hex digits, created on first use. Generations are comparable within one store only."""
        name = self.files.name(_STORE)
        if self.files.objects.status(name) is None:
            document = seal_document("store", {"store_id": secrets.token_hex(6)})
            with contextlib.suppress(ObjectExists):  # another process was first
                self.files.objects.put_if_absent(name, document)
        try:
            return str(self.files.document("store", _STORE)["store_id"])
        except WeightsDamaged as error:
            return self._known_id(str(error))

    def _known_id(self, damage: str) -> str:
        """The id in the newest intact version, which replaces a damaged store.json."""
        known = self._versions.whole()
        if not known:
            raise WeightsDamaged(
                f"{damage}; no version is intact either: remove the file to get a new id"
            )
        store_id = known[max(known)].store_id
        log.warning("%s; continuing with the id of version %d, %s", damage, max(known), store_id)
        with contextlib.suppress(OSError):
            self.files.write("store", _STORE, {"store_id": store_id})
        return store_id

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
        folds: Mapping[str, bytes] | None = None,
    ) -> str:
        """Store a trained checkpoint and return its digest.

        Adding the same content again gives the same candidate. Arguments:
        - `weights`: arrays by name; `spec`, `filter_state`: how to act with them (JSON).
        - `metrics`: results of the training (JSON).
        - `lineage`: stream -> the ordinal ranges trained on; `untrained`: the rows of these
          ordinals that were not trained on (storage.weights.lineage).
        - `folds`: the files of fold policies that judge its own rows (`...folds.fold_files`).
        - `checkpoint`: the name of the trainer's checkpoint that the weights come from.
        - `number`: the version that the candidate is to become.

        Raises WeightsRefused for weights that the spec cannot act with, and ValueError for values
        that JSON cannot hold. Raises GenerationConflict, and stores nothing, if `number` is neither
        the next version nor this candidate's.
        """
        files = {
            WEIGHTS_FILE: encode_weights(weights),
            LINEAGE_FILE: lineage_document(lineage, untrained or {}),
        }
        more = {} if folds is None else dict(folds)
        if more:
            metrics = {**metrics, FOLDS_METRIC: {name: sha256(data) for name, data in more.items()}}
        candidate = Candidate(
            policy_id=self.policy_id,
            spec=plain_document(spec, "spec"),
            filter_state=(
                None if filter_state is None else plain_document(filter_state, "filter_state")
            ),
            metrics=plain_document(metrics, "metrics"),
            checkpoint=checkpoint,
            digests={name: sha256(data) for name, data in files.items()},
        )
        if self._admit is not None and candidate.digest not in self.candidates():
            self._admit(candidate, weights)
        self._require_usable(candidate, files[WEIGHTS_FILE])
        if number is not None and not self._may_be(number, candidate.digest):
            raise self._not_next(number)
        with contextlib.suppress(ObjectExists):  # it is stored already
            self._candidates.add(candidate.digest, candidate, {**files, **more})
        return candidate.digest

    def candidates(self) -> list[str]:
        """The digests of all candidates, sorted."""
        return self._candidates.keys()

    def added(self, digest: str) -> int:
        """When a candidate was stored, in microseconds since the epoch. Raises WeightsNotFound."""
        return self._candidates.added(digest)

    def latest(self) -> str | None:
        """The digest of the candidate that was stored last, damaged or not; None without any."""
        added: dict[str, int] = {}
        for digest in self.candidates():
            with contextlib.suppress(WeightsNotFound):  # a trainer has pruned it meanwhile
                added[digest] = self.added(digest)
        return max(added, key=lambda digest: added[digest], default=None)

    def candidate(self, digest: str) -> Candidate:
        """The description of one candidate, found by the first 6 or more digits of its digest.

        Raises WeightsNotFound, WeightsDamaged.
        """
        return self._candidates.get(digest)

    def load_candidate(self, digest: str) -> tuple[Candidate, dict[str, Any]]:
        """A candidate and its arrays; their digest is verified before they are parsed."""
        candidate = self.candidate(digest)
        return candidate, self._candidates.arrays(candidate.digest, candidate)

    # versions

    def promote(self, digest: str) -> int:
        """Give a candidate the next version number and return it. The version is not live yet."""
        version = self._promote(self.candidate(digest))
        with self.files.locked():
            self._numbers.note(version, 0)
        return version

    def _promote(self, candidate: Candidate, number: int | None = None) -> int:
        files = self._candidates.contents(candidate.digest, candidate)
        return self._number(candidate, files, expected=number)

    def _not_next(self, number: int | None) -> GenerationConflict:
        return GenerationConflict(
            f"{self.policy_id}: expected the next version, {self.next_version}, got {number}"
        )

    def _may_be(self, number: int, digest: str) -> bool:
        """Whether a candidate may become, or is, the version of that number."""
        if number in self.versions():
            return self._candidate_in(number) == digest
        return number == self.next_version

    @property
    def next_version(self) -> int:
        """The number of the next version: one that was never used, even before a restore."""
        live = self.live()
        highest = max(self._numbers.read().version, live.version if live else 0)
        return max([*self.versions(), highest]) + 1  # the newest version is never pruned

    def pruned(self) -> dict[int, Pruned]:
        """The records of versions whose content was removed, by number."""
        return self._versions.pruned.read()

    def versions(self) -> list[int]:
        """All version numbers whose content is here, ascending."""
        return self._versions.numbers()

    def require_version(self, version: int, use: str) -> None:
        """Raise WeightsNotFound, with the versions there are, unless one is here; for what use."""
        there = self.versions()
        if version not in there:
            latest = ", ".join(map(str, there[-10:]))
            known = f"one of the versions {latest}" if there else "a version"
            if len(there) > 10:
                known = f"one of {len(there):,} versions, the latest of which are {latest},"
            raise WeightsNotFound(
                f"{self.policy_id}: expected {known} to {use}, got {version}"
                f"{'' if there else ', and there is none yet'}"
            )

    def manifest(self, version: int) -> Manifest:
        """The manifest of one version. Raises WeightsNotFound, WeightsDamaged."""
        return self._versions.manifest(version)

    def read(self, version: int) -> tuple[Manifest, bytes]:
        """A version's manifest and safetensors bytes, whose digest was checked."""
        manifest = self.manifest(version)
        return manifest, self._versions.content(str(version), manifest, WEIGHTS_FILE)

    def load(self, version: int) -> tuple[Manifest, dict[str, Any]]:
        """A version's manifest and arrays; their digest is verified before they are parsed."""
        manifest = self.manifest(version)
        return manifest, self._versions.arrays(str(version), manifest)

    def lineage(self, version: int) -> dict[str, RangeSet]:
        """stream -> the ordinals that a version was trained on."""
        return self._versions.lineage(str(version), self.manifest(version))

    def untrained(self, version: int) -> dict[str, list[list[int]]]:
        """stream -> [ordinal, first row, count]: rows of the lineage's ordinals not trained on."""
        return self._versions.untrained(str(version), self.manifest(version))

    def candidate_lineage(self, digest: str) -> dict[str, RangeSet]:
        """stream -> the ordinals that a candidate was trained on."""
        candidate = self.candidate(digest)
        return self._candidates.lineage(candidate.digest, candidate)

    def folds(self, digest: str) -> Folds | None:
        """The fold policies of a candidate, also of one that is a version; None without any.

        Raises WeightsNotFound, WeightsDamaged.
        """
        return self._candidates.folds(self.candidate(digest).digest)

    # the live version

    def live(self) -> Live | None:
        """The live version, None before the first one.

        If live.json is damaged or lost, the result comes from its copy or is reconstructed. A
        reconstructed one is pinned (storage.weights.pointer). Either is logged in one line.
        """
        return self._pointer.read()

    def mended_live(self) -> Live | None:
        """Rewrite a damaged pointer or copy, then return `live`. Raises WeightStoreError."""
        if not self._pointer.in_order():
            with self.files.locked():
                self._pointer.mend()
        return self._pointer.read()

    def pointer_damage(self) -> dict[str, str]:
        """File name -> what is wrong with it, for live.json and its copy."""
        damage = {
            "live.json": self._pointer.look().wrong,
            "live.copy.json": self._pointer.copy_damage(),
        }
        return {name: text for name, text in damage.items() if text is not None}

    def note_seen(self, version: int, generation: int) -> bool:
        """Record numbers that a collector or a client has seen, so that the next ones are higher.

        A collector calls this if they are higher than the store's, as after a restore from a
        backup. Returns whether they were recorded only now. Raises WeightStoreError.
        """
        with self.files.locked():
            return self._numbers.note(version, generation)

    @property
    def restored(self) -> str | None:
        """A text if the store is older than its highest numbers; None otherwise.

        This happens after a restore from a backup, and after a publication that was interrupted
        before it changed the live version.
        """
        highest, live = self._numbers.read(), self.live()
        generation = live.generation if live else 0
        here = max([*self.versions(), live.version if live else 0], default=0)
        if highest.generation <= generation and highest.version <= here:
            return None
        return (
            f"{self.policy_id}: version {highest.version} and generation {highest.generation} were "
            f"given, and {self.files} has no more than version {here} and generation "
            f"{generation}: it was restored from a backup, or a publication was cut off. The next "
            f"version is {self.next_version}"
        )

    def stamp(self) -> Hashable:
        """A value that changes with the live version; costs one `stat`."""
        return self._pointer.stamp()

    def set_live(
        self,
        version: int,
        *,
        expected_generation: int | None = None,
        canary: tuple[int, float] | None = None,
        fence: int | None = None,
    ) -> Live:
        """Make a version live, in a new generation.

        `canary`: (version, share of episodes, 0 to 1). With `expected_generation` (0: none is live)
        this is a compare-and-set. `fence` is the number of a follower's lease
        (storage.weights.lease). The versions are verified first. Raises WeightsNotFound,
        WeightsDamaged, WeightsRefused, PolicyPinned, GenerationConflict, LeaseHeld, ValueError.
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
        forced: bool = False,
    ) -> Live:
        """Do what `set_live` does; with `pin` or `forced`, also while the policy is pinned."""
        canary_version, share = canary if canary is not None else (None, 0.0)
        if not 0.0 <= share <= 1.0:
            raise ValueError(f"canary: expected a share of 0 to 1, got {share}")
        if not self.files.exist():
            raise WeightsNotFound(f"expected {self.files}, which does not exist")
        with self.files.locked():
            if fence is not None:
                require_fence(self.files, fence)
            for number in (version, canary_version):
                if number is not None:  # under the lock, as `prune` could remove it in between
                    manifest, data = self.read(number)
                    self._require_usable(candidate_of(manifest), data)
            found = self._pointer.look()
            before = found.live
            if pin is None and not forced and before is not None and before.pinned is not None:
                self._require_no_hold(before)
            generation = self._require_generation(before, expected_generation)
            if (message := self.restored) is not None:
                log.warning("%s", message)
            live = Live(
                generation=max(generation, self._numbers.read().generation) + 1,
                version=version,
                canary_version=canary_version,
                canary_share=float(share),
                pinned=pin or (before.pinned if before else None),
            )
            highest = max(version, canary_version or 0)
            self._numbers.note(highest, live.generation)  # before others can see the new numbers
            self._pointer.write(live, found)
        return live

    def publish(
        self, digest: str, *, expected_generation: int | None = None, fence: int | None = None
    ) -> Live:
        """Promote a candidate and make it live. Safe to retry: a live candidate stays live.

        With `expected_generation` (0: none is live), raises GenerationConflict if another
        publication came first. `fence` is the number of a follower's lease. Raises what `set_live`
        raises: PolicyPinned while a rollback pins the policy, and the candidate is kept.
        """
        live = self.mended_live()
        self._require_no_hold(live)
        candidate = self.candidate(digest)
        if (
            live
            and not live.canary_version
            and self._candidate_in(live.version) == candidate.digest
        ):
            return live
        found = self._require_generation(live, expected_generation)
        if fence is not None:  # before a number is given; checked again under the lock
            require_fence(self.files, fence)
        version = self._unpublished(candidate.digest, live) or self._promote(candidate)
        return self._point(version, expected_generation=found, fence=fence)

    def _candidate_in(self, version: int) -> str | None:
        """The digest of the candidate that a version came from.

        None if the manifest is damaged or gone, so that another candidate can still be published.
        """
        try:
            return self.manifest(version).candidate
        except (WeightsDamaged, WeightsNotFound) as error:
            if str(error) not in self._logged_damage:
                log.warning("%s", error)
            self._logged_damage.add(str(error))
            return None

    def _unpublished(self, candidate: str, live: Live | None) -> int | None:
        """The number that an interrupted attempt to publish this candidate gave it, if any."""
        newest = max(self.versions(), default=0)
        if newest <= (live.version if live else 0):
            return None
        if self._candidate_in(newest) != candidate:
            return None
        known = self.manifest(newest)
        fits = known.copy_of is None and known.parent == (live.version if live else None)
        return newest if fits else None

    def publish_as(self, digest: str, version: int) -> Live:
        """Publish a candidate under a number that the caller proposes. Safe to retry.

        Raises GenerationConflict, which names the next number, if the proposed one is not it, and
        what `publish` raises.
        """
        live = self.mended_live()
        self._require_no_hold(live)
        candidate = self.candidate(digest)
        if version in self.versions() and self._candidate_in(version) == candidate.digest:
            known = self.manifest(version)  # numbered by an earlier attempt
            if live and live.version == version:
                return live
            if known.copy_of is not None or known.parent != (live.version if live else None):
                raise GenerationConflict(
                    f"{self.policy_id}: expected a new version, but {version} was live before"
                )
        else:
            self._promote(candidate, version)
        return self._point(version, expected_generation=live.generation if live else 0)

    def rollback(
        self,
        to: int | None = None,
        *,
        expected_generation: int | None = None,
        by: str = "a program",
        why: str = "",
    ) -> Live:
        """Publish the content of an old version as a new one, and pin the policy to it.

        - While a canary runs and `to` is None, this ends the canary, and the live version stays.
        - Otherwise, without `to`: the target is the last version before the live content that a
          collector served and none refused. If no collector recorded this, it is the previous live
          version.
        - With `to`: the target is that version if its weights are usable, even if a collector
          refused it. The live version is a target only after a restore from a backup (`restored`).

        `by` and `why` are stored with the pin; until `resume` only another rollback changes the
        live version. Raises WeightsNotFound if there is no target, ValueError for the live version,
        and GenerationConflict if the live generation is not `expected_generation`. Without it, a
        version that a trainer publishes meanwhile is rolled back as well.
        """
        live = self.mended_live()
        if live is None:
            raise WeightsNotFound(
                f"{self.policy_id}: expected a live version to roll back, got none"
            )
        self._require_generation(live, expected_generation)
        if to == live.version and self.restored is None:
            raise ValueError(
                f"{self.policy_id}: expected another version than the live one to go back to, got "
                f"{to}; {_instead_of_rollback(live)}"
            )
        now = int(self._clock() * 1_000_000)
        if to is None and live.canary_version is not None:
            done = f"rolled back the canary, version {live.canary_version}"
            ended = self._point(
                live.version,
                expected_generation=live.generation,
                pin=Pin(by=by, when=now, why=why or done),
            )
            self._record_rollback(live.canary_version, by, done, why, published=False)
            return ended
        target = self._before(live.version) if to is None else to
        self.require_version(target, "go back to")
        manifest, _ = self.read(target)
        while True:
            done = f"rolled back from version {live.version} to the content of {target}"
            pin = Pin(by=by, when=now, why=why or done)
            version = self._number(manifest, self._versions.contents(str(target), manifest))
            try:
                now_live = self._point(version, expected_generation=live.generation, pin=pin)
            except GenerationConflict:  # a trainer published first: roll that back as well
                latest = self.live()
                if expected_generation is not None or latest is None:
                    raise
                live = latest
            else:
                self._record_rollback(version, by, done, why, published=True)
                return now_live

    def _record_rollback(
        self, version: int, by: str, done: str, why: str, *, published: bool
    ) -> None:
        """Keep who rolled back and why beyond the pin. Where that fails the rollback stands."""
        decision = {
            "policy_id": self.policy_id,
            "kind": "rollback",
            "published": published,
            "version": version if published else None,
            "by": by,
            "reasons": [done, why] if why else [done],
        }
        try:
            candidate = self._candidate_in(version) or ""
            document = {**decision, "candidate": candidate}
            record(self.files.objects, document, clock=self._clock)
        except OSError as error:
            log.error("policy %s: %s; this is not recorded: %s", self.policy_id, done, error)

    # canaries

    def start_canary(
        self, digest: str, share: float, *, expected_generation: int | None = None
    ) -> Live:
        """Let a candidate act in a share of the episodes, and the live version in the others.

        Until `promote_canary` or `rollback` nothing else is published. Repeating the call is safe;
        it changes the share of a running canary. Raises what `set_live` raises, WeightsNotFound if
        no version is live, and LeaseHeld if a follower holds the lease and the policy is not
        paused: its next publication would end the comparison.
        """
        if not 0.0 < share < 1.0:
            raise ValueError(f"canary: expected a share above 0 and below 1, got {share}")
        live, candidate = self.mended_live(), self.candidate(digest)
        if live is None:
            raise WeightsNotFound(
                f"{self.policy_id}: expected a live version to compare a canary with, got none: "
                "`headrace publish` makes a first version live if it is better than the logging "
                "policy, and `headrace publish --no-gate` if the gate cannot judge it"
            )
        if self._candidate_in(live.version) == candidate.digest:
            raise ValueError(f"canary: {digest[:12]} is live already, as version {live.version}")
        version = live.canary_version
        if version is None:
            self._require_no_follower(live)
            version = self._unpublished(candidate.digest, live) or self._promote(candidate)
        elif self._candidate_in(version) != candidate.digest:
            self._require_no_hold(replace(live, pinned=None))
        elif live.canary_share == share:
            return live
        if expected_generation is None:
            expected_generation = live.generation
        return self._point(
            live.version,
            expected_generation=expected_generation,
            canary=(version, share),
            forced=True,
        )

    def expect(self, candidate: str | None, generation: int | None) -> int | None:
        """The live generation, if it is that one, and its canary came from that candidate.

        Without a canary the live version has to come from it. None: nothing is expected. Raises
        LiveChanged.
        """
        if candidate is None and generation is None:
            return None
        live = self.mended_live()
        if generation is not None and (live is None or live.generation != generation):
            found = live.generation if live else "none"
            raise LiveChanged(f"{self.policy_id}: expected generation {generation}, got {found}")
        if live is not None and candidate is not None:
            version = live.canary_version or live.version
            found = self._candidate_in(version) or ""
            if len(candidate) < 6 or not found.startswith(candidate):
                which = "canary" if live.canary_version else "live version"
                raise LiveChanged(
                    f"{self.policy_id}: expected candidate {candidate[:12]} in the {which}, got "
                    f"{found[:12]} in version {version}"
                )
        return live.generation if live else 0

    def promote_canary(self, *, expected_generation: int | None = None) -> Live:
        """Make the canary live in all episodes. Raises WeightsNotFound if none is running."""
        live = self.mended_live()
        if live is None or live.canary_version is None:
            raise WeightsNotFound(f"{self.policy_id}: expected a running canary, got none")
        if expected_generation is None:
            expected_generation = live.generation
        return self._point(
            live.canary_version, expected_generation=expected_generation, forced=True
        )

    def _require_no_follower(self, live: Live) -> None:
        lease = current_lease(self.files)
        if live.pinned is None and lease is not None and lease.held(self._clock()):
            raise LeaseHeld(
                f"{self.policy_id}: followed by {lease.holder}, which publishes after each update; "
                f"`headrace pause --policy-id {self.policy_id}` first"
            )

    def pause(
        self, *, by: str = "a program", why: str = "", expected_generation: int | None = None
    ) -> tuple[Pin, bool]:
        """Pin the live version, so that trainers continue but publish nothing until `resume`.

        Returns (the pin, whether it is new): an earlier pin stays, with its reason. Raises
        WeightsNotFound if no version is live, GenerationConflict for another generation.
        """
        pin = Pin(by=by, when=int(self._clock() * 1e6), why=why or "paused")
        if self.mended_live() is not None:
            with self.files.locked():
                found = self._pointer.look()
                if (live := found.live) is not None:
                    self._require_generation(live, expected_generation)
                    if live.pinned is not None:
                        return live.pinned, False
                    self._pointer.write(replace(live, pinned=pin), found)
                    return pin, True
        raise WeightsNotFound(f"{self.policy_id}: expected a live version to pause, got none")

    def resume(self, *, expected_generation: int | None = None) -> Pin | None:
        """Remove the pin, so that the policy can be published again.

        Returns the removed pin, None if there was none. The live version and its generation stay.
        Raises WeightsNotFound if no version is live, GenerationConflict for another generation.
        """
        if self.mended_live() is None:
            raise WeightsNotFound(
                f"{self.policy_id}: expected a pinned version, but no version is live"
            )
        with self.files.locked():
            found = self._pointer.look()
            live = found.live
            self._require_generation(live, expected_generation)
            if live is None or live.pinned is None:
                return None
            self._pointer.write(replace(live, pinned=None), found)
            return live.pinned

    def prune(self, keep: int, *, checkpoint: str | None = None, forget: bool = False) -> list[int]:
        """Remove the content of old versions and return their numbers; their digests are kept.

        These versions keep their content:
        - the newest `keep`, and one per hour of the last 30 days;
        - the live one and the canary, with their parents and the versions that a rollback would
          use;
        - those with a damaged manifest, for `verify` to report.

        The candidate of a removed version is removed unless another version came from it.
        Unnumbered candidates stay; of those that name `checkpoint` (a trainer's that lost a race or
        were held back by a pin) only the newest `keep`. Readers see a version whole or not at all.
        With `forget`, for a store that ends with its process, none is kept per hour and no digest.
        Raises ValueError if `keep` is below 1.
        """
        if keep < 1:
            raise ValueError(f"keep: expected 1 or more, got {keep}")
        if not self.files.exist():
            return []
        with self.files.locked():
            versions = self.versions()
            known = self._versions.whole()
            created = {version: manifest.created for version, manifest in known.items()}
            kept = set(versions[-keep:]) | self._needed()
            kept |= set() if forget else hourly(created, self._clock())
            gone = [manifest for version, manifest in known.items() if version not in kept]
            promoted = {known[version].candidate for version in kept & known.keys()}
            candidates = {one.candidate for one in gone} - promoted
            if checkpoint is not None:
                candidates |= self._candidates.superseded(checkpoint, keep, promoted)
            self._versions.prune(gone, forget=forget)
            for digest in candidates:
                self._candidates.remove(digest)
            self.served.forget(self._clock())
        return [one.version for one in gone]

    # inside

    def _require_usable(self, candidate: Candidate, data: bytes) -> None:
        """Raise WeightsRefused unless a policy can act with the weights in these bytes."""
        if self._check is None:
            raise WeightStoreError(
                f"{self.files} is open for reading: expected a store that checks weights, as "
                "headrace.WeightStore does"
            )
        if candidate.digest == self._passed:
            return
        self._check(candidate, decode_weights(data, candidate.digests[WEIGHTS_FILE], "weights"))
        self._passed = candidate.digest

    def require_no_hold(self) -> None:
        """Raise PolicyPinned while a rollback, a pause or a canary holds the live version."""
        self._require_no_hold(self.mended_live())

    def _require_no_hold(self, live: Live | None) -> None:
        if live is not None and (pin := live.hold) is not None:
            is_pin = pin is live.pinned
            ends = "`headrace resume`" if is_pin else "`headrace promote` or `rollback`"
            raise PolicyPinned(
                f"{self.policy_id}: version {live.version} is {'pinned' if is_pin else 'held'} by "
                f"{pin.by} ({pin.why}); {ends} with this root and policy id ends that"
            )

    def _require_generation(self, live: Live | None, expected: int | None) -> int:
        """The live generation, 0 for none. Raises GenerationConflict unless it is the expected."""
        found = live.generation if live else 0
        if expected not in (None, found):
            raise GenerationConflict(
                f"{self.policy_id}: expected generation {expected} to be live, got {found}"
            )
        return found

    def _needed(self) -> set[int]:
        """The live version and the canary, and the versions that a rollback of them reads."""
        live = self.live()
        needed: set[int | None] = set()
        for version in (live.version, live.canary_version) if live else ():
            if version is not None:
                needed.add(version)
                with contextlib.suppress(WeightsDamaged, WeightsNotFound):
                    manifest = self.manifest(version)
                    needed |= {manifest.parent, manifest.copy_of}
                with contextlib.suppress(WeightsNotFound):
                    needed.add(self._before(version))
        return {version for version in self.versions() if version in needed}

    def _before(self, version: int) -> int:
        """The intact version that a rollback goes to. Raises WeightsNotFound."""
        served, refused = ever_served(self.served.read())
        there, nearest = set(self.versions()), None
        unusable = {self._candidate_in(one) for one in there if one in refused} | {None}
        for one in self._versions.earlier(version):
            if one not in there or self._candidate_in(one) in unusable:
                continue
            origin = self.manifest(one).copy_of or one
            known = one in served or origin in served or not served
            if (known or nearest is None) and self._versions.is_whole(one):
                if known:
                    return one
                nearest = one
        if nearest is None:
            text = f"expected a usable version before {version}, got none"
            with contextlib.suppress(WeightStoreError):
                if (copied := self.manifest(version).copy_of) is not None:
                    text += (
                        f"; version {version} has the content of version {copied}, and what came "
                        "after that was rolled back"
                    )
            others = [one for one in there if one != version]
            way = (
                "`--to` names another one"
                if others
                else "clients act with this one until `headrace publish` makes another one live"
            )
            raise WeightsNotFound(f"{self.policy_id}: {text}; {way}")
        return nearest

    def _number(
        self,
        described: Candidate | Manifest,
        files: Mapping[str, bytes],
        *,
        expected: int | None = None,
    ) -> int:
        """Give the content of a candidate, or of a version, the next number, and return it."""
        if isinstance(described, Manifest):
            candidate, digest = candidate_of(described), described.candidate
            copy_of: int | None = described.version
        else:
            candidate, digest, copy_of = described, described.digest, None
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
                candidate=digest,
                created=int(self._clock() * 1_000_000),
            )
            with contextlib.suppress(ObjectExists):  # taken meanwhile: use the next number
                self._versions.add(str(version), manifest, files)
                return version


def _instead_of_rollback(live: Live) -> str:
    """What pins the live version, as part of a sentence."""
    if live.canary_version is None:
        return "`headrace pause` pins the live version"
    return (
        f"`headrace rollback` without --to ends the canary, version {live.canary_version}, and "
        "pins the live version"
    )


def candidate_of(manifest: Manifest) -> Candidate:
    """The candidate that a version came from."""
    names = Candidate.__dataclass_fields__
    return Candidate(**{name: getattr(manifest, name) for name in names})
