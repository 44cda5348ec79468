"""Publishing from inside the trainer's process, which must survive failures to publish.

The collector ends with that process, so a rollback or a full disk under `weights/` must not end it.
While a rollback pins the policy, its candidates are stored, and clients act with the live version.
Old versions and candidates are removed by the rules of `headrace train --follow`.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from storage.errors import PolicyPinned, WeightsNotFound
from storage.spaces.descriptors import Space
from storage.weights.lineage import Lineage, Untrained
from storage.weights.manifest import Live, finite
from storage.weights.store import WeightFolder

log = logging.getLogger("headrace.server")

KEEP_VERSIONS = 32
KEEP_IN_MEMORY = 2
"""The live version, and the previous one, which a reader may still use."""
PRUNE_EVERY = 16
"""The number of candidates between two removals of old files."""
CHECKPOINT = "embedded"
"""The checkpoint name of these candidates, which distinguishes old ones from other candidates."""


class _ToJson(Protocol):
    def to_json(self) -> dict[str, Any]: ...


class _Spec(_ToJson, Protocol):
    @property
    def observation(self) -> Space: ...
    @property
    def action(self) -> Space: ...


class Publishable(Protocol):
    """Something that clients can act with, such as `policy.Policy`."""

    @property
    def spec(self) -> _Spec: ...
    @property
    def filter(self) -> _ToJson: ...
    def get_weights(self) -> Mapping[str, npt.NDArray[np.float32]]: ...


class LocalPublisher:
    """The publications of one process, by policy."""

    def __init__(self) -> None:
        self._kept: Counter[str] = Counter()
        self._pinned: dict[str, int] = {}  # the generation whose pin was logged

    def keep(
        self,
        store: WeightFolder,
        policy: Publishable,
        *,
        metrics: Mapping[str, Any],
        lineage: Lineage,
        untrained: Untrained,
    ) -> str:
        """Store a candidate with a policy's weights and filter; return its digest."""
        name = store.policy_id
        if store.in_memory:
            store.prune(KEEP_IN_MEMORY, checkpoint=CHECKPOINT, forget=True)
        elif self._kept[name] % PRUNE_EVERY == PRUNE_EVERY - 1:
            store.prune(KEEP_VERSIONS, checkpoint=CHECKPOINT)
        self._kept[name] += 1
        return store.add_candidate(
            policy.get_weights(),
            spec=policy.spec.to_json(),
            metrics=finite(metrics),
            lineage=lineage,
            untrained=untrained,
            filter_state=policy.filter.to_json(),
            checkpoint=CHECKPOINT,
        )

    def publish(
        self, store: WeightFolder, digest: str, *, expected_generation: int | None = None
    ) -> tuple[Live, bool]:
        """Return (what is live now, whether it is the candidate); a pinned policy does not change.

        Raises GenerationConflict, and the errors of the store.
        """
        name = store.policy_id
        try:
            live = store.publish(digest, expected_generation=expected_generation)
        except PolicyPinned as pinned:
            found = store.live()
            if found is None:
                raise WeightsNotFound(f"{name}: nothing is live any more") from pinned
            if self._pinned.get(name) != found.generation:
                log.warning("%s; candidates are kept", pinned)
            self._pinned[name] = found.generation
            return found, False
        if self._pinned.pop(name, None) is not None:
            log.warning("policy %s: the rollback was ended: publishing again", name)
        return live, True
