"""The policies' declarations in a client, and drafts of values until they are known.

A declaration comes from a policy file, a cache on disk, or the collector. Until it is known, a
policy's values are *drafts*: copies, because callers reuse their arrays. The sender validates and
encodes them before it sends the first event.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import sys
from collections.abc import Mapping
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ingest.delivery.transport import Delivery, Transport
from ingest.protocol import messages as wire
from ingest.protocol.errors import ClientError, CollectorUnavailable
from storage.declarations.declaration import DeclarationError
from storage.declarations.policy_files import read_declaration
from storage.experience.episode import policy_of_id
from storage.spaces.action_mask import ActionMask
from storage.spaces.candidates import Candidates
from storage.spaces.codec import Codec
from storage.spaces.descriptors import Box, Dict, Space, SpaceError, schema_id, space_from_json
from storage.spaces.leaves import leaves
from storage.system.files import replace_file

log = logging.getLogger("headrace.client")

_CACHE_VERSION = 1
_OBJECT_BYTES = 64  # the approximate overhead of a Python object, in bytes


class Draft:
    """A copy of a value whose space is not known yet. Its length is its memory in bytes."""

    __slots__ = ("_nbytes", "is_action", "policy", "value")

    def __init__(self, policy: ClientPolicy, is_action: bool, value: Any) -> None:
        self.policy = policy
        self.is_action = is_action
        try:
            self.value, self._nbytes = _copied(value)
        except Exception as error:
            name = "action" if is_action else "obs"
            raise SpaceError(f"{name}: cannot be copied: {error!r:.200}") from error

    def __len__(self) -> int:
        return self._nbytes

    def encode(self, where: str) -> bytes:
        """The value's canonical bytes, once the policy is settled. Raises SpaceError."""
        if self.policy.error is not None:
            raise SpaceError(f"Episode {where}: {self.policy.error}")
        if self.is_action:
            return self.policy.encode_action(where, self.value)
        return self.policy.observe(where, self.value)


def _copied(value: Any) -> tuple[Any, int]:
    """A copy of a value, which its owner may change, and the copy's approximate bytes."""
    if value is None or isinstance(value, (bool, int, float)):
        return value, _OBJECT_BYTES // 2
    if isinstance(value, (str, bytes)):
        return value, _OBJECT_BYTES + len(value)
    if isinstance(value, (np.ndarray, np.generic)):
        return value.copy(), _OBJECT_BYTES + value.nbytes
    if isinstance(value, Mapping):
        items = {key: _copied(item) for key, item in value.items()}
        size = sum(nbytes + _OBJECT_BYTES for _, nbytes in items.values())
        return {key: item for key, (item, _) in items.items()}, _OBJECT_BYTES + size
    if isinstance(value, (list, tuple)):
        parts = [_copied(item) for item in value]
        copies = [item for item, _ in parts]
        size = _OBJECT_BYTES + sum(nbytes for _, nbytes in parts)
        return tuple(copies) if isinstance(value, tuple) else copies, size
    return deepcopy(value), max(sys.getsizeof(value), int(getattr(value, "nbytes", 0)))


