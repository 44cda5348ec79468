"""The live policies inside the collector.

`LivePolicies` follows each policy's weight store and evaluates the live version with numpy. The
versions are looked up when `refresh` is called, a few microseconds when nothing changed.

What evaluates a version is loaded with the first one: a collector that only logs is ready sooner.
"""

# ruff: noqa: PLC0415 - `policy` is imported only where a policy is served

from __future__ import annotations

import asyncio
import logging
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from ingest.protocol.errors import Refusal
from ingest.protocol.weights import Published, no_version, not_finite, other_spaces
from storage.declarations.declaration import PolicyDeclaration
from storage.errors import StorageError
from storage.spaces.codec import Codec
from storage.spaces.descriptors import Box, schema_id
from storage.weights.manifest import Candidate, Weights
from storage.weights.memory_store import MemoryWeightStore
from storage.weights.store import WeightStore

if TYPE_CHECKING:
    from policy.inference.numpy_policy import NumpyPolicy

log = logging.getLogger("headrace.collector")

FOLLOW_SECONDS = 0.005
"""How often live.json is looked at: a stat of a microsecond, which works on every file system."""


class Choice(msgspec.Struct, frozen=True):
    """One action: stored and sent forms in canonical bytes and as a value, and how it was drawn."""

    action: bytes
    action_env: Any
    logp: float
    dist_inputs: bytes
    version: int


class _Live(msgspec.Struct):
    store: WeightStore | MemoryWeightStore
    schema_id: str
    observation: Codec
    action: Codec
    stamp: Hashable = None
    generation: int = -1
    policy: NumpyPolicy | None = None
    published: Published | None = None
    etag: str | None = None
    changed: asyncio.Event = msgspec.field(default_factory=asyncio.Event)


