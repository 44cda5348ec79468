"""The declaration of a policy: one JSON file per policy under `policies/`.

The file gives its spaces, how the policy acts (if it does), and when its episodes are cut, closed
and timed out. Trainers and collectors read the same file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from storage.declarations.redaction_rules import check_redaction
from storage.errors import NewerFormat
from storage.experience.episode import DEFAULT_POLICY
from storage.spaces.candidates import Candidates
from storage.spaces.descriptors import (
    Space,
    SpaceError,
    canonical_json,
    schema_id,
    space_from_json,
    space_to_json,
)
from storage.spaces.named_features import NamedFeatures
from storage.system.formats import require_format

FORMAT_VERSION = 1
COMBINATIONS = ("sum", "first", "last", "max")
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


class DeclarationError(ValueError):
    """A policy file cannot be used; the text says which file, what was expected, what came."""


def check_policy_id(policy_id: str) -> str:
    """Return the id if it is 1 to 64 letters, digits, `_` or `-`, as it names a file.

    Raises DeclarationError for any other.
    """
    if not isinstance(policy_id, str) or not _ID.fullmatch(policy_id):
        raise DeclarationError(
            f"policy id: expected 1 to 64 letters, digits, '_' or '-', got {policy_id!r:.80}"
        )
    return policy_id


def _is_number(given: Any) -> bool:
    """Whether a value is a float, or an int (but not a bool) that fits into 64 bits."""
    return isinstance(given, float) or (type(given) is int and abs(given) < 2**63)


def _checked_range(given: Any) -> tuple[float, float] | None:
    """Check [low, high]: finite numbers, low below high; None if the range is not known."""
    if given is None:
        return None
    numbers = list(given) if isinstance(given, (list, tuple)) else []
    fine = all(_is_number(one) and math.isfinite(one) for one in numbers)
    if len(numbers) != 2 or not fine or not numbers[0] < numbers[1]:
        raise DeclarationError(
            f"reward_range: expected [low, high], finite numbers with low < high, or null, got "
            f"{given!r:.80}"
        )
    return float(numbers[0]), float(numbers[1])


@dataclass(frozen=True, kw_only=True)
class PolicyDeclaration:
    """One policy's spaces and rules. Times are in seconds, sizes in bytes.

    Args:
        observation: the space of observations.
        action: the space of actions.
        policy_id: 1 to 64 letters, digits, `_` or `-`.
        spec: a PolicySpec's JSON, for a policy that acts.
        episode_timeout: an episode without an event for this time is abandoned.
        reward_window: how long after its action a step accepts rewards that name it.
        reward_combination: how several rewards of one step become one: "sum", "first", "last" or
            "max".
        reward_default: the reward of a step that got none.
        reward_range: the lowest and highest reward of a step, if known; estimators use them as
            bounds.
        part_steps: the most steps of a part; longer episodes are stored in several parts.
        part_bytes: the most bytes of a part.
        part_seconds: the longest time of a part.
        seal_bytes: parts become a shard at this size.
        seal_seconds: parts become a shard after this time.
        steps_per_version: flow control of on-policy training: steps with one version after which
            clients wait until newer weights are live; None: no limit.
        max_policy_lag: how many versions a client may be behind before it waits; None: no limit.
        candidate_features: the names of the features of candidates (storage.spaces.named_features),
            in the order of the leaf's columns; empty: they have none.
        redact: path below `obs`, `infos` or `tags` -> "drop" or "hash": values to remove, or to
            replace with pseudonyms, before anything is stored.
    """

    observation: Space
    action: Space
    policy_id: str = DEFAULT_POLICY
    spec: Mapping[str, Any] | None = None
    episode_timeout: float = 600.0
    reward_window: float = 0.0
    reward_combination: str = "sum"
    reward_default: float = 0.0
    reward_range: tuple[float, float] | None = None
    part_steps: int = 4096
    part_bytes: int = 4_000_000
    part_seconds: float = 60.0
    seal_bytes: int = 32_000_000
    seal_seconds: float = 5.0
    steps_per_version: int | None = None
    max_policy_lag: int | None = None
    redact: Mapping[str, str] = field(default_factory=dict)
    candidate_features: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_policy_id(self.policy_id)
        for name in ("observation", "action"):
            if not isinstance(getattr(self, name), Space):
                raise DeclarationError(f"{name}: expected a space, got {getattr(self, name)!r:.80}")
        for name in ("episode_timeout", "part_seconds", "seal_seconds"):
            self._check(name, "a number > 0", lambda value: value > 0)
        self._check("reward_window", "a finite number >= 0", lambda value: 0 <= value < math.inf)
        self._check("reward_default", "a finite number", math.isfinite)
        for name in ("part_steps", "part_bytes", "seal_bytes"):
            self._check(name, "a whole number >= 1", lambda value: value >= 1 and value % 1 == 0)
        for name, least in (("steps_per_version", 1), ("max_policy_lag", 0)):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < least):
                raise DeclarationError(
                    f"{name}: expected a whole number >= {least} or null, got {value!r:.80}"
                )
        if self.reward_combination not in COMBINATIONS:
            raise DeclarationError(
                f"reward_combination: expected one of {', '.join(COMBINATIONS)}, "
                f"got {self.reward_combination!r:.80}"
            )
        if self.spec is not None and not isinstance(self.spec, Mapping):
            raise DeclarationError(f"spec: expected an object or null, got {self.spec!r:.80}")
        object.__setattr__(self, "reward_range", _checked_range(self.reward_range))
        object.__setattr__(self, "candidate_features", self._checked_features())
        try:
            check_redaction(self.redact, self.observation)
        except ValueError as error:
            raise DeclarationError(str(error)) from error

    def _check(self, name: str, expected: str, fits: Callable[[Any], bool]) -> None:
        """Raise DeclarationError unless a field is a number for which `fits` is True."""
        value = getattr(self, name)
        if not _is_number(value) or not fits(value):
            raise DeclarationError(f"{name}: expected {expected}, got {value!r:.80}")

    def _checked_features(self) -> tuple[str, ...]:
        """The names of features, one for each column of `candidates`. Raises DeclarationError."""
        given = self.candidate_features
        try:
            if isinstance(given, str) or not isinstance(given, Sequence):
                raise SpaceError(f"expected a list of names, got {given!r:.80}")
            NamedFeatures(given)
            found = Candidates.of(self.observation, self.action) if given else None
        except SpaceError as error:
            raise DeclarationError(f"candidate_features: {error}") from error
        if given and (found is None or len(given) != found.width):
            wanted = "none without candidates" if found is None else f"{found.width} names"
            raise DeclarationError(f"candidate_features: expected {wanted}, got {len(given)}")
        return tuple(given)

    @property
    def schema_id(self) -> str:
        """The id of the spaces: 12 hex digits of a hash."""
        return schema_id(self.observation, self.action)

    @property
    def canonical_spaces(self) -> str:
        """The spaces as canonical JSON, of which `schema_id` is the hash."""
        return canonical_json(self.observation, self.action)

    def to_json(self) -> dict[str, Any]:
        """The declaration as it stands in the policy's file."""
        document = {"version": FORMAT_VERSION, **asdict(self)}
        document["observation"] = space_to_json(self.observation)
        document["action"] = space_to_json(self.action)
        if self.reward_range is None:
            del document["reward_range"]
        else:
            document["reward_range"] = list(self.reward_range)
        if self.candidate_features:
            document["candidate_features"] = list(self.candidate_features)
        else:
            del document["candidate_features"]
        return document

    @classmethod
    def from_json(cls, document: Any, where: str = "$") -> PolicyDeclaration:
        """Parse a JSON document. Raises DeclarationError, whose text begins with `where`."""
        if not isinstance(document, dict):
            raise DeclarationError(f"{where}: expected a JSON object, got {document!r:.100}")
        if "version" not in document:
            raise DeclarationError(f"{where}: version: expected {FORMAT_VERSION}, got none")
        try:
            require_format(document, FORMAT_VERSION, where, "version")
        except (NewerFormat, ValueError) as error:
            raise DeclarationError(str(error)) from error
        known = {field.name for field in fields(cls)}
        for name in sorted(set(document) - known - {"version"}):
            raise DeclarationError(f"{where}: {name:.100}: expected a field of {sorted(known)}")
        for name in sorted({"observation", "action"} - set(document)):
            raise DeclarationError(f"{where}: {name}: expected a space, got none")
        given = {key: value for key, value in document.items() if key != "version"}
        name = ""
        try:
            for name in ("observation", "action"):
                given[name] = space_from_json(given[name])
            return cls(**given)
        except SpaceError as error:
            raise DeclarationError(f"{where}: {name}: {error}") from error
        except DeclarationError as error:
            raise DeclarationError(f"{where}: {error}") from error
