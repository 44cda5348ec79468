"""Space descriptors: the allowed values of an observation or an action, with numpy alone.

A descriptor is a frozen value with a strict, versioned JSON form. Reading one never executes
anything: there is no pickle, and unknown kinds, keys and versions are refused.

`storage.spaces.codec` converts values of a space to bytes and back.
"""

from __future__ import annotations

import hashlib
import json
import math
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

FORMAT_VERSION = 1
MAX_ELEMENTS = 2**24  # of one array; limits the memory that a descriptor from outside can request
OTHER = "other"  # the name that stands for all unknown names in short forms
MAX_NAME = 1_000  # characters
REFUSED = ("Graph", "Sequence", "OneOf")
BOX_DTYPES = [
    "bool",
    "uint8",
    "int8",
    "uint16",
    "int16",
    "uint32",
    "int32",
    "uint64",
    "int64",
    "float16",
    "float32",
    "float64",
]

Array: TypeAlias = npt.NDArray[Any]
Json: TypeAlias = Any


class SpaceError(ValueError):
    """A value or descriptor does not fit; the text says what was expected, what came, and where."""


# --- the descriptors -------------------------------------------------------------------------


def bound_to_json(bound: Array) -> Json:
    """A number if all elements are equal, else a flat list; infinities become strings."""
    flat = bound.reshape(-1)
    if flat.size == 0:
        return 0
    listed = (flat[:1] if (flat == flat[0]).all() else flat).tolist()
    numbers = [str(x) if isinstance(x, float) and math.isinf(x) else x for x in listed]
    return numbers[0] if len(numbers) == 1 else numbers


def _bound_from_json(bound: Json, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    if math.prod(shape) == 0 and type(bound) is int and bound == 0:
        return np.zeros(shape, dtype)
    listed = bound if isinstance(bound, list) else [bound]
    if isinstance(bound, list) and len(bound) != math.prod(shape):
        raise SpaceError(f"box bound: expected {math.prod(shape)} numbers, got {len(bound)}")
    for number in listed:
        if not _is_bound(number, dtype.kind):
            raise SpaceError(f"box bound: expected values of {dtype}, got {number!r:.80}")
    try:
        numbers = [float(x) for x in listed] if dtype.kind == "f" else listed
        with np.errstate(over="ignore"):  # a value out of a narrow float's range means no bound
            array = np.array(numbers, dtype)
    except OverflowError as error:
        raise SpaceError(f"box bound: expected values of {dtype}, got {bound!r:.80}") from error
    return array.reshape(shape) if isinstance(bound, list) else np.broadcast_to(array[0], shape)


def _is_bound(number: Json, kind: str) -> bool:
    if kind == "b":
        return isinstance(number, bool)
    if kind in "iu":
        return isinstance(number, int) and not isinstance(number, bool)
    if isinstance(number, str):
        return number in ("inf", "-inf")
    return isinstance(number, (int, float)) and not isinstance(number, bool)


def _whole(what: str, names: str, given: Any) -> tuple[int, ...]:
    """Convert numbers (a shape, sizes, lengths) to ints. Raises SpaceError for anything else."""
    try:
        return tuple(operator.index(n) for n in given)
    except TypeError:
        raise SpaceError(f"{what}: expected {names} of whole numbers, got {given!r:.80}") from None


def _spaces(what: str, given: Iterable[Any]) -> None:
    for space in given:
        if not isinstance(space, Space):
            raise SpaceError(f"{what}: expected spaces of Headrace, got {space!r:.80}")


def _require_elements(what: str, shape: tuple[int, ...]) -> None:
    if any(n < 0 for n in shape):
        raise SpaceError(f"{what}: expected a shape of sizes >= 0, got {shape!s:.200}")
    if math.prod(shape) > MAX_ELEMENTS or len(shape) > 32:
        raise SpaceError(
            f"{what}: expected at most {MAX_ELEMENTS} elements in 32 dimensions, got {shape!s:.200}"
        )


@dataclass(frozen=True, eq=False)
class Box:
    """An array of numbers: `dtype`, `shape`, and inclusive bounds (a number or an array each).

    `ragged`: a table of float32 (rows, F) whose last rows are often zeros. These are neither sent
    nor stored; in memory all rows are there.
    """

    shape: tuple[int, ...] = ()
    dtype: np.dtype[Any] = np.dtype("float32")  # noqa: RUF009  a dtype is immutable
    low: Array = None  # type: ignore[assignment]  # None becomes the widest bound of the dtype
    high: Array = None  # type: ignore[assignment]  # as for low
    ragged: bool = False

    def __post_init__(self) -> None:
        try:
            dtype = np.dtype(self.dtype)
        except TypeError:
            raise SpaceError(f"box: expected a dtype, got {self.dtype!r:.80}") from None
        if dtype.name not in BOX_DTYPES:
            raise SpaceError(f"box: expected a dtype of {', '.join(BOX_DTYPES)}, got {dtype}")
        shape = _whole("box", "a shape", self.shape)
        _require_elements("box", shape)
        object.__setattr__(self, "dtype", dtype)
        object.__setattr__(self, "shape", shape)
        for name, sign in (("low", -1), ("high", 1)):
            given = getattr(self, name)
            value = widest(dtype, sign) if given is None else given
            bound = _bound_array(name, value, dtype, shape)
            if bound.dtype.kind == "f" and np.isnan(bound).any():
                raise SpaceError(f"box: expected a {name} bound without NaN, got {given!r}")
            bound.flags.writeable = False
            object.__setattr__(self, name, bound)
        if self.ragged and not ((self.low <= 0) & (self.high >= 0)).all():
            raise SpaceError("box: expected bounds around 0, which fills rows, if it is ragged")
        if self.ragged and (dtype.name, len(shape), 0 in shape) != ("float32", 2, False):
            raise SpaceError(
                f"box: expected float32 and a shape (rows, features) if it is ragged, got {dtype} "
                f"and {shape}"
            )
        if not (self.low <= self.high).all():
            raise SpaceError(f"box: expected low <= high, got low {self.low}, high {self.high}")

    def __repr__(self) -> str:
        low, high = _shown_bound(self.low), _shown_bound(self.high)
        ragged = ", ragged=True" if self.ragged else ""
        return f"Box({self.shape}, {self.dtype.name!r}, low={low}, high={high}{ragged})"

    def to_json(self) -> Json:
        """The JSON node of this space, without the version."""
        return {
            "kind": "box",
            "dtype": self.dtype.name,
            "shape": list(self.shape),
            "low": bound_to_json(self.low),
            "high": bound_to_json(self.high),
            **({"ragged": True} if self.ragged else {}),
        }

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Box) and self.to_json() == other.to_json()

    def __hash__(self) -> int:
        return hash((Box, json.dumps(self.to_json())))