@dataclass
class LivePolicies:
    """The live version of every declared policy under one root; without one, in memory."""

    root: Path | None
    policies: Mapping[str, PolicyDeclaration]

    def __post_init__(self) -> None:
        self.closing = False
        self._live = {name: self._follow(policy) for name, policy in self.policies.items()}

    @cached_property
    def _rng(self) -> np.random.Generator:
        return np.random.default_rng()

    def _follow(self, policy: PolicyDeclaration) -> _Live:
        name = policy.policy_id
        check = partial(_check, policy.schema_id)
        store: WeightStore | MemoryWeightStore
        if self.root is None:
            store = MemoryWeightStore(name, check=check)
        else:
            store = WeightStore(self.root, name, check=check)
        codecs = Codec(policy.observation), Codec(policy.action)
        return _Live(store, policy.schema_id, *codecs)

    def refresh(self) -> None:
        """Take up newly published versions. What cannot be loaded is logged; the last one stays."""
        for name, live in self._live.items():
            stamp = live.store.stamp()
            if stamp == live.stamp:
                continue
            live.stamp = stamp
            try:
                self._load(live)
            except (StorageError, ValueError, OSError) as error:
                log.warning("policy %s: the published weights cannot be used: %s", name, error)
            except Exception:  # following goes on, for this policy and the others
                log.exception("policy %s: the published weights cannot be used", name)

    def _load(self, live: _Live) -> None:
        pointer = live.store.live()
        if pointer is None or pointer.generation <= live.generation:
            return
        from policy.inference.numpy_policy import NumpyPolicy

        manifest, weights = live.store.read(pointer.version)
        found = NumpyPolicy.published(manifest, weights)
        _require_usable(live, found)
        live.policy = found
        live.generation = pointer.generation
        live.published = Published(manifest.to_json(), pointer.generation, weights)
        live.etag = f'"{manifest.store_id}-{pointer.generation}"'
        live.changed.set()
        live.changed = asyncio.Event()

    async def follow(self) -> None:
        """Take up new versions as they are published, until cancelled."""
        while True:
            self.refresh()
            await asyncio.sleep(FOLLOW_SECONDS)

    async def changed(self, policy_id: str) -> None:
        """Wait for the next generation of a policy, or for `close`."""
        if not self.closing:
            await self._live[policy_id].changed.wait()

    def close(self) -> None:
        """Let everybody go who waits for a version."""
        self.closing = True
        for live in self._live.values():
            live.changed.set()

    def store(self, policy_id: str) -> WeightStore | MemoryWeightStore:
        return self._live[policy_id].store

    def etag(self, policy_id: str) -> str | None:
        """Names the live generation, None when nothing is published."""
        return self._live[policy_id].etag

    def published(self, policy_id: str) -> Published | None:
        """The live version as clients get it."""
        return self._live[policy_id].published

    def version(self, policy_id: str) -> int | None:
        """The live version, None when nothing is published."""
        policy = self._live[policy_id].policy
        return None if policy is None else policy.version

    def generation(self, policy_id: str) -> int:
        """The live generation, -1 when nothing is published."""
        return self._live[policy_id].generation

    def sent(self, codec: Codec, action: bytes) -> Any:
        """A stored action as it goes to a client: Box values clipped to their bounds."""
        from policy.inference.preprocessors import assemble

        columns = {
            leaf.path: np.clip(column, leaf.space.low, leaf.space.high)
            if isinstance(leaf.space, Box)
            else column
            for leaf, column in zip(codec.leaves, codec.columns(action, 1).values(), strict=True)
        }
        return assemble(codec.space, columns, 0)

    def act(
        self, policy_id: str, schema_id: str, observations: Sequence[bytes], explore: bool
    ) -> list[Choice | Refusal]:
        """Actions for encoded observations of a schema, one forward for all.

        In place of an action stands the Refusal (422) of an observation that overflows. Raises
        Refusal: 503 `no_version` while nothing is published that acts in these spaces.
        """
        live = self._live.get(policy_id)
        if live is None or live.schema_id != schema_id:
            raise other_spaces(policy_id)
        if live.policy is None:
            raise no_version(policy_id)
        if len(observations) == 1:
            return [self._act_one(live, live.policy, observations[0], explore)]
        return self._act_many(live, live.policy, observations, explore)

    def _act_one(
        self, live: _Live, policy: NumpyPolicy, obs: bytes, explore: bool
    ) -> Choice | Refusal:
        from policy.inference.numpy_policy import NotFinite

        value = live.observation.decode(obs)
        try:
            with np.errstate(over="ignore", invalid="ignore"):
                one = policy.act_one(value, self._rng, explore=explore)
        except NotFinite:
            return not_finite(live.store.policy_id, policy.version)
        stored = live.action.encode(one.action, "action", check_range=False)
        dist_inputs, version = one.dist_inputs.tobytes(), policy.version
        return Choice(stored, one.action_env, float(one.logp), dist_inputs, version)

    def _act_many(
        self, live: _Live, policy: NumpyPolicy, observations: Sequence[bytes], explore: bool
    ) -> list[Choice | Refusal]:
        columns = live.observation.columns(b"".join(observations), len(observations))
        flat = policy.flatten(columns)
        finite, actions = policy.act_where_finite(flat, self._rng, explore=explore)
        encoded = live.action.encode_columns(actions.columns, len(actions))
        choices = (
            Choice(
                encoded[i],
                actions.actions_env[i],
                float(actions.logp[i]),
                actions.dist_inputs[i].tobytes(),
                policy.version,
            )
            for i in range(len(actions))
        )
        name, version = live.store.policy_id, policy.version
        return [next(choices) if fine else not_finite(name, version) for fine in finite]


def _check(declared_schema: str, candidate: Candidate, weights: Weights) -> None:
    """Raise WeightsRefused unless one can act with these weights in the declared spaces."""
    from policy.inference.weight_store import require_usable

    require_usable(candidate, weights, declared_schema)


def _require_usable(live: _Live, policy: NumpyPolicy) -> None:
    """Raise ValueError unless the policy acts in the declared spaces, with finite numbers."""
    if schema_id(policy.spec.observation, policy.spec.action) != live.schema_id:
        raise ValueError("spec: expected the spaces that the policy is declared with")
    policy.require_finite()
