"""What goes with weights: candidates, manifests, the live pointer, and their strict documents.

A document at rest is JSON `{"format", "kind", "digest", "body"}`; the digest is the SHA-256 of the
body's canonical JSON, so that a damaged number is not taken for another one. Weights are one
safetensors file, which has no checksum of its own: its digest stands in the manifest and is checked
before a byte of it is parsed.

Opens no file: a client uses it on what it received.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self, TypeAlias

import numpy as np
import numpy.typing as npt
import safetensors
import safetensors.numpy

from storage.errors import WeightsDamaged, WeightsRefused

FORMAT_VERSION = 1
MAX_DEPTH = 32
"""Lists and objects within each other, in what comes with weights."""
WEIGHTS_FILE = "weights.safetensors"
LINEAGE_FILE = "lineage.json"

Weights: TypeAlias = Mapping[str, npt.NDArray[Any]]
Json: TypeAlias = Any


def canonical(document: Json, what: str = "document") -> bytes:
    """The one JSON text of a document.

    Raises ValueError for NaN, infinity, unknown types, and what is nested beyond reason.
    """
    try:
        text = json.dumps(
            document, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=False
        )
        return text.encode()
    except (TypeError, ValueError) as error:
        raise ValueError(f"{what}: expected JSON without NaN or infinity: {error}") from error
    except RecursionError as error:
        raise _too_deep(what) from error


def plain_document(document: Json, what: str) -> dict[str, Json]:
    """The document as it will be read back, and as JSON and msgpack alike can carry it.

    Raises ValueError that names the place.
    """
    if not isinstance(document, dict):
        raise ValueError(f"{what}: expected a dict, got {document!r:.80}")
    plain: dict[str, Json] = json.loads(canonical(document, what))
    level: list[tuple[str, Json]] = [(what, plain)]
    for _ in range(MAX_DEPTH + 1):
        level = [item for place, value in level for item in _items(place, value)]
    if level:
        raise _too_deep(level[0][0])
    return plain


def _items(place: str, value: Json) -> list[tuple[str, Json]]:
    """What is in a list or an object, with the place of each. Raises ValueError."""
    if isinstance(value, dict):
        return [(f"{place}.{key}", item) for key, item in value.items()]
    if isinstance(value, list):
        return [(f"{place}[{index}]", item) for index, item in enumerate(value)]
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        raise ValueError(f"{place}: expected an integer of 64 bits, got {value!r:.40}")
    return []


def _too_deep(place: str) -> ValueError:
    text = f"expected at most {MAX_DEPTH} nested lists and objects"
    return ValueError(f"{place:.80}: {text}")


def finite(document: Mapping[str, Any]) -> dict[str, Any]:
    """JSON has no NaN: such a number becomes None."""
    return {
        name: None if isinstance(value, float) and not np.isfinite(value) else value
        for name, value in document.items()
    }


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def seal_document(kind: str, body: Json) -> bytes:
    """The bytes at rest of a document of one kind."""
    data = canonical(body, kind)
    document = {"format": FORMAT_VERSION, "kind": kind, "digest": sha256(data), "body": body}
    return json.dumps(document, sort_keys=True, indent=1, ensure_ascii=False).encode() + b"\n"


def open_document(kind: str, data: bytes, where: object) -> dict[str, Json]:
    """The body of `seal_document` bytes. Raises WeightsDamaged naming `where`."""
    try:
        document = json.loads(data)
        if not isinstance(document, dict) or set(document) != {"format", "kind", "digest", "body"}:
            raise ValueError("expected the keys format, kind, digest, body")
        if (document["format"], document["kind"]) != (FORMAT_VERSION, kind):
            raise ValueError(
                f"expected {kind} of format {FORMAT_VERSION}, got {document['kind']!r:.40} of "
                f"format {document['format']!r:.40}"
            )
        body = document["body"]
        if not isinstance(body, dict) or sha256(canonical(body)) != document["digest"]:
            raise ValueError("the content does not match its digest")
    except (ValueError, RecursionError) as error:
        raise WeightsDamaged(f"{where}: {error}") from error
    return body


_TYPES: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "str": (str,),
    "float": (int, float),
    "int | None": (int, type(None)),
    "str | None": (str, type(None)),
    "dict[str, Json]": (dict,),
    "dict[str, Json] | None": (dict, type(None)),
    "dict[str, str]": (dict,),
    "list[Json]": (list,),
}


_ADDED = {"added": True}
"""Marks a field whose default is not written, so that a candidate's digest does not change when a
field is added to what it holds."""


class _Document:
    """Strict reading of a frozen dataclass from a JSON object."""

    @classmethod
    def from_json(cls, body: Json, where: object = "$") -> Self:
        """The value of `to_json`. Raises WeightsDamaged for other keys or types."""
        # every subclass is a dataclass, which the type of this base cannot say
        known = fields(cls)  # type: ignore[arg-type]  # each subclass is a dataclass
        expected = {f.name: str(f.type) for f in known}
        added = {f.name for f in known if f.metadata == _ADDED}
        if not isinstance(body, dict) or not set(expected) - added <= set(body) <= set(expected):
            got = sorted(body) if isinstance(body, dict) else f"{body!r:.80}"
            raise WeightsDamaged(f"{where}: expected the keys {sorted(expected)}, got {got}")
        body = {
            name: Pin.from_json(value, f"{where}.{name}")
            if expected[name] == "Pin | None" and value is not None
            else value
            for name, value in body.items()
        }
        for name, value in body.items():
            if not isinstance(value, _TYPES[expected[name]]) or isinstance(value, bool):
                raise WeightsDamaged(
                    f"{where}.{name}: expected {expected[name]}, got {value!r:.80}"
                )
        if "digests" in expected:
            _require_digests(body["digests"], where)
        return cls(**body)

    def to_json(self) -> dict[str, Json]:
        # as above: only the subclasses are dataclasses
        body: dict[str, Json] = asdict(self)  # type: ignore[call-overload]
        for known in fields(self):  # type: ignore[arg-type]  # each subclass is a dataclass
            if known.metadata == _ADDED and body[known.name] == known.default:
                del body[known.name]
        return body


def _require_digests(digests: dict[str, Json], where: object) -> None:
    """The two known file names and no other: a name from a document never becomes a path."""
    texts = all(isinstance(value, str) and len(value) == 64 for value in digests.values())
    if set(digests) != {WEIGHTS_FILE, LINEAGE_FILE} or not texts:
        raise WeightsDamaged(
            f"{where}.digests: expected a SHA-256 each of {WEIGHTS_FILE} and {LINEAGE_FILE}, "
            f"got {digests!r:.200}"
        )


@dataclass(frozen=True, kw_only=True)
class Candidate(_Document):
    """Trained, not numbered. Its digest is that of all its content, so adding twice is once.

    `digests`: file name -> SHA-256 of the weights and of the lineage (the ordinals trained on).
    """

    policy_id: str
    spec: dict[str, Json]
    filter_state: dict[str, Json] | None
    metrics: dict[str, Json]
    checkpoint: str | None
    digests: dict[str, str]

    def __repr__(self) -> str:
        return f"Candidate({self.policy_id!r}, digest {self.digest[:12]}, metrics {self.metrics})"

    @property
    def digest(self) -> str:
        return sha256(canonical(self.to_json()))


@dataclass(frozen=True, kw_only=True)
class Manifest(_Document):
    """A numbered version. `parent`: what was live before; `copy_of`: set by a rollback.

    `candidate` is the digest of the candidate it came from; `created`: microseconds since the
    epoch.
    """

    store_id: str
    policy_id: str
    version: int
    parent: int | None
    copy_of: int | None
    candidate: str
    spec: dict[str, Json]
    filter_state: dict[str, Json] | None
    metrics: dict[str, Json]
    checkpoint: str | None
    digests: dict[str, str]
    created: int

    def __repr__(self) -> str:
        came = "" if self.copy_of is None else f", a copy of {self.copy_of}"
        return (
            f"Manifest({self.policy_id!r}, version {self.version}{came}, parent {self.parent}, "
            f"candidate {self.candidate[:12]}, metrics {self.metrics})"
        )


@dataclass(frozen=True, kw_only=True)
class Pin(_Document):
    """Who keeps what is live as it is, since when (microseconds since the epoch), and why."""

    by: str
    when: int
    why: str


_TYPES["Pin | None"] = (Pin, type(None))


@dataclass(frozen=True, kw_only=True)
class Live(_Document):
    """What is live. `generation` rises strictly; a canary gets its share of episodes (0 to 1).

    While it is `pinned`, by a rollback or a pause, nothing else goes live but another rollback.
    """

    generation: int
    version: int
    canary_version: int | None = None
    canary_share: float = 0.0
    pinned: Pin | None = field(default=None, metadata=_ADDED)

    @property
    def hold(self) -> Pin | None:
        """What keeps trainers and jobs from publishing: the pin, or a canary that is not ended."""
        if self.pinned is not None or self.canary_version is None:
            return self.pinned
        why = f"version {self.canary_version} gets {self.canary_share:.3g} of the episodes"
        return Pin(by="a canary", when=0, why=why)


@dataclass(frozen=True, kw_only=True)
class Numbers(_Document):
    """The highest version and generation that were given, 0 for none."""

    version: int
    generation: int


@dataclass(frozen=True, kw_only=True)
class Served(_Document):
    """What one collector serves of a policy, and what it made of the live pointer.

    `generation` and `version` are what its clients act with, -1 for nothing. `wanted_generation`
    and `wanted_version` are of the pointer that it has looked at last, -1 for none; `why` says what
    keeps it from serving that. `until` is when it stops counting as registered, in microseconds
    since the epoch. `served` lists the ranges of all versions that it ever served, `refused` the
    latest that it refused, with the reason.
    """

    collector_id: str
    generation: int
    version: int
    wanted_generation: int
    wanted_version: int
    why: str | None
    until: int
    served: list[Json]
    refused: dict[str, str]

    def serves(self, live: Live) -> bool:
        """Whether its clients act with what is live."""
        return (self.generation, self.version) == (live.generation, live.version)


@dataclass(frozen=True, kw_only=True)
class Pruned(_Document):
    """What is kept of a version whose content was removed: its number and its digests."""

    version: int
    parent: int | None
    copy_of: int | None
    candidate: str
    digests: dict[str, str]
    created: int


def encode_weights(weights: Weights) -> bytes:
    """One safetensors file.

    Raises WeightsRefused for no tensors, an unknown dtype, NaN or infinity.
    """
    if not weights:
        raise WeightsRefused("weights: expected one or more arrays, got none")
    tensors = {}
    for name, value in weights.items():
        array = np.array(value, order="C")  # a transposed view would be written in memory order
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise WeightsRefused(f"weights.{name}: expected finite numbers, got NaN or infinity")
        if array.dtype.kind not in "fiub" or array.dtype.itemsize > 8:
            raise WeightsRefused(f"weights.{name}: expected numbers, got dtype {array.dtype}")
        tensors[name] = array.astype(array.dtype.newbyteorder("="), copy=False)
    return safetensors.numpy.save(tensors)


def decode_weights(data: bytes, digest: str, where: object = WEIGHTS_FILE) -> dict[str, Any]:
    """The arrays of `encode_weights` bytes, whose digest is checked first.

    Raises WeightsDamaged.
    """
    if sha256(data) != digest:
        raise WeightsDamaged(f"{where}: expected SHA-256 {digest}, got {sha256(data)}")
    try:
        return safetensors.numpy.load(data)
    except (safetensors.SafetensorError, ValueError, KeyError) as error:
        raise WeightsDamaged(f"{where}: {error}") from error
