"""`MemoryWeightStore`: `WeightStore` in memory, reduced to the part that live clients need."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import asdict

from storage.declarations.declaration import check_policy_id
from storage.errors import GenerationConflict, WeightsNotFound
from storage.weights.candidate_files import candidate_files
from storage.weights.lineage import Lineage, Untrained
from storage.weights.manifest import (
    WEIGHTS_FILE,
    Candidate,
    Json,
    Live,
    Manifest,
    Weights,
    decode_weights,
)
from storage.weights.store import Check


class MemoryWeightStore:
    """Stores the latest candidate, the live version and the previous one.

    Versions and generations are numbered as in a `WeightStore`. Every instance has its own store
    id, so that clients never mistake one run's versions for another's. Thread-safe.
    """

    def __init__(
        self, policy_id: str, *, check: Check, clock: Callable[[], float] = time.time
    ) -> None:
        self.policy_id = check_policy_id(policy_id)
        self._check = check
        self.store_id = secrets.token_hex(6)
        self._clock = clock
        self._lock = threading.Lock()
        self._candidate: tuple[Candidate, bytes] | None = None
        self._live: Live | None = None
        self._versions: dict[int, tuple[Manifest, bytes]] = {}

    def add_candidate(
        self,
        weights: Weights,
        *,
        spec: dict[str, Json],
        metrics: dict[str, Json],
        lineage: Lineage,
        filter_state: dict[str, Json] | None = None,
        checkpoint: str | None = None,
        untrained: Untrained | None = None,
    ) -> str:
        """Store a candidate in place of the previous one; see `WeightStore.add_candidate`."""
        candidate, files = candidate_files(
            self.policy_id, weights, spec, metrics, lineage, filter_state, checkpoint, untrained
        )
        data = files[WEIGHTS_FILE]
        self._check(candidate, decode_weights(data, candidate.digests[WEIGHTS_FILE], "weights"))
        with self._lock:
            self._candidate = candidate, data
        return candidate.digest

    def publish(self, digest: str, *, expected_generation: int | None = None) -> Live:
        """Make the latest candidate live. Publishing the live one again changes nothing.

        Raises WeightsNotFound for any other candidate, and GenerationConflict if the live
        generation is not the expected one (0: none is live).
        """
        with self._lock:
            if self._candidate is None or self._candidate[0].digest != digest:
                raise WeightsNotFound(
                    f"{self.policy_id}: expected the latest candidate, got {digest!r:.80}"
                )
            candidate, data = self._candidate
            live = self._live
            if live is not None and self._versions[live.version][0].candidate == digest:
                return live
            found = 0 if live is None else live.generation
            if expected_generation not in (None, found):
                raise GenerationConflict(
                    f"{self.policy_id}: expected generation {expected_generation} to be live, "
                    f"got {found}"
                )
            number = 1 if live is None else live.version + 1
            manifest = Manifest(
                **asdict(candidate),
                store_id=self.store_id,
                version=number,
                parent=number - 1 or None,
                copy_of=None,
                candidate=digest,
                created=int(self._clock() * 1_000_000),
            )
            self._versions[number] = manifest, data
            self._versions.pop(number - 2, None)  # a reader may still use the previous version
            self._live = Live(generation=number, version=number)
            return self._live

    def live(self) -> Live | None:
        """The live version, None before the first one."""
        return self._live

    def read(self, version: int) -> tuple[Manifest, bytes]:
        """A version's manifest and safetensors bytes. Raises WeightsNotFound if not stored."""
        try:
            return self._versions[version]
        except KeyError:
            raise WeightsNotFound(f"{self.policy_id}: version {version} is not kept") from None

    def stamp(self) -> Hashable:
        """A value that changes with every `publish`."""
        live = self._live
        return None if live is None else live.generation
