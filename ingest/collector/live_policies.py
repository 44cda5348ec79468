"""The live policies inside the collector.

`LivePolicies` follows each policy's weight store, and acts with the live version through numpy. A
thread reads the files and passes new versions to the event loop.

The modules of `policy` are imported with the first version, so that a collector that only logs
starts faster.
"""

# ruff: noqa: PLC0415 - `policy` is imported only where a policy is served

from __future__ import annotations

import asyncio
import contextlib
import hmac
import itertools
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from ingest.access.admission import audit
from ingest.collector.weight_follower import (
    LoadedPolicy,
    Standing,
    WeightFollower,
    renew_seconds,
)
from ingest.collector.weights_thread import WeightsThread
from ingest.protocol.errors import Refusal
from ingest.protocol.weights import Published, no_version, not_finite, other_spaces
from storage.declarations.declaration import DeclarationError, PolicyDeclaration
from storage.experience.hashed import is_canary
from storage.objects.memory import MemoryObjects
from storage.objects.opening import objects_at
from storage.spaces.codec import Codec
from storage.spaces.descriptors import Box
from storage.weights.manifest import (
    WEIGHTS_FILE,
    Candidate,
    Manifest,
    Pin,
    Served,
    Weights,
    decode_weights,
)
from storage.weights.store import WeightFolder, candidate_of

if TYPE_CHECKING:
    from policy.inference.numpy_policy import NumpyPolicy

T = TypeVar("T")

FOLLOW_SECONDS = 0.005
"""Seconds between checks of live.json: a stat takes a microsecond and works on all file systems."""
CHECKS, ROUND_SECONDS, PAUSE_SECONDS = 3_000, 0.7, 0.05
"""Many policies take turns: `CHECKS` a second, or more if a round would take longer than this. The
thread sleeps for at most `PAUSE_SECONDS` in between."""
LOOK_SECONDS = 0.5
"""Seconds that requests wait for a check of the weights; then they use the known version."""
WEIGHTS_SECONDS = 5.0
"""Seconds that requests for weights wait for a check; the first one imports the modules."""
_ETAG = re.compile(
    r'"(?P<store>[0-9a-f]+)-(?P<generation>[0-9]{1,15})-(?P<version>[0-9]{1,15})-[0-9a-f]{32}"'
)


class Choice(msgspec.Struct, frozen=True):
    """One action, in stored form (canonical bytes) and as sent, and how it was drawn."""

    action: bytes
    action_env: Any
    logp: float
    dist_inputs: bytes
    version: int


class _LivePolicy(msgspec.Struct):
    """One policy. The thread's results replace `served` and `standing` as whole objects."""

    store: WeightFolder
    schema_id: str
    observation: Codec
    action: Codec
    follower: WeightFollower[NumpyPolicy]
    served: LoadedPolicy[NumpyPolicy] | None = None
    standing: Standing = Standing()
    is_looked_at: bool = False  # its files have been checked once
    changed: asyncio.Event = msgspec.field(default_factory=asyncio.Event)

    @property
    def policy(self) -> NumpyPolicy | None:
        return None if self.served is None else self.served.policy