class ClientPolicy:
    """The spaces of one policy, as codecs whose errors name the episode.

    Without spaces its declaration is not known yet, and it encodes values to drafts. It is settled
    once it is declared, or once `error` says why the collector has no such policy.
    """

    observation: Codec
    action: Codec

    def __init__(
        self,
        policy_id: str | None,
        observation: Space | None = None,
        action: Space | None = None,
        steps_per_version: int | None = None,
        reward_combination: str = "sum",
        max_policy_lag: int | None = None,
    ) -> None:
        self.policy_id = policy_id
        self.sums = reward_combination == "sum"  # rewards may be added up before they are sent
        self.steps_per_version = steps_per_version
        self.paced = steps_per_version is not None or max_policy_lag is not None
        self.error: str | None = None
        self.schema_id: str | None = None
        self.has_densities = True  # as far as is known
        self.is_declared = observation is not None and action is not None
        self._mask: ActionMask | None = None
        self._candidates: Candidates | None = None
        self.is_rewritten = False  # whether observations may be sent in another form than given
        if observation is not None and action is not None:
            self.schema_id = schema_id(observation, action)
            self.has_densities = any(isinstance(leaf.space, Box) for leaf in leaves(action))
            self.observation, self.action = Codec(observation), Codec(action)
            self._encode_observation: Any = self.observation.encode
            self._encode_action: Any = self.action.encode
            with contextlib.suppress(SpaceError):  # declared with a release that knew no masks
                self._mask = ActionMask.of(observation, action)
                self._candidates = Candidates.of(observation, action)
            if self._candidates is not None:
                self._encode_observation = self._encode_candidates
            self.is_rewritten = self.observation.has_names or self._candidates is not None
        else:
            self.sums = False
            self._encode_observation = partial(self._draft, False)
            self._encode_action = partial(self._draft, True)

    @property
    def is_settled(self) -> bool:
        """Whether the policy's declaration, or that there is none, is known."""
        return self.is_declared or self.error is not None

    def become(self, declared: ClientPolicy) -> None:
        """Take over a declaration, from now on and for every episode with this policy."""
        self.__dict__.update(declared.__dict__)

    def _draft(self, is_action: bool, value: Any, where: str) -> Any:
        return Draft(self, is_action, value)

    def _encode_candidates(self, observation: Any, where: str) -> bytes:
        found = self._candidates
        given = observation if found is None else found.padded(observation)
        return self.observation.encode(given, where)

    def encode(self, episode_id: str, observation: Any, action: Any) -> tuple[bytes, bytes]:
        """Canonical bytes of both. Raises SpaceError (a ValueError) for an invalid value."""
        try:
            obs = self._encode_observation(observation, "obs")
            taken = self._encode_action(action, "action")
            if self._mask is not None:
                self._mask.require_in((self.observation, self.action), obs, taken)
            return obs, taken
        except Exception as error:
            raise self._misfit(episode_id, error, observation) from error

    def observe(self, episode_id: str, observation: Any) -> bytes:
        """Canonical bytes of an observation; raises SpaceError."""
        try:
            return self._encode_observation(observation, "obs")  # type: ignore[no-any-return]  # bytes, or a draft of them
        except Exception as error:
            raise self._misfit(episode_id, error, observation) from error

    def _misfit(self, episode_id: str, error: Exception, observation: Any = None) -> SpaceError:
        """The error for a value that is invalid, or that raises an error when it is read."""
        if isinstance(error, MemoryError):
            raise error
        if not isinstance(error, SpaceError):
            return SpaceError(f"Episode {episode_id}: a value cannot be read: {error!r:.200}")
        text = f"Episode {episode_id}: {error}"
        one = self.is_declared and not isinstance(self.observation.space, Dict)
        if isinstance(observation, Mapping) and one:
            text += " (the episode has one agent: start it with policy_id={agent: policy}, or from "
            text += "a client with a policy_mapping_fn, for mappings by agent)"
        return SpaceError(text)

    def encode_action(self, episode_id: str, action: Any) -> bytes:
        """Canonical bytes of an action; raises SpaceError."""
        try:
            return self._encode_action(action, "action")  # type: ignore[no-any-return]  # as above
        except Exception as error:
            raise self._misfit(episode_id, error) from error

    def encode_decision(self, action: Any) -> bytes:
        """Canonical bytes of an action that the policy chose; Box values may exceed bounds."""
        return self.action.encode(action, "action", check_range=False)

    def action_value(self, sent: Any) -> Any:
        """The received action as a value for the caller; Box values may exceed their bounds."""
        data = self.action.from_wire(sent, "action", check_range=False)
        return self.action.named(self.action.decode(data))


class CollectorSpec:
    """The reply to `GET /v1/spec`. Raises CollectorUnavailable for other content, ClientError."""

    def __init__(self, document: dict[str, Any], address: str = "") -> None:
        try:
            self._read(document)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise CollectorUnavailable(
                f"{address}: expected a collector's /v1/spec, got {error!r}"
            ) from error

    def _read(self, document: dict[str, Any]) -> None:
        if document["protocol"] != wire.PROTOCOL_VERSION:
            raise ClientError(
                f"expected a collector of protocol {wire.PROTOCOL_VERSION}, got "
                f"{document['protocol']!r}: use the client of the collector's version"
            )
        self.document = document
        self.durable: bool = document.get("durable", True)
        limits = document.get("limits", {})
        self.max_body: int | None = limits.get("max_body")
        self.max_events: int = limits.get("max_events", wire.MAX_EVENTS)
        self.fields = frozenset[str](document.get("fields", ()))
        self.live_versions: dict[str, int | None] = {}
        self.policies: dict[str, ClientPolicy] = {}
        for name, policy in document["policies"].items():
            self.policies[name] = _policy_of(name, policy)
            self.live_versions[name] = policy.get("live_version")

    @classmethod
    def fetch(cls, transport: Transport, timeout: float | None = None) -> CollectorSpec:
        """Ask the collector, for at most `timeout` seconds (default: the transport's).

        Raises CollectorUnavailable, Refusal, ClientError.
        """
        document = Delivery(transport, "GET", "/v1/spec").run(dict[str, Any], timeout)
        return cls(document, transport.address)

    def policy(self, policy_id: str | None) -> ClientPolicy:
        """The policy of that id; without one, the only policy or `default`. Raises ValueError."""
        found = self.policies.get(policy_of_id(policy_id, self.policies))
        if found is None:
            raise ValueError(
                f"policy_id: expected one of {sorted(self.policies)}, got {policy_id!r}"
            )
        return found


def _policy_of(name: str, document: Mapping[str, Any]) -> ClientPolicy:
    flow = document.get("flow", {})
    return ClientPolicy(
        name,
        space_from_json(document["observation"]),
        space_from_json(document["action"]),
        flow.get("steps_per_version"),
        document.get("reward_combination", "sum"),
        flow.get("max_policy_lag"),
    )