def _shown_bound(bound: Array) -> str:
    """A number if all elements are equal, else the first few elements."""
    numbers = bound.reshape(-1)
    if numbers.size and (numbers == numbers[0]).all():
        return f"{numbers[0]:g}"
    return f"[{', '.join(f'{x:g}' for x in numbers[:8])}{', ...' * (numbers.size > 8)}]"


def _bound_array(name: str, value: Any, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    try:
        with np.errstate(over="ignore"):
            return np.broadcast_to(np.asarray(value, dtype), shape).copy()
    except (ValueError, TypeError, OverflowError) as error:
        raise SpaceError(
            f"box: expected a {name} bound of {dtype} and shape {shape}, got {value!r:.80}"
        ) from error


def widest(dtype: np.dtype[Any], sign: int) -> Any:
    """The lowest (sign -1) or highest (sign 1) bound of a dtype; infinite for floats."""
    if dtype.kind == "f":
        return sign * np.inf
    if dtype.kind == "b":
        return sign > 0
    info = np.iinfo(dtype)
    return info.max if sign > 0 else info.min


@dataclass(frozen=True)
class Discrete:
    """One of `n` integers, beginning with `start`. Stored as int64.

    With `names`, one for each integer from 0, callers pass and receive names; shards and networks
    contain the integers, called codes. An unknown string is an error, or counts as the name `other`
    if that is declared.
    """

    n: int
    start: int = 0
    names: tuple[str, ...] = ()
    other: str | None = None

    @classmethod
    def of(cls, names: Iterable[str], *, other: str | None = None) -> Discrete:
        """The space of names, coded in their order; `other` is appended if it is not among them.

        Raises SpaceError if there are no names, if one is empty or not a string, and for
        duplicates.
        """
        if isinstance(names, str) or not isinstance(names, Iterable):
            raise SpaceError(f"discrete: expected names, got {names!r:.80}")
        given = tuple(names)
        if other is not None and other not in given:
            given = (*given, other)
        if not given:
            raise SpaceError("discrete: expected one or more names, got none")
        return cls(len(given), 0, given, other)

    def __post_init__(self) -> None:
        n, start = _whole("discrete", "n and start", (self.n, self.start))
        object.__setattr__(self, "n", n)
        object.__setattr__(self, "start", start)
        if self.n < 1:
            raise SpaceError(f"discrete: expected n >= 1, got {self.n}")
        if not -(2**63) <= self.start <= 2**63 - self.n:
            raise SpaceError(f"discrete: expected values that fit int64, got start {self.start}")
        object.__setattr__(self, "names", tuple(self.names))
        if self.names:
            _check_names(self.names, self.n, self.start)
        if self.other is not None and self.other not in self.names:
            raise SpaceError(f"discrete: expected other to be one of the names, got {self.other!r}")

    def __repr__(self) -> str:
        if not self.names:
            return f"Discrete({self.n}{f', start={self.start}' if self.start else ''})"
        shown = ", ".join(map(repr, self.names[:8])) + (", ..." if self.n > 8 else "")
        other = "" if self.other is None else f", other={self.other!r}"
        return f"Discrete.of([{shown}]{other})"

    def codes(self, names: Iterable[Any]) -> Array:
        """The code of each name, int64 (N,); for an unknown name -1, or the code of `other`.

        A value that is not a string, such as None for a missing one, is always -1. For an Arrow
        column it is enough to code the dictionary:

            found = column.dictionary_encode()
            codes = np.append(space.codes(found.dictionary.to_pylist()), -1)
            codes = codes[found.indices.fill_null(-1).to_numpy()]
        """
        known = {name: code for code, name in enumerate(self.names)}
        rest = -1 if self.other is None else known[self.other]
        found = (known.get(x, rest) if isinstance(x, str) else -1 for x in names)
        return np.fromiter(found, np.int64)

    @property
    def has_numbers(self) -> bool:
        """Whether a name reads as an integer other than its code, which would be ambiguous."""
        return any(_is_another(name, code) for code, name in enumerate(self.names))

    def named(self, codes: Any) -> Array:
        """The name of each code, as an object array of the shape of `codes`."""
        found: Array = np.array(self.names, object)[np.asarray(codes)]
        return found

    def to_json(self) -> Json:
        """The space as it stands in a policy's file."""
        node: Json = {"kind": "discrete", "n": self.n, "start": self.start}
        if self.names:
            node["names"] = list(self.names)
        if self.other is not None:
            node["other"] = self.other
        return node


def _check_names(names: tuple[Any, ...], n: int, start: int) -> None:
    if len(names) != n or start != 0:
        raise SpaceError(
            f"discrete: expected {n} names, one for each integer from 0 on, got {len(names)} from "
            f"{start} on"
        )
    for name in names:
        if not isinstance(name, str) or not 1 <= len(name) <= MAX_NAME or not _is_utf8(name):
            raise SpaceError(
                f"discrete: expected texts of 1 to {MAX_NAME} characters as names, got {name!r:.80}"
            )
    if len(set(names)) != n:
        twice = next(name for name in names if names.count(name) > 1)
        raise SpaceError(f"discrete: expected different names, got {twice!r:.80} twice")


def _is_another(name: str, code: int) -> bool:
    try:
        return str(int(name)) == name != str(code)
    except ValueError:
        return False


def _is_utf8(text: str) -> bool:
    return not any("\ud800" <= letter <= "\udfff" for letter in text)


@dataclass(frozen=True)
class MultiDiscrete:
    """Several discrete choices: element i is one of `nvec[i]` integers from `start[i]` (int64)."""

    nvec: tuple[int, ...]
    start: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        nvec = _whole("multi_discrete", "sizes", self.nvec)
        starts = _whole("multi_discrete", "starts", self.start) or (0,) * len(nvec)
        object.__setattr__(self, "nvec", nvec)
        object.__setattr__(self, "start", starts)
        if not self.nvec or any(n < 1 for n in self.nvec) or len(self.start) != len(self.nvec):
            raise SpaceError(
                "multi_discrete: expected one or more sizes >= 1 and as many starts, got "
                f"nvec {self.nvec!s:.200}, start {self.start!s:.200}"
            )
        for n, start in zip(self.nvec, self.start, strict=True):
            if not -(2**63) <= start <= 2**63 - n:
                raise SpaceError(f"multi_discrete: expected int64 values, got {n} from {start}")

    def to_json(self) -> Json:
        """The space as it stands in a policy's file."""
        return {"kind": "multi_discrete", "nvec": list(self.nvec), "start": list(self.start)}


@dataclass(frozen=True)
class MultiBinary:
    """An int8 array of zeros and ones of the given shape."""

    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", _whole("multi_binary", "a shape", self.shape))
        if not self.shape or any(n < 1 for n in self.shape):
            raise SpaceError(f"multi_binary: expected a shape of sizes >= 1, got {self.shape}")
        _require_elements("multi_binary", self.shape)

    def to_json(self) -> Json:
        """The space as it stands in a policy's file."""
        return {"kind": "multi_binary", "shape": list(self.shape)}


@dataclass(frozen=True)
class Text:
    """A string of `min_length` to `max_length` characters; `charset` "" allows every character."""

    max_length: int
    min_length: int = 0
    charset: str = ""

    def __post_init__(self) -> None:
        _whole("text", "lengths", (self.min_length, self.max_length))
        object.__setattr__(self, "charset", "".join(sorted(set(self.charset))))
        if not 0 <= self.min_length <= self.max_length:
            raise SpaceError(
                f"text: expected 0 <= min_length <= max_length, got {self.min_length} and "
                f"{self.max_length}"
            )

    def to_json(self) -> Json:
        """The space as it stands in a policy's file."""
        return {
            "kind": "text",
            "min_length": self.min_length,
            "max_length": self.max_length,
            "charset": self.charset,
        }


@dataclass(frozen=True)
class Dict:
    """Named spaces, sorted by name."""

    spaces: tuple[tuple[str, Space], ...]

    def __post_init__(self) -> None:
        given = self.spaces
        pairs = given.items() if isinstance(given, Mapping) else given
        ordered = tuple(sorted(pairs, key=lambda pair: pair[0]))
        names = [name for name, _ in ordered]
        if not names or len(set(names)) != len(names):
            raise SpaceError(f"dict: expected one or more different names, got {names}")
        for name in names:
            if not isinstance(name, str) or not name or "." in name:
                raise SpaceError(f"dict: expected names without '.', got {name!r}")
        _spaces("dict", (space for _, space in ordered))
        object.__setattr__(self, "spaces", ordered)

    def __repr__(self) -> str:
        return f"Dict({dict(self.spaces)})"

    def to_json(self) -> Json:
        """The space as it stands in a policy's file."""
        return {"kind": "dict", "spaces": [[name, s.to_json()] for name, s in self.spaces]}


@dataclass(frozen=True)
class Tuple:
    """Spaces by position."""

    spaces: tuple[Space, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "spaces", tuple(self.spaces))
        if not self.spaces:
            raise SpaceError("tuple: expected one or more spaces, got none")
        _spaces("tuple", self.spaces)

    def to_json(self) -> Json:
        """The space as it stands in a policy's file."""
        return {"kind": "tuple", "spaces": [s.to_json() for s in self.spaces]}


Space: TypeAlias = Box | Discrete | MultiDiscrete | MultiBinary | Text | Dict | Tuple


# --- JSON ------------------------------------------------------------------------------------

_KEYS = {
    "box": {"dtype", "shape", "low", "high"},
    "discrete": {"n", "start"},
    "multi_discrete": {"nvec", "start"},
    "multi_binary": {"shape"},
    "text": {"min_length", "max_length", "charset"},
    "dict": {"spaces"},
    "tuple": {"spaces"},
}
_OPTIONAL = {"box": {"ragged"}, "discrete": {"names", "other"}}
_MAX_DEPTH = 32


def space_to_json(space: Space) -> Json:
    """The versioned JSON form: `{"version": 1, "space": {...}}`."""
    return {"version": FORMAT_VERSION, "space": space.to_json()}


def space_from_json(document: Json) -> Space:
    """The descriptor of a JSON form made by `space_to_json`.

    Raises SpaceError for an unknown version, kind or key, or a value of the wrong type.
    """
    if not isinstance(document, dict) or set(document) != {"version", "space"}:
        raise SpaceError(f'space: expected {{"version", "space"}}, got {document!r:.200}')
    version = document["version"]
    if type(version) is not int or version != FORMAT_VERSION:
        raise SpaceError(f"space: expected format version {FORMAT_VERSION}, got {version!r:.80}")
    try:
        return _from_json(document["space"], "$.space", 0)
    except RecursionError as error:
        raise SpaceError("space: expected fewer nested values") from error


def _from_json(node: Json, where: str, depth: int) -> Space:
    if depth > _MAX_DEPTH:
        raise SpaceError(f"{where}: expected at most {_MAX_DEPTH} nested spaces")
    kind = node.get("kind") if isinstance(node, dict) else None
    if not isinstance(kind, str):
        raise SpaceError(f"{where}: expected an object with a kind, got {node!r:.200}")
    if kind in REFUSED or kind.lower() in ("graph", "sequence", "oneof", "one_of"):
        raise SpaceError(f"{where}: {kind} spaces are not supported")
    if kind not in _KEYS:
        raise SpaceError(f"{where}: expected a kind of {', '.join(_KEYS)}, got {node!r:.200}")
    keys, optional = _KEYS[kind] | {"kind"}, _OPTIONAL.get(kind, set())
    if set(node) - optional != keys:
        may = f" and perhaps {sorted(optional)}" if optional else ""
        raise SpaceError(f"{where}: expected keys {sorted(keys)}{may}, got {sorted(node)}")
    try:
        return _build(kind, node, where, depth)
    except SpaceError as error:
        text = str(error)
        raise SpaceError(text if text.startswith("$") else f"{where}: {text}") from error
    except (TypeError, ValueError, OverflowError) as error:
        raise SpaceError(f"{where}: {error}") from error


def _build(kind: str, node: dict[str, Json], where: str, depth: int) -> Space:
    if kind == "box":
        if node["dtype"] not in BOX_DTYPES:
            raise SpaceError(f"expected a dtype of {', '.join(BOX_DTYPES)}, got {node['dtype']!r}")
        dtype, shape = np.dtype(node["dtype"]), _sizes(node["shape"])
        _require_elements("box", shape)
        low, high = (_bound_from_json(node[name], dtype, shape) for name in ("low", "high"))
        if node.get("ragged", True) is not True:
            raise SpaceError(f"expected true as ragged, or no such key, got {node['ragged']!r:.80}")
        return Box(shape, dtype, low, high, "ragged" in node)
    if kind == "discrete":
        return _discrete(node)
    if kind == "multi_discrete":
        return MultiDiscrete(_sizes(node["nvec"]), _sizes(node["start"]))
    if kind == "multi_binary":
        return MultiBinary(_sizes(node["shape"]))
    if kind == "text":
        charset = node["charset"]
        if not isinstance(charset, str):
            raise SpaceError(f"expected charset to be a string, got {charset!r}")
        return Text(_integer(node["max_length"]), _integer(node["min_length"]), charset)
    if kind == "dict":
        return Dict(
            tuple((name, _from_json(s, f"{where}.{name}", depth + 1)) for name, s in node["spaces"])
        )
    return Tuple(
        tuple(_from_json(s, f"{where}[{i}]", depth + 1) for i, s in enumerate(node["spaces"]))
    )


def _discrete(node: dict[str, Json]) -> Discrete:
    names, other = node.get("names", []), node.get("other")
    if not isinstance(names, list) or ("names" in node and not names):
        raise SpaceError(f"expected a list of names, got {names!r:.80}")
    if "other" in node and not isinstance(other, str):
        raise SpaceError(f"expected other to be a name, got {other!r:.80}")
    return Discrete(_integer(node["n"]), _integer(node["start"]), tuple(names), other)


def _integer(value: Json) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise SpaceError(f"expected an integer, got {value!r}")
    return value


def _sizes(value: Json) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise SpaceError(f"expected a list of integers, got {value!r}")
    return tuple(_integer(n) for n in value)


def canonical_json(observation: Space, action: Space) -> str:
    """The unique text of a pair of spaces, which `schema_id` hashes."""
    document = {
        "version": FORMAT_VERSION,
        "observation": observation.to_json(),
        "action": action.to_json(),
    }
    return json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False)