@dataclass
class LivePolicies:
    """The live version of every declared policy: under one root, or in memory without a root."""

    root: Path | None
    policies: Mapping[str, PolicyDeclaration]
    etag_key: bytes = b""  # signs etags; without one no client's etag proves anything

    def __post_init__(self) -> None:
        self.closing = False
        self._objects = MemoryObjects() if self.root is None else objects_at(self.root)
        self._live = {name: self._follow(policy) for name, policy in self.policies.items()}
        many, self._turns = len(self._live), itertools.cycle(self._live.values())
        self.interval = min(max(FOLLOW_SECONDS, many / CHECKS), PAUSE_SECONDS)
        checks = math.ceil(self.interval * max(CHECKS, many / ROUND_SECONDS))
        self._at_once = min(checks, many)
        self._renew = renew_seconds(many)
        self._thread: WeightsThread | None = None

    @cached_property
    def _rng(self) -> np.random.Generator:
        return np.random.default_rng()

    def _follow(self, policy: PolicyDeclaration) -> _LivePolicy:
        name = policy.policy_id
        check = partial(_check, policy.schema_id)
        store = WeightFolder(self._objects, name, check=check, admit=_admit)
        codecs = Codec(policy.observation), Codec(policy.action)
        follower = WeightFollower(store, partial(_loaded, policy.schema_id))
        return _LivePolicy(store, policy.schema_id, *codecs, follower)

    # the thread

    def start(self, collector_id: str) -> None:
        """Follow publications on a thread, until `close`."""
        self._thread = WeightsThread(self.take_turns, self.interval)
        for live in self._live.values():
            live.follower.collector_id = collector_id
        self._thread.start()

    def refresh(self) -> None:
        """Load newly published versions now, in the calling thread; only without `start`."""
        self._look(self._live)

    def take_turns(self) -> None:
        """Check the policies whose turn it is; the thread does this every `interval` s."""
        for live in itertools.islice(self._turns, self._at_once):
            self._look_at(live)

    def _look(self, policies: Iterable[str]) -> None:
        for name in policies:
            self._look_at(self._live[name])

    def _look_at(self, live: _LivePolicy) -> None:
        if live.follower.look() or not live.is_looked_at:
            self._tell(live)
        if self._thread is not None:
            live.follower.register(renew=self._renew)

    def _tell(self, live: _LivePolicy) -> None:
        served, standing = live.follower.served, live.follower.standing
        if self._thread is None:
            _take_up(live, served, standing)
        else:
            self._thread.tell(lambda: _take_up(live, served, standing))

    async def look(
        self, policies: Iterable[str] | None = None, seconds: float = LOOK_SECONDS
    ) -> None:
        """Load newly published versions of some or all policies now.

        Waits at most `seconds` if the folder hangs.
        """
        thread, names = self._thread, self._live if policies is None else policies
        if thread is None:
            self._look(names)
        elif thread.busy_seconds < seconds:
            with contextlib.suppress(Refusal):
                await thread.ask(lambda: self._look(names), seconds)

    async def look_for_first(self, policies: Collection[str]) -> None:
        """`look` if one of the policies has no version, because one may just be published."""
        first = [
            name for name in policies if (live := self._live.get(name)) and live.served is None
        ]
        if first:
            await self.look(first)

    async def ask(self, policy_id: str, job: Callable[[WeightFolder], T]) -> T:
        """Run a job on a policy's files, load what it changed, and return its result.

        Raises the job's errors, and Refusal if there is no root or the folder hangs.
        """
        live = self._live[policy_id]
        store, thread = live.store, self._thread
        if store.in_memory or thread is None:
            raise Refusal("no_route", "this collector has no root: it runs in memory")

        def run() -> T:
            try:
                return job(store)
            finally:
                self._look_at(live)

        return await thread.ask(run)

    def own_record(self, policy_id: str) -> Served:
        """This collector's record of the served version. It reads files: call it in jobs only."""
        return self._live[policy_id].follower.record()

    async def version_of(self, policy_id: str, number: int) -> tuple[Manifest, bytes]:
        """A version's manifest and bytes. Raises WeightStoreError, OSError, Refusal."""
        store = self._live[policy_id].store
        if self._thread is None or store.in_memory:
            return store.read(number)
        return await self._thread.ask(lambda: store.read(number))

    async def changed(self, policy_id: str) -> None:
        """Wait until a policy's generation changes, or until `close`."""
        if not self.closing:
            await self._live[policy_id].changed.wait()

    def close(self) -> None:
        """Release all waiters for versions, and end the thread."""
        self.closing = True
        for live in self._live.values():
            live.changed.set()
        if self._thread is not None:
            self._thread.submit(self._withdraw)
            self._thread.stop()

    def _withdraw(self) -> None:
        for live in self._live.values():
            live.follower.register(seconds=0.0)

    async def ended(self) -> None:
        """Wait until the thread has ended, for a short time if it hangs."""
        if self._thread is not None:
            await self._thread.ended()

    @property
    def busy_seconds(self) -> float:
        """Seconds that the current access to `weights/` has taken; 0 without one."""
        return 0.0 if self._thread is None else self._thread.busy_seconds

    def note_seen(self, policy_id: str, etag: str, by: str) -> None:
        """Note a client's etag: with a later generation than `live.json`, that is an old copy.

        Only numbers that this root once sent count; its signature shows that. If they are new to
        the store, an audit line names the token `by`.
        """
        live, seen = self._live[policy_id], _ETAG.fullmatch(etag)
        if seen is None or live.served is None or self._thread is None or not self.etag_key:
            return
        generation, version = int(seen["generation"]), int(seen["version"])
        if seen["store"] != live.served.store_id or generation <= live.served.generation:
            return
        genuine = self._etag(policy_id, seen["store"], generation, version)
        if not hmac.compare_digest(etag, genuine):
            return

        def note() -> None:
            if live.follower.note_seen(version, generation):
                audit("numbers", policy=policy_id, version=version, generation=generation, by=by)

        self._thread.submit(note)

    # canaries

    def arm(self, policy_id: str, episode_id: str) -> str:
        """The canary arm of an episode that starts now (storage.experience.hashed.ARM).

        "" without a canary.
        """
        served = self._live[policy_id].served
        if served is None or served.canary is None:
            return ""
        canary = is_canary(policy_id, episode_id, served.share)
        return f"{served.generation}:{served.canary_version if canary else served.version}"

    def in_canary(self, policy_id: str, arm: str) -> bool:
        """Whether the canary acts in episodes of this arm; False once the canary has ended."""
        live = self._live.get(policy_id)
        served = None if live is None else live.served
        return (
            served is not None
            and served.canary is not None
            and arm.endswith(f":{served.canary_version}")
        )

    def roles(self, policy_id: str) -> dict[str, int | None]:
        """The versions in the roles `live`, `previous` (live before it) and `canary`."""
        served = self._live[policy_id].served
        if served is None:
            return {"live": None, "previous": None, "canary": None}
        return {
            "live": served.version,
            "previous": served.published.manifest.get("parent"),
            "canary": None if served.canary is None else served.canary_version,
        }

    # the live version

    def nothing_served(self, policy_id: str) -> Refusal:
        """The refusal while no version is served: `busy` before the first check of the files."""
        if self._live[policy_id].is_looked_at:
            return no_version(policy_id)
        text = f"policy {policy_id!r}: its weights are still being read"
        return Refusal("busy", text, retry_after=LOOK_SECONDS)

    def store(self, policy_id: str) -> WeightFolder:
        return self._live[policy_id].store

    def standing(self, policy_id: str) -> Standing:
        """The wanted version, and the reason if it is not served."""
        return self._live[policy_id].standing

    def hold(self, policy_id: str) -> Pin | None:
        """The pin or canary during which nothing can be published; None without one."""
        wanted = self._live[policy_id].standing.wanted
        return None if wanted is None else wanted.hold

    def followed_version(self, policy_id: str) -> int | None:
        """The live version; None if there is none, or if something holds it back."""
        return None if self.hold(policy_id) is not None else self.version(policy_id)

    def etag(self, policy_id: str) -> str | None:
        """The live generation's etag; None if nothing is served."""
        served = self._live[policy_id].served
        if served is None:
            return None
        return self._etag(policy_id, served.store_id, served.generation, served.highest)

    def _etag(self, policy_id: str, store_id: str, generation: int, highest: int) -> str:
        """An etag, signed so that a client can only repeat numbers that it got: `note_seen`."""
        numbers = f"{store_id}-{generation}-{highest}"
        if not self.etag_key:
            return f'"{numbers}"'
        signature = hmac.digest(self.etag_key, f"{policy_id} {numbers}".encode(), "sha256")
        return f'"{numbers}-{signature.hex()[:32]}"'

    def published(self, policy_id: str) -> Published | None:
        """The live version as it is sent to clients; None if nothing is served."""
        served = self._live[policy_id].served
        return None if served is None else served.published

    def version(self, policy_id: str) -> int | None:
        """The number of the live version; None if nothing is served."""
        policy = self._live[policy_id].policy
        return None if policy is None else policy.version

    def generation(self, policy_id: str) -> int:
        """The live generation; -1 if nothing is served."""
        served = self._live[policy_id].served
        return -1 if served is None else served.generation

    def sent(self, codec: Codec, action: bytes) -> Any:
        """A stored action in the form for clients: Box values clipped, names instead of codes."""
        from policy.inference.preprocessors import assemble

        columns = {
            leaf.path: np.clip(column, leaf.space.low, leaf.space.high)
            if isinstance(leaf.space, Box)
            else column
            for leaf, column in zip(codec.leaves, codec.columns(action, 1).values(), strict=True)
        }
        return codec.named(assemble(codec.space, columns, 0))

    def act(
        self,
        policy_id: str,
        schema_id: str,
        observations: Sequence[bytes],
        explore: bool,
        *,
        canary: bool = False,
    ) -> list[Choice | Refusal]:
        """Choose actions for encoded observations of a schema, in one forward pass.

        With `canary` the canary acts, if there is one. The result has a Refusal (422) instead of an
        action for an observation that overflows. Raises Refusal (503 `no_version`) if no version
        can act in these spaces.
        """
        live = self._live.get(policy_id)
        if live is None or live.schema_id != schema_id:
            raise other_spaces(policy_id)
        policy = self._acting(policy_id, canary)
        if len(observations) == 1:
            return [self._act_one(live, policy, observations[0], explore)]
        return self._act_many(live, policy, observations, explore)

    def ranked(
        self, policy_id: str, schema_id: str, observation: bytes, *, canary: bool
    ) -> tuple[Choice, npt.NDArray[np.float64]]:
        """`act` on one observation, and the probability (n,) of each action. Raises Refusal."""
        (choice,) = self.act(policy_id, schema_id, [observation], True, canary=canary)
        if isinstance(choice, Refusal):
            raise choice
        policy = self._acting(policy_id, canary)
        columns = self._live[policy_id].observation.columns(observation, 1, [len(observation)])
        return choice, policy.probabilities(policy.flatten(columns))[0]

    def _acting(self, policy_id: str, canary: bool) -> NumpyPolicy:
        served = self._live[policy_id].served
        if served is None:
            raise self.nothing_served(policy_id)
        return served.canary if canary and served.canary else served.policy

    def _act_one(
        self, live: _LivePolicy, policy: NumpyPolicy, obs: bytes, explore: bool
    ) -> Choice | Refusal:
        from policy.inference.distributions import NotFinite

        value = live.observation.decode(obs)
        try:
            with np.errstate(over="ignore", invalid="ignore"):
                one = policy.act_one(value, self._rng, explore=explore)
        except NotFinite:
            return not_finite(live.store.policy_id, policy.version)
        stored = live.action.encode(one.action, "action", check_range=False)
        dist_inputs, version = one.dist_inputs.tobytes(), policy.version
        return Choice(
            stored, live.action.named(one.action_env), float(one.logp), dist_inputs, version
        )

    def _act_many(
        self, live: _LivePolicy, policy: NumpyPolicy, observations: Sequence[bytes], explore: bool
    ) -> list[Choice | Refusal]:
        columns = live.observation.columns(b"".join(observations), len(observations))
        flat = policy.flatten(columns)
        finite, actions = policy.act_where_finite(flat, self._rng, explore=explore)
        encoded = live.action.encode_columns(actions.columns, len(actions))
        choices = (
            Choice(
                encoded[i],
                live.action.named(actions.actions_env[i]),
                float(actions.logp[i]),
                actions.dist_inputs[i].tobytes(),
                policy.version,
            )
            for i in range(len(actions))
        )
        name, version = live.store.policy_id, policy.version
        return [next(choices) if fine else not_finite(name, version) for fine in finite]


