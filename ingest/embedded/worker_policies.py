"""A rollout worker's policies, for the collector that is its input: clients act with them.

    RolloutWorker(policy=..., input_=lambda ioctx: PolicyServerInput(ioctx, "127.0.0.1", 9900))

The worker's policies are declared with their own spaces. Each time the worker asks for a batch, the
policies whose weights have changed are published, so that one round of sampling and learning is one
version. It includes the state of their filters and their lineage.

The collector ends with the worker's process, so temporary failures must not end it. While a
rollback pins a policy, its candidates are stored. A version that another publisher makes live is
taken over. After a full disk, publishing is tried again in the next round.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ingest.embedded.local_publisher import LocalPublisher, Publishable
from storage.declarations.declaration import PolicyDeclaration
from storage.errors import GenerationConflict, WeightStoreError
from storage.experience.multi_agent_batch import MultiAgentBatch
from storage.experience.sample_batch import ORDINAL, STREAM, SampleBatch
from storage.reading.ledger import Ledger
from storage.reading.loading import ROW
from storage.reading.untrained_rows import UntrainedRows, position_without
from storage.weights.manifest import WEIGHTS_FILE, Live, decode_weights
from storage.weights.store import WeightFolder

log = logging.getLogger("headrace.server")

IDENTITY = (ORDINAL, ROW)
"""The columns that, together with `stream`, identify a row in a version's lineage."""


class _WorkerPolicy(Publishable, Protocol):
    version: int
    on_trained: Callable[[SampleBatch], None] | None

    def go_on_from(
        self,
        weights: Mapping[str, npt.NDArray[Any]],
        filter_state: Mapping[str, Any] | None,
        *,
        version: int,
    ) -> None: ...


class _FragmentSettings(Protocol):
    rollout_fragment_length: int
    batch_mode: str


class _Worker(Protocol):
    policies: Mapping[str, _WorkerPolicy]
    settings: _FragmentSettings


class _Trail:
    """One policy's store, and what the worker has learned since its latest publication."""

    def __init__(
        self, policy: _WorkerPolicy, store: WeightFolder, publishing: LocalPublisher
    ) -> None:
        self._policy, self._store, self._publishing = policy, store, publishing
        self._sent: Mapping[str, npt.NDArray[Any]] = {}  # the weights that are live or a candidate
        self._candidate: str | None = None  # if it is not live yet
        self._generation = 0  # the live one at the latest check
        self._trouble = ""
        self.lineage, self.untrained, self._rows = Ledger(), UntrainedRows(), 0
        policy.on_trained = self._trained

    def _trained(self, rows: SampleBatch) -> None:
        if {STREAM, *IDENTITY} <= set(rows):
            self._rows += self.untrained.train(rows)
            for stream in np.unique(rows[STREAM].astype(str)):
                self.lineage.add(str(stream), np.unique(rows[ORDINAL][rows[STREAM] == stream]))

    def read(self, rows: SampleBatch) -> None:
        """Note rows that the worker was given."""
        if rows.count and {STREAM, *IDENTITY} <= set(rows):
            self.untrained.read(rows, np.zeros(rows.count, np.bool_))

    def begin(self, position: Mapping[str, Any]) -> None:
        live = self._store.live()
        if live is None:
            self._keep(position)
            self._go_live()
        else:
            self._go_on_from(live)

    def _go_on_from(self, live: Live) -> None:
        """Take over the live weights. Raises ValueError if they have another spec."""
        name, policy, store = self._store.policy_id, self._policy, self._store
        manifest, data = store.read(live.version)
        if manifest.spec != policy.spec.to_json():
            raise ValueError(
                f"policy {name!r}: expected the live version {live.version} to have the worker's "
                f"spec, got another: give the worker that spec, or the collector another root"
            )
        weights = decode_weights(data, manifest.digests[WEIGHTS_FILE], name)
        policy.go_on_from(weights, manifest.filter_state, version=live.version)
        self._sent, self._candidate, self._generation = policy.get_weights(), None, live.generation
        self.lineage = Ledger(store.lineage(live.version))
        self.untrained = UntrainedRows(store.untrained(live.version))
        rows = manifest.metrics.get("rows_trained")
        self._rows = rows if isinstance(rows, int) else 0
        log.info("policy %s: the worker continues from version %d", name, live.version)

    def publish_changed(self, position: Mapping[str, Any]) -> None:
        """Publish the weights, if they changed or could not be published before."""
        name = self._store.policy_id
        try:
            if self._changed():
                self._keep(position)
            if self._candidate is not None:
                self._go_live()
            self._trouble = ""
        except GenerationConflict:
            if (live := self._store.live()) is None:
                self._generation = 0
                return
            log.warning(
                "policy %s: version %d was made live by another publisher; the worker's updates "
                "since then are dropped",
                name,
                live.version,
            )
            self._go_on_from(live)
        except (WeightStoreError, OSError) as error:
            if not isinstance(error, OSError) and not isinstance(error.__cause__, OSError):
                raise
            if str(error) != self._trouble:  # a full disk, or a temporary error of the file system
                log.warning("policy %s: not published, trying again: %s", name, error)
            self._trouble = str(error)

    def _changed(self) -> bool:
        sent, now = self._sent, self._policy.get_weights()
        return sent.keys() != now.keys() or not all(
            np.array_equal(array, now[key]) for key, array in sent.items()
        )

    def _keep(self, position: Mapping[str, Any]) -> None:
        weights, lineage = self._policy.get_weights(), self.lineage.to_json()
        self._candidate = self._publishing.keep(
            self._store,
            self._policy,
            metrics={"rows_trained": self._rows},
            lineage=lineage,
            untrained=self.untrained.settle(lineage, position),
        )
        self._sent = weights

    def _go_live(self) -> None:
        if self._candidate is None:
            return
        live, done = self._publishing.publish(
            self._store, self._candidate, expected_generation=self._generation
        )
        if not done and live.generation != self._generation:
            self._go_on_from(live)  # a rollback: continue with its version
            return
        self._policy.version, self._generation = live.version, live.generation
        if done:
            self._candidate = None


