"""Checks whether a shard's content agrees with its footer, its name and its spaces.

    check_footer(file.schema_arrow, metadata, stream, name)    # before any page is read
    check_column(column, values, metadata, name)               # each column that is used
    starts = check_runs(ordinals, t, episode_ordinals, agents, metadata)
    check_alike(table, starts)                                 # columns with one value per part

Readers and `verify` use them. Every check handles whole columns, and raises ShardDamaged, whose
text begins with the column or place.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from itertools import pairwise
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from storage.experience.endings import ENDINGS, TERMINATED
from storage.experience.range_set import RangeSet
from storage.experience.step_columns import (
    ADDED_COLUMNS,
    LOGP_TOLERANCE,
    STEP_COLUMNS,
    all_finite,
)
from storage.shards.arrow_arrays import given_values, present
from storage.shards.names import ShardDamaged
from storage.shards.schema import (
    CODED,
    ColumnSpec,
    ShardMetadata,
    coded_schema,
    column_specs,
    columns_for,
)
from storage.shards.stored_tables import stored_form
from storage.spaces.descriptors import Box, Space, schema_id, spaces_from_canonical_json
from storage.spaces.leaves import Leaf, bounds_of, describe, leaves

Array: TypeAlias = npt.NDArray[Any]
ValueLimits: TypeAlias = tuple[Array, Array] | None


# --- the footer ------------------------------------------------------------------------------


def check_footer(
    schema: pa.Schema, metadata: ShardMetadata, stream: str, first: int, last: int
) -> None:
    """Check the footer against the shard's place, its name and its spaces, and the columns.

    Raises ShardDamaged.
    """
    if metadata.stream != stream:
        raise ShardDamaged(f"expected stream {stream}, the footer says {metadata.stream}")
    if (metadata.first, metadata.last) != (first, last):
        raise ShardDamaged(
            f"its name says ordinals {first}-{last}, its footer {metadata.first}-{metadata.last}"
        )
    edges = [edge for pair in metadata.ranges for edge in (2 * pair[0], 2 * pair[1] + 1)]
    if any(before >= after for before, after in pairwise(edges)):
        raise ShardDamaged(f"expected ascending ranges of ordinals, got {metadata.ranges[:5]}")
    try:
        known = _content_rules(metadata.spaces)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ShardDamaged(f"the footer's spaces: {error}") from error
    if metadata.schema_id != known.schema_id:
        raise ShardDamaged(
            f"expected schema {known.schema_id} of its spaces, the footer says {metadata.schema_id}"
        )
    columns, stored, as_read = known.form(metadata.format_version)
    if dict(metadata.columns) != columns:
        wrong = [n for n, spec in columns.items() if metadata.columns.get(n) != spec]
        raise ShardDamaged(f"expected the columns of its spaces, the footer says other {wrong}")
    if not schema.equals(as_read):
        _check_fields(schema, stored)


def _check_fields(schema: pa.Schema, known: pa.Schema) -> None:
    for field in known:
        at = schema.get_all_field_indices(field.name)
        if not at and field.name in _ADDED:
            continue
        if len(at) != 1:
            raise ShardDamaged(f"{field.name}: expected one column of that name, got {len(at)}")
        kind = schema.field(at[0]).type
        if pa.types.is_dictionary(kind):
            kind = kind.value_type
        if kind != field.type:
            raise ShardDamaged(f"{field.name}: expected {field.type}, got {kind}")


class _ContentRules:
    """What follows from a pair of spaces: the columns, and their allowed values."""

    def __init__(self, canonical_json: str) -> None:
        observation, action = spaces_from_canonical_json(canonical_json)
        self.schema_id = schema_id(observation, action)
        self._columns = column_specs(observation, action)
        self._forms: dict[int, tuple[dict[str, ColumnSpec], pa.Schema, pa.Schema]] = {}
        self.nullable = {field.name: field.nullable for field in columns_for(self._columns)}
        self.leaves: dict[str, Leaf] = {}
        for prefix, space in (("obs", observation), ("final_obs", observation)):
            self._add(prefix, space)
        self._add("actions", action)
        self.bounded = {
            leaf.column("actions"): leaf
            for leaf in leaves(action)
            if isinstance(leaf.space, Box) and leaf.dtype.kind == "f" and _is_bounded(leaf.space)
        }
        self.has_densities = any(isinstance(leaf.space, Box) for leaf in leaves(action))

    def form(self, version: int) -> tuple[dict[str, ColumnSpec], pa.Schema, pa.Schema]:
        """(the columns in the footer, the file's schema, that with dictionaries) of a format."""
        if version not in self._forms:
            columns, schema = stored_form(self._columns, version)
            self._forms[version] = columns, schema, coded_schema(schema)
        return self._forms[version]

    def _add(self, prefix: str, space: Space) -> None:
        self.leaves |= {leaf.column(prefix): leaf for leaf in leaves(space)}


def _is_bounded(space: Box) -> bool:
    return bool(np.isfinite(space.low).any() or np.isfinite(space.high).any())


@lru_cache(maxsize=64)
def _content_rules(canonical_json: str) -> _ContentRules:
    return _ContentRules(canonical_json)


# --- columns ---------------------------------------------------------------------------------


def check_column(
    column: pa.ChunkedArray, values: Array | None, metadata: ShardMetadata, name: str
) -> None:
    """Check one column. `values`: its decoded rows (N, ...), None if only texts are to be checked.

    Raises ShardDamaged.
    """
    rules = _content_rules(metadata.spaces)
    if column.null_count and not rules.nullable.get(name, True):
        raise ShardDamaged(f"{name}: expected a value in every row, got {column.null_count} nulls")
    leaf = rules.leaves.get(name)
    if name in CODED or name == "infos" or (leaf is not None and leaf.is_text):
        _check_texts(column, name, leaf)
    elif leaf is not None and values is not None:
        check_values(values, leaf, name)
    elif values is not None:
        _check_numbers(column, values, name, has_densities=rules.has_densities)


def check_values(values: Array, leaf: Leaf, name: str, *, strict: bool = False) -> None:
    """Check that values (N, *shape) belong to their space. Raises ShardDamaged.

    Floats have to be finite. Outside their bounds they are allowed unless `strict`: an action that
    was not clipped may leave its bounds.
    """
    if not values.size:
        return
    bounds = bounds_of(leaf.space)
    if values.dtype.kind == "f" and not strict:
        fine = all_finite(values)
    elif values.dtype.kind == "b":
        fine = bool(values.view(np.uint8).max() <= 1)
    elif bounds is None:
        return
    elif bounds[0].ndim == 0:
        fine = bool(values.min() >= bounds[0] and values.max() <= bounds[1])
    else:
        fine = bool(((values >= bounds[0]) & (values <= bounds[1])).all())
    if not fine:
        raise ShardDamaged(f"{name}: expected {describe(leaf.space)}, got {_shown(values, bounds)}")


def bounded_actions(metadata: ShardMetadata) -> list[str]:
    """The columns of actions that may leave their bounds if a policy sampled them unclipped."""
    return list(_content_rules(metadata.spaces).bounded)


def check_choices(
    sources: pa.ChunkedArray, columns: Mapping[str, Array], metadata: ShardMetadata
) -> None:
    """Check that actions which were not sampled on-policy are within their bounds.

    `sources`: the column `source` as a dictionary. Raises ShardDamaged.
    """
    others = np.concatenate([_differs(chunk, "on_policy") for chunk in sources.chunks])
    for name, leaf in _content_rules(metadata.spaces).bounded.items():
        if name in columns and others.any():
            check_values(columns[name][others], leaf, name, strict=True)


def _differs(chunk: pa.DictionaryArray, word: str) -> npt.NDArray[np.bool_]:
    code = chunk.dictionary.to_pylist().index(word) if word in chunk.dictionary.to_pylist() else -1
    return np.asarray(chunk.indices.to_numpy() != code, np.bool_)


def _shown(values: Array, bounds: ValueLimits) -> str:
    bad = ~np.isfinite(values) if values.dtype.kind == "f" else np.zeros(values.shape, np.bool_)
    if bounds is not None and not bad.any():
        bad = (values < bounds[0]) | (values > bounds[1])
    return f"{values[bad].flat[0]} in row {int(np.argwhere(bad)[0][0])}" if bad.any() else "others"


def _check_numbers(
    column: pa.ChunkedArray, values: Array, name: str, *, has_densities: bool
) -> None:
    if not len(values):
        return
    expected, number = "", _NUMBERS.get(name)
    if number is not None:
        given = column.drop_null().to_numpy() if column.null_count else values
        if len(given) and not number.fits(given):
            expected = number.expected + (" or null" if number.nullable else "")
        elif name == "action_logp" and not has_densities and (given > LOGP_TOLERANCE).any():
            expected = "logarithms of probabilities"
    elif name == "action_dist_inputs" and _beyond(values) > column.null_count:
        expected = "finite numbers, or minus infinity for what is masked out"
    elif name in _LEAST and (least := pc.min(column).as_py()) is not None and least < _LEAST[name]:
        expected = f"{_LEAST[name]} or more"
    if expected:
        raise ShardDamaged(f"{name}: expected {expected} in each row, got other values")


_LEAST = {"part": 0, "agents": 1}
_NUMBERS = {column.name: column for column in STEP_COLUMNS}
_ADDED = {column.name for column in ADDED_COLUMNS}


def _beyond(values: Array) -> int:
    """The number of rows (N, K) with NaN or plus infinity; rows that are null hold NaN."""
    return int(np.count_nonzero(~(values < np.inf).all(axis=1)))


def _check_texts(column: pa.ChunkedArray, name: str, leaf: Leaf | None) -> None:
    for chunk in column.chunks:
        texts = chunk.dictionary if pa.types.is_dictionary(chunk.type) else chunk
        if pa.types.is_string(texts.type):
            texts.validate(full=True)  # UTF-8
        if name in _WORDS:
            strange = pc.unique(texts.filter(pc.invert(pc.is_in(texts, _WORDS[name]))))
            if len(strange.drop_null()):
                expected = ", ".join(_WORDS[name].to_pylist())
                raise ShardDamaged(f"{name}: expected {expected}, got {strange[0].as_py()!r:.80}")
        elif name in ("tags", "infos"):
            kind = dict[str, str] if name == "tags" else dict[str, Any]
            _check_json(texts.drop_null(), name, kind)
        elif leaf is not None:
            _check_lengths(texts, name, leaf.space)


def _check_lengths(texts: pa.Array, name: str, space: Any) -> None:
    found = pc.min_max(pc.utf8_length(texts.cast(pa.string()))).as_py()
    least, most = found["min"], found["max"]
    if least is not None and not space.min_length <= least <= most <= space.max_length:
        raise ShardDamaged(f"{name}: expected {describe(space)}, got {least} to {most} characters")


_WORDS = {"ended": pa.array(ENDINGS)} | {c.name: pa.array(c.words) for c in STEP_COLUMNS if c.words}


def _check_json(texts: pa.Array, name: str, kind: Any) -> None:
    """Parse all texts as lines of one document. If that fails, find the text that is wrong."""
    lines = "\n".join(texts.to_pylist())
    try:
        fine = len(msgspec.json.Decoder(kind).decode_lines(lines)) == len(texts)
    except (msgspec.MsgspecError, RecursionError):
        fine = False
    for text in () if fine else texts.to_pylist():
        try:
            msgspec.convert(json.loads(text), kind)
        except (ValueError, RecursionError) as error:
            raise ShardDamaged(f"{name}: expected a JSON object, got {text!r:.80}") from error


def is_null(values: Array) -> npt.NDArray[np.bool_]:
    """Whether each value of an object array (N,) is None: bool (N,)."""
    return np.asarray(values == _NULL, np.bool_)


_NULL: Any = None
_TERMINATED = np.array([*TERMINATED], object)

# --- rows ------------------------------------------------------------------------------------


def check_runs(
    ordinals: Array,
    t: Array,
    episode_ordinals: Array,
    agents: Callable[[], Array],
    metadata: ShardMetadata,
) -> npt.NDArray[np.int64]:
    """Return the first row of each part: int64 (P,).

    A part is a run of rows with one ordinal and agent, and consecutive t. Raises ShardDamaged
    unless the parts agree with the footer. `agents` returns the agent ids (N,); it is called only
    if parts of several agents share an ordinal.
    """
    if not len(ordinals) == len(t) == len(episode_ordinals) == metadata.rows > 0:
        raise ShardDamaged(f"expected {metadata.rows} rows, got {len(ordinals)}")
    breaks = ordinals[1:] != ordinals[:-1]
    goes_on = t[1:] == t[:-1] + 1
    starts = np.concatenate(([0], np.flatnonzero(breaks) + 1))
    if len(starts) != metadata.parts or not (breaks | goes_on).all():
        names = agents()
        breaks |= np.asarray(names[1:] != names[:-1], np.bool_)
        whole = breaks | goes_on
        if not whole.all():
            ordinal = int(ordinals[int(whole.argmin())])
            raise ShardDamaged(f"ordinal {ordinal}: expected each step once, without gaps")
        starts = np.concatenate(([0], np.flatnonzero(breaks) + 1))
        parts = len(set(zip(ordinals[starts].tolist(), names[starts].tolist(), strict=True)))
        different = np.unique(ordinals[starts])
    else:
        different = ordinals[starts]
        if (different[1:] <= different[:-1]).any():  # not ascending, unlike in our shards
            different = np.unique(different)
        parts = len(different)
    found, expected = _runs(different), np.array(metadata.ranges, np.int64)
    if not parts == len(starts) == metadata.parts or not np.array_equal(found, expected):
        raise ShardDamaged(
            f"expected {metadata.parts} parts of ordinals {RangeSet(metadata.ranges)}, as in the "
            f"footer, got {len(starts)} of {RangeSet(found.tolist())}"
        )
    changes = np.flatnonzero(episode_ordinals[1:] != episode_ordinals[:-1])
    if not breaks[changes].all():
        raise ShardDamaged("episode_ordinal: expected one value in each part, got several")
    if t[starts].min() < 0 or episode_ordinals.min() < 0 or (episode_ordinals > ordinals).any():
        raise ShardDamaged(
            "expected t and episode_ordinal >= 0, and no part before the first of its episode"
        )
    return starts


ALIKE = ("eps_id", "part", "agent_id", "policy_id", "training_enabled", "continues", "tags")
"""The columns that have one value in each part."""


def check_alike(table: pa.Table, starts: npt.NDArray[np.int64]) -> None:
    """Check that these columns, if they are there, have one value in all rows of a part.

    `starts`: the first rows of the parts (P,). Raises ShardDamaged.
    """
    if len(starts) == len(table):
        return
    begins = np.zeros(len(table), np.bool_)
    begins[starts] = True
    there = table.column_names
    for name in (name for name in ALIKE if name in there):
        if not all(begins[changes].all() for changes in _changes(table.column(name))):
            raise ShardDamaged(f"{name}: expected one value in each part, got several")


def _changes(column: pa.ChunkedArray) -> Iterator[npt.NDArray[np.intp]]:
    """The rows whose value differs from that of the previous row, chunk by chunk."""
    at, before = 0, None  # the value of the previous row
    for chunk in column.chunks:
        if not len(chunk):
            continue
        if at and chunk[0].as_py() != before:
            yield np.array([at])
        if not pa.types.is_dictionary(chunk.type) or chunk.null_count or len(chunk.dictionary) > 1:
            codes = _codes(chunk)
            yield np.flatnonzero(codes[1:] != codes[:-1]) + (at + 1)
        at, before = at + len(chunk), chunk[-1].as_py()


def _codes(chunk: pa.Array) -> Array:
    """Numbers (N,) that are equal where the values are equal."""
    if pa.types.is_string(chunk.type):
        chunk = chunk.dictionary_encode()
    if pa.types.is_dictionary(chunk.type):
        chunk = chunk.indices.fill_null(-1) if chunk.null_count else chunk.indices
    codes: Array = chunk.to_numpy(zero_copy_only=False)
    return codes


def _runs(values: Array) -> Array:
    """The runs of consecutive integers in ascending values: (runs, 2) of (first, last)."""
    cuts = np.flatnonzero(np.diff(values) != 1)
    firsts, lasts = np.append(0, cuts + 1), np.append(cuts, len(values) - 1)
    return np.stack((values[firsts], values[lasts]), axis=1)


def check_finals(
    table: pa.Table, starts: npt.NDArray[np.int64], metadata: ShardMetadata
) -> tuple[npt.NDArray[np.int64], dict[str, Array]]:
    """Check that final observations are in last rows of parts only. Raises ShardDamaged.

    Returns (the rows that have one, ascending, int64 (M,); column name -> values (M, ...) of these
    rows, for the columns `final_obs[.path]`). `starts`: the first rows of the parts (P,).
    """
    names = [name for name in table.column_names if name.partition(".")[0] == "final_obs"]
    lasts = np.append(starts[1:], len(table)) - 1
    stored = lasts[present(table, names[0])[lasts]]
    values = {}
    for name in names:
        column = table.column(name)
        if len(table) - column.null_count != len(stored) or not present(table, name)[stored].all():
            raise ShardDamaged(f"{name}: expected values at ends of parts only, in all columns")
        values[name] = given_values(column, metadata.specs[name])
        check_column(column, values[name], metadata, name)
    return stored, values


def check_endings(
    starts: npt.NDArray[np.int64], columns: Mapping[str, Array], ended: Array | None
) -> None:
    """Check that only the last row of a part ends an episode, and in one way.

    `starts`: the first rows of the parts (P,); `ended`: words (N,) or None. Raises ShardDamaged.
    """
    terminated, truncated = columns["terminateds"], columns["truncateds"]
    lasts = np.append(starts[1:], len(terminated)) - 1
    over = terminated | truncated
    if np.count_nonzero(over) != np.count_nonzero(over[lasts]) or (terminated & truncated).any():
        raise ShardDamaged("terminateds, truncateds: expected at most one, at the end of a part")
    if ended is None:
        return
    words = ended[lasts]
    has_word = ~is_null(words)
    if np.count_nonzero(~is_null(ended)) != np.count_nonzero(has_word):
        raise ShardDamaged("ended: expected values at ends of parts only")
    if (terminated[lasts] != np.isin(words, _TERMINATED)).any() or (over[lasts] != has_word).any():
        raise ShardDamaged("ended: expected values that agree with terminateds and truncateds")
