"""Follows one policy's published weights, and serves them or refuses them with a reason.

`WeightFollower` reads `live.json`, loads newer versions, and registers the served version under
`weights/{policy}/served/`. It runs on the thread for weights. The event loop receives its results
`served` and `standing`, which are immutable.

A live version that cannot be loaded is tried again with back-off of at most 30 seconds, as during
the restore of a folder or a short disk failure.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Hashable, Mapping
from typing import Generic, TypeVar

import msgspec

from ingest.protocol.weights import Published, PublishedCanary
from storage.errors import StorageError
from storage.experience.range_set import RangeSet
from storage.system.backoff import Backoff
from storage.weights.manifest import Live, Manifest, Served
from storage.weights.served import REGISTERED_SECONDS
from storage.weights.store import WeightFolder

log = logging.getLogger("headrace.collector")

RENEW_SECONDS, RENEW_AT_MOST = REGISTERED_SECONDS / 3, REGISTERED_SECONDS * 2 / 3
RENEWALS = 50
AGAIN = Backoff(0.1, 30.0)
MOST_RANGES, MOST_REFUSALS = 256, 32

P = TypeVar("P")


def renew_seconds(policies: int) -> float:
    """The age at which registrations are renewed: `RENEWALS` a second, unless that is too late."""
    return min(max(RENEW_SECONDS, policies / RENEWALS), RENEW_AT_MOST)


class Standing(msgspec.Struct, frozen=True):
    """The wanted version (the latest content of live.json), and the reason if it is not served.

    `refused`: how often published weights were refused, by kind: `older` than the served ones,
    `unusable`, or `unreadable` at the time.
    """

    wanted: Live | None = None
    why: str | None = None
    refused: Mapping[str, int] = msgspec.field(
        default_factory=lambda: {"older": 0, "unusable": 0, "unreadable": 0}
    )


class LoadedPolicy(msgspec.Struct, Generic[P], frozen=True):
    """The served version: a policy that acts, and the message for clients."""

    policy: P
    published: Published
    store_id: str
    generation: int
    version: int
    highest: int  # the highest version number given by then, which may be a canary's
    canary: P | None = None  # acts in `share` of the episodes
    canary_version: int = -1
    share: float = 0.0


class _OlderError(Exception):
    """The live version is older than the served one."""


class WeightFollower(Generic[P]):
    """Follows one store. `load` makes a policy of a version, or raises an error."""

    def __init__(
        self,
        store: WeightFolder,
        load: Callable[[Manifest, bytes], P],
        *,
        monotonic: Callable[[], float] = time.monotonic,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.served: LoadedPolicy[P] | None = None
        self.standing = Standing()
        self.collector_id = ""
        self._store, self._load = store, load
        self._monotonic, self._clock = monotonic, clock
        self._stamp: Hashable = None
        self._again_at, self._failures = float("inf"), 0
        self._renew_at = float("-inf")
        self._unwritten: str | None = None  # why the latest record was not written
        self._versions: RangeSet | None = None  # the served versions, once they are read
        self._refused: dict[str, str] = {}

    def look(self) -> bool:
        """Load a newer version; return whether `served` or `standing` has changed."""
        stamp, now = self._store.stamp(), self._monotonic()
        if stamp == self._stamp and now < self._again_at:
            return False
        if stamp != self._stamp:
            self._failures = 0
            self._renew_at = float("-inf")  # also after a restored backup
        self._stamp, self._again_at = stamp, float("inf")
        before = self.served, self.standing
        self._read(now)
        if before == (self.served, self.standing):
            return False
        self._renew_at = float("-inf")
        return True

    def _read(self, now: float) -> None:
        wanted, kind = self.standing.wanted, ""
        why: str | None = None
        try:
            wanted = self._wanted()
            if wanted is not None:
                self._take(wanted)
            elif self.served is not None:
                why, kind = "expected live.json, got no such file any more", "unreadable"
        except _OlderError as error:
            why, kind = str(error), "older"
        except OSError as error:
            why, kind = str(error), "unreadable"
        except (StorageError, ValueError) as error:
            why, kind = str(error), "unusable"
        except Exception as error:  # following continues, for all policies
            log.exception("policy %s: the published weights cannot be used", self._policy_id)
            why, kind = repr(error), "unusable"
        refused = dict(self.standing.refused)
        if why is not None:
            self._failures += 1
            self._again_at = now + AGAIN.delay(self._failures)
            if (wanted, why) != (self.standing.wanted, self.standing.why):
                refused[kind] += 1
                self._say(wanted, why, kind)
        elif self.standing.why is not None:
            log.warning("policy %s: the published version is served again", self._policy_id)
        self.standing = Standing(wanted, why, refused)

    def _wanted(self) -> Live | None:
        """The live version; if it had to be recovered, live.json is rewritten if possible."""
        store = self._store
        if store.pointer_damage():
            with contextlib.suppress(StorageError, OSError):
                return store.mended_live()
        return store.live()

    def _take(self, wanted: Live) -> None:
        """Serve the wanted version. Raises an error if it cannot be served."""
        served = self.served
        if served and (served.generation, served.version) == (wanted.generation, wanted.version):
            return
        manifest, weights = self._store.read(wanted.version)
        if served and manifest.store_id == served.store_id:
            self._require_newer(wanted, served)
        policy = self._load(manifest, weights)
        published = Published(manifest.to_json(), wanted.generation, weights)
        store, highest = self._store, wanted.version
        if isinstance(store, WeightFolder):
            highest = store.next_version - 1
        fresh = LoadedPolicy(
            policy, published, manifest.store_id, wanted.generation, wanted.version, highest
        )
        if wanted.canary_version is not None and wanted.canary_share > 0:
            try:
                fresh = self._with_canary(fresh, wanted.canary_version, wanted.canary_share)
            except Exception:
                if served is None:  # serve the live version, as the previous generation
                    published.generation -= 1
                    self.served = msgspec.structs.replace(fresh, generation=wanted.generation - 1)
                raise
        self.served = fresh
        self._known_versions().add(wanted.version)
        self._refused.pop(str(wanted.version), None)

    def _with_canary(self, served: LoadedPolicy[P], version: int, share: float) -> LoadedPolicy[P]:
        """Add a canary. Raises an error if it cannot be served; then its generation is not."""
        manifest, weights = self._store.read(version)
        canary = self._load(manifest, weights)
        served.published.canary = PublishedCanary(manifest.to_json(), weights, share)
        return msgspec.structs.replace(served, canary=canary, canary_version=version, share=share)

    def _require_newer(self, wanted: Live, served: LoadedPolicy[P]) -> None:
        if wanted.generation > served.generation:
            return
        self.note_seen(served.highest, served.generation)
        raise _OlderError(
            f"expected a newer generation than {served.generation} (version {served.version}), the "
            f"served one, got {wanted.generation} (version {wanted.version}): the weights were "
            "restored from a backup; the next publication gets a number after both"
        )

    def _say(self, wanted: Live | None, why: str, kind: str) -> None:
        log.warning(
            "policy %s: the published weights are not served (%s): %s", self._policy_id, kind, why
        )
        if wanted is not None and kind == "unusable":
            newest = wanted.version if wanted.canary_version is None else wanted.canary_version
            self._refused[str(newest)] = why  # the live version was served before the canary
            for version in list(self._refused)[:-MOST_REFUSALS]:
                del self._refused[version]

    @property
    def _policy_id(self) -> str:
        return self._store.policy_id

    def note_seen(self, version: int, generation: int) -> bool:
        """Make later publications use numbers after those seen here or by a client.

        Returns whether the store did not know them.
        """
        try:
            new = self._store.note_seen(version, generation)
        except (StorageError, OSError) as error:
            log.warning(
                "policy %s: the highest seen numbers cannot be stored: %s", self._policy_id, error
            )
            return False
        message = self._store.restored
        if message is not None:
            log.warning("%s", message)
        return new

    # registering

    def register(
        self, *, seconds: float = REGISTERED_SECONDS, renew: float = RENEW_SECONDS
    ) -> None:
        """Write the record of the served version if it is new, or `renew` seconds old.

        `seconds=0` withdraws it.
        """
        store, now = self._store, self._monotonic()
        if now < self._renew_at and seconds:
            return
        if not store.files.exist():  # nothing was ever published
            return
        self._renew_at = now + renew
        try:
            store.served.write(self.record(seconds))
        except OSError as error:
            why = error.strerror or str(error)  # not the name of a temporary file
            if why != self._unwritten:
                log.warning(
                    "policy %s: this collector cannot register the version that it serves, so "
                    "publishers under the root must ask it: %s",
                    self._policy_id,
                    error,
                )
            self._unwritten = why
        else:
            self._unwritten = None

    def record(self, seconds: float = REGISTERED_SECONDS) -> Served:
        """The record of the served, refused and wanted versions, valid for `seconds`."""
        served, wanted = self.served, self.standing.wanted
        versions = self._known_versions()
        return Served(
            collector_id=self.collector_id,
            generation=-1 if served is None else served.generation,
            version=-1 if served is None else served.version,
            wanted_generation=-1 if wanted is None else wanted.generation,
            wanted_version=-1 if wanted is None else wanted.version,
            why=self.standing.why,
            until=int((self._clock() + seconds) * 1_000_000),
            served=versions.to_json()[-MOST_RANGES:],
            refused=dict(self._refused),
        )

    def _known_versions(self) -> RangeSet:
        """The versions that this collector has served, also before its latest start."""
        if self._versions is None:
            self._versions = RangeSet()
            if self.collector_id:
                for record in self._store.served.read():
                    if record.collector_id == self.collector_id:
                        self._versions = RangeSet.from_json(record.served)
                        self._refused = {**record.refused, **self._refused}
        return self._versions
