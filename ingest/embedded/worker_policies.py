"""What a rollout worker is to the collector that is its input: policies that clients act with.

    RolloutWorker(policy=..., input_=lambda ioctx: PolicyServerInput(ioctx, "127.0.0.1", 9900))

The worker's policies are declared with their own spaces, and clients get what it learns: each time
it asks for a batch, the policies whose weights have changed since are published, so that one turn
of sampling and learning is one version. The state of their filters goes with them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from storage.declarations.declaration import PolicyDeclaration
from storage.errors import GenerationConflict
from storage.spaces.descriptors import Space
from storage.weights.manifest import WEIGHTS_FILE, decode_weights, finite
from storage.weights.memory_store import MemoryWeightStore
from storage.weights.store import WeightStore

__all__ = ["Publishable", "WorkerPolicies", "publish", "worker_policies"]

log = logging.getLogger("headrace.server")
Store: TypeAlias = WeightStore | MemoryWeightStore


class _ToJson(Protocol):
    def to_json(self) -> dict[str, Any]: ...


class _Spec(_ToJson, Protocol):
    @property
    def observation(self) -> Space: ...
    @property
    def action(self) -> Space: ...


class Publishable(Protocol):
    """What clients can act with, as `policy.Policy` is."""

    @property
    def spec(self) -> _Spec: ...
    @property
    def filter(self) -> _ToJson: ...
    def get_weights(self) -> Mapping[str, npt.NDArray[np.float32]]: ...


class _WorkerPolicy(Publishable, Protocol):
    version: int

    def go_on_from(
        self,
        weights: Mapping[str, npt.NDArray[Any]],
        filter_state: Mapping[str, Any] | None,
        *,
        version: int,
    ) -> None: ...


class _Settings(Protocol):
    rollout_fragment_length: int
    batch_mode: str


class _Worker(Protocol):
    policies: Mapping[str, _WorkerPolicy]
    settings: _Settings


class WorkerPolicies:
    """The policies of one worker: how they are declared, read and published."""

    def __init__(self, worker: _Worker) -> None:
        self._worker = worker
        self._stores: dict[str, Store] = {}
        self._sent: dict[str, Mapping[str, npt.NDArray[Any]]] = {}

    def declarations(self) -> list[PolicyDeclaration]:
        """With the policies' own spaces and specs, and the rules that hold by default."""
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
        """How the worker reads unless told otherwise: fragments, or whole episodes, of the size
        that it samples, and of all its policies together when it has several."""
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

    def begin(self, store_of: Callable[[str], Store]) -> None:
        """Take up what is live, and publish what is not.

        A worker that begins anew under a root goes on from the weights that clients act with:
        weights that nobody trained must not take their place. Raises ValueError when they are of
        another spec.
        """
        self._stores = {name: store_of(name) for name in self._worker.policies}
        for name, store in self._stores.items():
            live = store.live()
            if live is None:
                self._publish(name)
                continue
            policy = self._worker.policies[name]
            manifest, data = store.read(live.version)
            if manifest.spec != policy.spec.to_json():
                raise ValueError(
                    f"policy {name!r}: expected version {live.version}, which is live, to be of "
                    f"the worker's spec, got another: give the worker that spec, or the collector "
                    f"another root"
                )
            weights = decode_weights(data, manifest.digests[WEIGHTS_FILE], name)
            policy.go_on_from(weights, manifest.filter_state, version=live.version)
            self._sent[name] = policy.get_weights()
            log.info("policy %s: the worker goes on from version %d", name, live.version)

    def publish_changed(self) -> None:
        """Publish the policies whose weights are not those that were published last."""
        for name in self._stores:
            if self._changed(name):
                self._publish(name)

    def _changed(self, name: str) -> bool:
        sent, now = self._sent.get(name, {}), self._worker.policies[name].get_weights()
        return sent.keys() != now.keys() or not all(
            np.array_equal(array, now[key]) for key, array in sent.items()
        )

    def _publish(self, name: str) -> None:
        policy = self._worker.policies[name]
        weights, filter_state = policy.get_weights(), policy.filter.to_json()
        try:
            policy.version = publish(self._stores[name], policy.spec, weights, filter_state)
        except GenerationConflict as conflict:  # somebody published meanwhile: try the next time
            log.warning("policy %s: what the worker learned is not live: %s", name, conflict)
            return
        self._sent[name] = weights


def publish(
    store: Store,
    spec: _ToJson,
    weights: Mapping[str, npt.NDArray[np.float32]],
    filter_state: dict[str, Any] | None,
    *,
    metrics: Mapping[str, Any] | None = None,
    lineage: Mapping[str, Any] | None = None,
) -> int:
    """Make weights live; their version. Raises ValueError, WeightStoreError, GenerationConflict."""
    digest = store.add_candidate(
        weights,
        spec=spec.to_json(),
        metrics=finite(metrics or {}),
        lineage=dict(lineage or {}),
        filter_state=filter_state,
    )
    return store.publish(digest).version


def worker_policies(ioctx: Any) -> WorkerPolicies | None:
    """Those of the worker that an input creator was told; None without one."""
    worker = getattr(ioctx, "worker", None)
    return None if worker is None else WorkerPolicies(worker)