class WorkerPolicies:
    """The policies of one worker: how they are declared, read and published."""

    def __init__(self, worker: _Worker) -> None:
        self._worker = worker
        self._trails: dict[str, _Trail] = {}

    def declarations(self) -> list[PolicyDeclaration]:
        """Declarations of the policies' own spaces and specs, with default rules."""
        return [
            PolicyDeclaration(
                policy_id=name,
                observation=policy.spec.observation,
                action=policy.spec.action,
                spec=policy.spec.to_json(),
            )
            for name, policy in self._worker.policies.items()
        ]

    def reading(self) -> dict[str, Any]:
        """The defaults of reading: fragments or whole episodes, of the worker's sample size.

        They are of all its policies together if it has several.
        """
        settings = self._worker.settings
        several = len(self._worker.policies) > 1
        whole = settings.batch_mode == "complete_episodes"
        return {
            "policy_id": None if several else next(iter(self._worker.policies)),
            "multi_agent": several,
            "mode": "episodes" if whole else "fragments",
            "batch_size": settings.rollout_fragment_length,
            "eager": False,
        }

    def begin(
        self,
        store_of: Callable[[str], WeightFolder],
        publishing: LocalPublisher,
        position: Mapping[str, Any],
    ) -> None:
        """Take over the live weights of policies, and publish the others.

        A worker that starts anew under a root continues from the weights that clients act with:
        untrained weights must not replace these. Raises ValueError if they have another spec.
        """
        for name, policy in self._worker.policies.items():
            self._trails[name] = _Trail(policy, store_of(name), publishing)
            self._trails[name].begin(position)

    def position(self, fresh: Mapping[str, Any]) -> dict[str, Any]:
        """The start position of one policy's reader: behind the rows its live version used."""
        (trail,) = self._trails.values()
        return position_without(fresh, trail.lineage.to_json(), trail.untrained.to_json())

    def read(self, batch: SampleBatch | MultiAgentBatch) -> None:
        """Note the rows that the worker is given to learn from."""
        lone = next(iter(self._trails))
        batches = batch.policy_batches if isinstance(batch, MultiAgentBatch) else {lone: batch}
        for name, rows in batches.items():
            if name in self._trails:
                self._trails[name].read(rows)

    def publish_changed(self, position: Mapping[str, Any]) -> None:
        """Publish the policies whose weights have changed since their latest publication.

        `position` is the reader's: the rows that it has buffered were not trained on.
        """
        for trail in self._trails.values():
            trail.publish_changed(position)


def worker_policies(ioctx: Any) -> WorkerPolicies | None:
    """The policies of the worker in an input creator's context; None without a worker."""
    worker = getattr(ioctx, "worker", None)
    return None if worker is None else WorkerPolicies(worker)