class Declarations:
    """The policies of one client: from its policy file, its cache, or the collector.

    `spec` is the collector's reply, possibly from the cache; `is_confirmed` is whether this client
    has asked the collector, `is_outdated` whether the declarations have changed since.
    """

    def __init__(
        self, address: str, policy_file: str | Path | None, cache_dir: str | Path | None
    ) -> None:
        self.address = address
        self._cache = None if cache_dir is None else _cache_file(Path(cache_dir), address)
        self._from_file = None if policy_file is None else policy_from_file(Path(policy_file))
        self.spec = None if self._cache is None else _read_cache(self._cache, address)
        self.is_confirmed = self.is_outdated = False
        self._wanted: dict[str | None, ClientPolicy] = {}

    @property
    def unlisted(self) -> list[str]:
        """The later fields that the collector does not list, and would refuse."""
        listed = frozenset[str]() if self.spec is None else self.spec.fields
        return [field for field in wire.FIELDS if field not in listed]

    @property
    def is_durable(self) -> bool:
        """Whether the collector has a disk."""
        return self.spec is None or self.spec.durable

    @property
    def is_complete(self) -> bool:
        """Whether all declarations are known, so that the collector need not be asked."""
        return self.is_confirmed and not self.is_outdated and not self._wanted

    def policy(self, policy_id: str | None) -> ClientPolicy:
        """The policy with this id, as `CollectorSpec.policy`. It may not be declared yet."""
        given = self._from_file
        if given is not None and not self.is_confirmed and policy_id in (None, given.policy_id):
            return given
        if self.spec is not None:
            found = self.spec.policies.get(policy_of_id(policy_id, self.spec.policies))
            if found is not None:
                return found
        return self._wanted.setdefault(policy_id, ClientPolicy(policy_id))

    def learn(self, spec: CollectorSpec) -> None:
        """Use the collector's declarations for new episodes."""
        if not spec.durable and not self.is_confirmed:
            log.warning("%s keeps nothing on disk (durable: false)", self.address)
        self._compare(spec)
        known = None if self.spec is None else self.spec.document
        self.spec, self.is_confirmed, self.is_outdated = spec, True, False
        if self.unlisted:
            log.warning("%s does not list %s: not sent", self.address, ", ".join(self.unlisted))
        for policy_id in list(self._wanted):
            policy = self._wanted.pop(policy_id)
            try:
                policy.become(spec.policy(policy_id))
            except ValueError as error:
                policy.error = str(error)
        if self._cache is not None and spec.document != known:
            _write_cache(self._cache, self.address, spec.document)

    def _compare(self, spec: CollectorSpec) -> None:
        """Log policies for which the collector declares other spaces than were known here."""
        known = {} if self.spec is None else dict(self.spec.policies)
        sources = dict.fromkeys(known, "before" if self.is_confirmed else "the cache")
        given = self._from_file
        if given is not None and not self.is_confirmed:
            known[given.policy_id or ""] = given
            sources[given.policy_id or ""] = "the policy file"
        for name, policy in known.items():
            new_policy = spec.policies.get(name)
            if new_policy is None or new_policy.schema_id != policy.schema_id:
                log.error(
                    "policy %s: %s declares other spaces than %s; new episodes use them",
                    name,
                    self.address,
                    sources[name],
                )

    def forget_wanted(self) -> None:
        """Forget policies that episodes wait for: a forked child has no episodes."""
        self._wanted.clear()


def policy_from_file(path: Path) -> ClientPolicy:
    """The policy that a file under `policies/` declares. Raises DeclarationError."""
    try:
        declared = read_declaration(path)
    except OSError as error:
        text = f"policy_file: expected a file under policies/ of a collector's root: {error}"
        raise DeclarationError(text) from error
    return ClientPolicy(
        declared.policy_id,
        declared.observation,
        declared.action,
        declared.steps_per_version,
        declared.reward_combination,
        declared.max_policy_lag,
    )


# --- the cache -------------------------------------------------------------------------------


def _cache_file(folder: Path, address: str) -> Path:
    return folder / f"headrace-{hashlib.sha256(address.encode()).hexdigest()[:32]}.json"


def _digest(document: Any) -> str:
    return hashlib.sha256(msgspec.json.encode(document, order="sorted")).hexdigest()


def _read_cache(path: Path, address: str) -> CollectorSpec | None:
    """The cached reply of the collector at `address`; None if it is missing or damaged."""
    try:
        kept = json.loads(path.read_bytes())
        names = (_CACHE_VERSION, address, _digest(kept["spec"]))
        if (kept["version"], kept["address"], kept["sha256"]) != names:
            raise ValueError("expected the version, address and digest of this cache")
        return CollectorSpec(kept["spec"], address)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, ClientError) as error:
        log.warning("%s: the cached declarations are not used: %r", path, error)
        return None


def _write_cache(path: Path, address: str, document: Any) -> None:
    """Write the collector's reply to the cache atomically; a failure is only logged."""
    kept = {
        "version": _CACHE_VERSION,
        "address": address,
        "sha256": _digest(document),
        "spec": document,
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, json.dumps(kept).encode(), durable=False)
    except OSError as error:
        log.warning("%s: the declarations are not cached: %s", path, error)
