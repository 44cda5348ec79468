"""The documents of weights: candidates, manifests, the live pointer, and their strict parsing.

A stored document is JSON `{"format", "kind", "digest", "body"}`. The digest is the SHA-256 of the
body's canonical JSON, so that a damaged number is detected. Weights are one safetensors file, which
has no checksum of its own: its digest is in the manifest and is checked before the file is parsed.

Opens no file: clients use it, too, on what they receive.
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
from storage.system.formats import require_format

FORMAT_VERSION = 1
MAX_DEPTH = 32
"""The largest depth of nested lists and objects in a document of weights."""
WEIGHTS_FILE = "weights.safetensors"
LINEAGE_FILE = "lineage.json"

Weights: TypeAlias = Mapping[str, npt.NDArray[Any]]
Json: TypeAlias = Any


def canonical(document: Json, what: str = "document") -> bytes:
    """The canonical JSON text of a document, in UTF-8: sorted keys and no spaces.

    Raises ValueError for NaN, infinity, unknown types, and nesting beyond the recursion limit.
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
    """Return the document as it will be read back from JSON.

    Also checks that msgpack can carry it. Raises ValueError, which names the place.
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
    """The items of a list or an object as (place, value); none for any other value.

    Raises ValueError for an integer of more than 64 bits.
    """
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
    """Replace NaN and infinity by None, because JSON has neither."""
    return {
        name: None if isinstance(value, float) and not np.isfinite(value) else value
        for name, value in document.items()
    }


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def seal_document(kind: str, body: Json) -> bytes:
    """The bytes of a document of one kind, as stored."""
    data = canonical(body, kind)
    document = {"format": FORMAT_VERSION, "kind": kind, "digest": sha256(data), "body": body}
    return json.dumps(document, sort_keys=True, indent=1, ensure_ascii=False).encode() + b"\n"


def open_document(kind: str, data: bytes, where: object) -> dict[str, Json]:
    """The body of what `seal_document` encoded.

    Raises WeightsDamaged and NewerFormat, which name `where`.
    """
    try:
        document = json.loads(data)
        if isinstance(document, dict) and document.get("digest") == _later_digest(document):
            require_format(document, FORMAT_VERSION, where)
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


def _later_digest(document: dict[str, Json]) -> str:
    """The digest of formats after 1: it covers the number, so that damage is no later format."""
    return sha256(canonical({name: document[name] for name in document if name != "digest"}))


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
"""Marks a field added later. Its default is not written, so that the digests of earlier candidates
do not change."""


class _JsonDocument:
    """A frozen dataclass that is parsed strictly from a JSON object."""

    @classmethod
    def from_json(cls, body: Json, where: object = "$") -> Self:
        """Parse the result of `to_json`. Raises WeightsDamaged for other keys or types."""
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
        """The document as a JSON object."""
        # as above: only the subclasses are dataclasses
        body: dict[str, Json] = asdict(self)  # type: ignore[call-overload]
        for known in fields(self):  # type: ignore[arg-type]  # each subclass is a dataclass
            if known.metadata == _ADDED and body[known.name] == known.default:
                del body[known.name]
        return body


def _require_digests(digests: dict[str, Json], where: object) -> None:
    """Require exactly the two known file names: a name from a document never becomes a path."""
    texts = all(isinstance(value, str) and len(value) == 64 for value in digests.values())
    if set(digests) != {WEIGHTS_FILE, LINEAGE_FILE} or not texts:
        raise WeightsDamaged(
            f"{where}.digests: expected a SHA-256 each of {WEIGHTS_FILE} and {LINEAGE_FILE}, "
            f"got {digests!r:.200}"
        )


@dataclass(frozen=True, kw_only=True)
class Candidate(_JsonDocument):
    """Trained weights without a number.

    The digest covers all content, so adding the same content twice gives one candidate. `digests`:
    file name -> SHA-256 of the weights and of the lineage (the ordinals trained on).
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
        """The SHA-256 of the document in hex: the name of the candidate."""
        return sha256(canonical(self.to_json()))


@dataclass(frozen=True, kw_only=True)
class Manifest(_JsonDocument):
    """A numbered version. `parent`: the previous live version; `copy_of`: set by a rollback.

    `candidate` is the digest of the candidate it came from; `created` is in microseconds since the
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
class Pin(_JsonDocument):
    """Who pinned the live version, when (microseconds since the epoch), and why."""

    by: str
    when: int
    why: str


_TYPES["Pin | None"] = (Pin, type(None))


@dataclass(frozen=True, kw_only=True)
class Live(_JsonDocument):
    """The live version, and the canary if one is running.

    `generation` rises strictly. The canary acts in `canary_share` (0 to 1) of the episodes. While
    it is `pinned`, by a rollback or a pause, only another rollback can change it.
    """

    generation: int
    version: int
    canary_version: int | None = None
    canary_share: float = 0.0
    pinned: Pin | None = field(default=None, metadata=_ADDED)

    @property
    def hold(self) -> Pin | None:
        """Why trainers and jobs may not publish: a pin, or a running canary; None if they may."""
        if self.pinned is not None or self.canary_version is None:
            return self.pinned
        why = f"version {self.canary_version} gets {self.canary_share:.3g} of the episodes"
        return Pin(by="a canary", when=0, why=why)


@dataclass(frozen=True, kw_only=True)
class HighestVersions(_JsonDocument):
    """The highest version and generation that were ever given, 0 for none."""

    version: int
    generation: int


@dataclass(frozen=True, kw_only=True)
class Served(_JsonDocument):
    """What one collector serves of a policy, and how it reacted to the live pointer.

    `generation` and `version` are those that its clients act with, -1 for none. `wanted_generation`
    and `wanted_version` are those of the live pointer that it read last, -1 for none; `why` gives
    the reason if it does not serve them. `until`: when its registration expires, in microseconds
    since the epoch. `served`: the ranges of all versions that it ever served; `refused`: the latest
    versions that it refused, with the reason.
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
        """Whether its clients act with the live version."""
        return (self.generation, self.version) == (live.generation, live.version)


@dataclass(frozen=True, kw_only=True)
class Pruned(_JsonDocument):
    """What is kept of a version whose content was removed: its numbers and digests."""

    version: int
    parent: int | None
    copy_of: int | None
    candidate: str
    digests: dict[str, str]
    created: int


def encode_weights(weights: Weights) -> bytes:
    """Encode arrays as one safetensors file.

    Raises WeightsRefused if there are no arrays, or for a dtype that is not numeric, NaN or
    infinity.
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
    """Decode the arrays of `encode_weights`, after checking their digest.

    Raises WeightsDamaged.
    """
    if sha256(data) != digest:
        raise WeightsDamaged(f"{where}: expected SHA-256 {digest}, got {sha256(data)}")
    try:
        return safetensors.numpy.load(data)
    except (safetensors.SafetensorError, ValueError, KeyError) as error:
        raise WeightsDamaged(f"{where}: {error}") from error