def spaces_from_canonical_json(text: str) -> tuple[Space, Space]:
    """(observation, action) of a text made by `canonical_json`. Raises SpaceError."""
    try:
        document = json.loads(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise SpaceError(f"spaces: expected JSON, got {text!r:.80}: {error}") from error
    if not isinstance(document, dict) or set(document) != {"version", "observation", "action"}:
        raise SpaceError(f"spaces: expected version, observation, action, got {text!r:.200}")
    observation, action = (
        space_from_json({"version": document["version"], "space": document[name]})
        for name in ("observation", "action")
    )
    return observation, action


def schema_id(observation: Space, action: Space) -> str:
    """The first 12 hex digits of the SHA-256 of `canonical_json`, which identify a schema."""
    return hashlib.sha256(canonical_json(observation, action).encode()).hexdigest()[:12]


# --- short forms for command lines -----------------------------------------------------------


_EXAMPLES = {
    "names": 'discrete:["DE","FR"]',
    "spaces": '{"country": ["DE", "FR"], "age": "box:1"}',
}


def parse_space(text: str) -> Space:
    """The space of a short form: `box:4`, `box:84x84x4:uint8`, `box:2::-1:1` (dtype, low, high),
    `discrete:2`, `discrete:5:1` (start), `discrete:["DE","FR"]` (names), `discrete:["DE"]:other`
    (what is no name is `other`), `multi_discrete:3,4`, `multi_binary:8`, `text:32`,
    `candidates:64x20` (at most 64, with 20 features each).

    A Dict is JSON text: `{"country": ["DE", "FR"], "age": "box:1"}`, with a short form or a list of
    names for each of its spaces. Raises SpaceError with the forms that exist.
    """
    if not isinstance(text, str):
        got = type(text).__name__
        raise SpaceError(f"expected text, as 'box:4' or the JSON text of a Dict, got a {got}")
    kind, _, rest = text.partition(":")
    parts = rest.split(":") if rest else []
    try:
        if text.startswith("{"):
            given = json.loads(text, object_pairs_hook=tuple)
            return Dict(tuple((name, _parse_inner(name, inner)) for name, inner in given))
        if kind == "box" and parts and parts[0]:
            return _parse_box(parts)
        if kind == "candidates" and len(parts) == 1:
            return Box(tuple(int(n) for n in parts[0].split("x")), ragged=True)
        if kind == "discrete" and rest.lstrip()[:1] not in "-0123456789":
            return _parse_names(rest)
        if kind == "discrete" and 1 <= len(parts) <= 2:
            return Discrete(int(parts[0]), int(parts[1]) if parts[1:] else 0)
        if kind == "multi_discrete" and len(parts) == 1:
            return MultiDiscrete(tuple(int(n) for n in parts[0].split(",")))
        if kind == "multi_binary" and len(parts) == 1:
            return MultiBinary(tuple(int(n) for n in parts[0].split("x")))
        if kind == "text" and len(parts) == 1:
            return Text(int(parts[0]))
    except SpaceError:
        raise
    except json.JSONDecodeError as error:  # as of names whose quotes a shell has removed
        form = "names" if kind == "discrete" else "spaces"
        example = f"'{_EXAMPLES[form]}'"
        raise SpaceError(
            f"expected {form} as JSON, quoted for the shell: {example}, got {text:.200}"
        ) from error
    except (ValueError, TypeError, RecursionError) as error:
        raise SpaceError(f"{text!r:.200}: {error}") from error
    raise SpaceError(
        'expected box:SHAPE[:DTYPE[:LOW:HIGH]], discrete:N[:START], discrete:["NAME",...][:other], '
        f"multi_discrete:N,N,..., multi_binary:SHAPE, text:MAX, candidates:MOSTxFEATURES or a "
        f"JSON object of those, got "
        f"{text!r:.200}"
    )


def _parse_inner(name: str, given: Json) -> Space:
    """The space of one name of a Dict: a short form, or names."""
    try:
        if isinstance(given, list):
            return Discrete.of(given)
        if not isinstance(given, str):
            raise SpaceError(f"expected a short form or a list of names, got {given!r:.80}")
        return parse_space(given)
    except SpaceError as error:
        raise SpaceError(f"{name}: {error}") from error


def _parse_names(text: str) -> Discrete:
    names, end = json.JSONDecoder().raw_decode(text)
    if not isinstance(names, list) or text[end:] not in ("", f":{OTHER}"):
        raise SpaceError(
            f'expected discrete:["NAME",...] or discrete:["NAME",...]:other, got {text:.200}'
        )
    return Discrete.of(names, other=OTHER if text[end:] else None)


def _parse_box(parts: list[str]) -> Box:
    if len(parts) not in (1, 2, 4):
        raise SpaceError(f"expected box:SHAPE[:DTYPE[:LOW:HIGH]], got 'box:{':'.join(parts):.200}'")
    shape = tuple(int(n) for n in parts[0].split("x"))
    dtype = np.dtype(parts[1] if len(parts) > 1 and parts[1] else "float32")
    if len(parts) < 4:
        return Box(shape, dtype)
    low, high = (float(p) if dtype.kind == "f" else int(p) for p in parts[2:])
    return Box(shape, dtype, low, high)  # type: ignore[arg-type]  # a number stands for an array