def _check(declared_schema: str, candidate: Candidate, weights: Weights) -> None:
    """Raise WeightsRefused unless the weights can act in the declared spaces."""
    from policy.inference.weight_store import require_usable

    require_usable(candidate, weights, declared_schema)


def _admit(candidate: Candidate, weights: Weights) -> None:
    """Raise WeightsRefused for weights that must not be stored."""
    from policy.inference.weight_store import admit

    admit(candidate, weights)


def check_specs(root: Path, policies: Mapping[str, PolicyDeclaration]) -> None:
    """Raise DeclarationError for an invalid `spec` of a policy that is declared under a root."""
    for policy in policies.values():
        if policy.spec is not None:
            from policy.inference.spec import PolicySpec

            try:
                PolicySpec.from_json(dict(policy.spec))
            except ValueError as error:
                text = f"{root}/policies/{policy.policy_id}.json: spec: {error}"
                raise DeclarationError(text) from error


def _loaded(declared_schema: str, manifest: Manifest, data: bytes) -> NumpyPolicy:
    """The policy of a version's weights. Raises WeightsDamaged, WeightsRefused."""
    from policy.inference.weight_store import require_usable

    weights = decode_weights(data, manifest.digests[WEIGHTS_FILE])
    return require_usable(
        candidate_of(manifest), weights, declared_schema, version=manifest.version
    )


def _take_up(
    live: _LivePolicy, served: LoadedPolicy[NumpyPolicy] | None, standing: Standing
) -> None:
    """Set the thread's results, on the event loop."""
    live.standing, live.is_looked_at = standing, True
    if served is not live.served:
        live.served = served
        live.changed.set()
        live.changed = asyncio.Event()
