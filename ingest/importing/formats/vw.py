"""Vowpal Wabbit's JSON logs of contextual bandits: `dsjson`, and `cb_json`.

A line is a decision, or in dsjson a dangling observation: a reward that arrived after its decision
had been written. In dsjson the context is the object `c`, in cb_json the line itself. The features
of candidates (`_multi`) become the leaf `candidates`, with a column for each number and for each
text (storage.spaces.named_features); without features they are a fixed set of actions.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ingest.importing.engine import FILE, ROW, Workspace, failures, name_sql, text_sql
from ingest.importing.formats.recipes import Recipe, json_files
from ingest.importing.options import ImportOptions
from ingest.importing.readers import Blocks, SourceBlock
from ingest.importing.sources import KeptUnit
from ingest.protocol.errors import ImportFailed
from storage.spaces.action_mask import ACTION_MASK
from storage.spaces.candidates import CANDIDATES
from storage.spaces.descriptors import Array
from storage.wording import counted

_LABELS = ("_label_cost", "_label_probability", "_label_Action", "_labelIndex")
_OF_LINE = ("EventId", "event_id", "Timestamp", "RewardValue", "_skipLearn", "a", "p", "pdrop")
_CANDIDATES = ("_multi", "_slots", "_outcomes")
_KNOWN = {name.lower() for name in (*_LABELS, *_OF_LINE, *_CANDIDATES)}
"""The keys of a line that are not features, in lower case."""

_DECISIONS = f"""
WITH lines AS (
    SELECT *, coalesce("EventId", event_id)::JSON ->> '$' AS _id,
        "RewardValue" IS NOT NULL AND "_label_cost" IS NULL AS _dangling,
        coalesce("_skipLearn" = 'true', false) AS _skipped,
        coalesce(TRY_CAST("_labelIndex" AS BIGINT),
            TRY_CAST(coalesce("_label_Action", a::JSON ->> 0) AS BIGINT) - 1) AS _chosen
    FROM source
), late AS (
    SELECT _id AS _late, sum(TRY_CAST("RewardValue" AS DOUBLE)) AS _reward
    FROM lines WHERE _dangling GROUP BY _id
)
SELECT {FILE}, {ROW}, _id AS event_id, _dangling AS dangling, _skipped AS skipped,
    _chosen AS action,
    "_label_cost" AS cost, coalesce(_reward, 0) AS observed,
    coalesce("_label_probability", p::JSON ->> 0) AS probability,
    CASE WHEN pdrop IS NULL THEN 1 ELSE 1 - TRY_CAST(pdrop AS DOUBLE) END AS pass_prob,
    "Timestamp"::JSON ->> '$' AS timestamp{{features}}
FROM lines LEFT JOIN late ON NOT _dangling AND _id = _late
"""
_MOST_FEATURES = 1_000
"""Of a candidate: texts that differ between most decisions are no categories."""
_RANK = "rank"
_NUMBERS_OF_BLOCK = 2_000_000
"""The most features of candidates that are read at a time."""
_OWN = (
    *(FILE, ROW, "event_id", "dangling", "skipped", "action", "cost", "observed", "probability"),
    *("pass_prob", "timestamp", CANDIDATES, ACTION_MASK, _RANK),
)
"""The columns of the decisions: a feature with the name of one gets a prefix."""
_MIXED = "JSON"
"""The type of an empty object, and of values of several types in a list of objects."""
_EACH = "[*]"
"""Stands in a path for the objects of a list."""
_ABSENT = "(absent)"
"""Stands for an absent text, because the names of a space cannot be empty."""
_LEARNABLE = "NOT dangling AND NOT skipped AND cost IS NOT NULL"
_UNUSED = f"""
SELECT count(*) FILTER ({_LEARNABLE}), count(*) FILTER (skipped AND NOT dangling),
    count(*) FILTER (cost IS NULL AND NOT skipped AND NOT dangling),
    count(*) FILTER (dangling AND NOT coalesce(event_id IN (
        SELECT event_id FROM decisions WHERE {_LEARNABLE} AND event_id IS NOT NULL), false))
FROM decisions
"""
_NUMBERS = ("UBIGINT", "BIGINT", "HUGEINT", "UHUGEINT", "DOUBLE")


def dsjson(path: Path, options: ImportOptions, space: Workspace) -> Recipe:
    """Files whose lines have the context under `c`."""
    return _opened(path, options, space, "c")


def cb_json(path: Path, options: ImportOptions, space: Workspace) -> Recipe:
    """Files whose lines are the context, or have it under `c`, beside the label's keys."""
    return _opened(path, options, space, None)


def _opened(path: Path, options: ImportOptions, space: Workspace, context: str | None) -> Recipe:
    more = (*_LABELS, *_OF_LINE, *_CANDIDATES, *([context] if context else ()))
    kept = _KeptDecisions.every(json_files(path), space.connection(), more, raw=True)
    names = kept.names()
    context = "c" if "c" in names else None
    own = {FILE, ROW, *_KNOWN}
    roots = [name for name in names if name.lower() not in own and name[:1] != "_"]
    roots = [context] if context else roots
    kept.rows.show({})
    items = kept.items = _candidates(kept, context, options)
    features = list(_features(kept, roots))
    if items is None and not features:
        features = [("constant", "", "1")]
    columns = [f"{sql} AS {name_sql(name)}" for name, _, sql in features]
    columns += items.columns if items else []
    decisions = _DECISIONS.format(features="".join(f", {column}" for column in columns))
    ((learnable, *unused),) = _found(kept, f"WITH decisions AS ({decisions}) {_UNUSED}")
    if not learnable:
        raise ImportFailed(f"{path}: expected decisions with _label_cost, got none")
    kept.select(f"SELECT * FROM ({decisions}) WHERE {_LEARNABLE}", (FILE, ROW))
    found: dict[str, Any] = {
        "observation": [name + suffix for name, suffix, _ in features],
        "action": ["action"],
        "reward": ["-cost", "observed"],
        "action_prob": "probability",
        "sample_prob": "pass_prob",
        "tags": {"event_id": "event_id"} if _any(kept, "event_id") else {},
        "time": "timestamp" if _any(kept, "timestamp") else None,
    }
    if items is not None:
        found["observation"] = [ACTION_MASK, CANDIDATES, *found["observation"]]
        found["candidate_features"], found["most_candidates"] = items.names, items.most
        found["infos"] = {_RANK: _RANK} if _RANK in kept.names() else {}
    return Recipe([kept], {name: value for name, value in found.items() if value}, _notes(unused))


def _notes(unused: Sequence[int]) -> list[str]:
    skipped, unlabelled, unknown = unused
    texts = (
        (skipped, "decision has _skipLearn and is", "decisions have _skipLearn and are"),
        (unlabelled, "line has no _label_cost and is", "lines have no _label_cost and are"),
        (
            unknown,
            "observation has no such decision and is",
            "observations have no decision and are",
        ),
    )
    return [f"{counted(n, one, many)} left out" for n, one, many in texts if n]


def _any(kept: KeptUnit, name: str) -> bool:
    """Whether a column of the result has a value."""
    ((count,),) = _found(kept, f"SELECT count({kept.rows.column(name)}) FROM rows")
    return bool(count)


def _found(kept: KeptUnit, query: str) -> list[Any]:
    with failures():
        return list(kept.rows.connection.execute(query).fetchall())


@dataclass(frozen=True)
class _ItemColumns:
    """The columns of the leaves `candidates` and `action_mask` in SQL, and of the items' tags.

    In SQL a candidate is a number for each field: a value, or the number of a text from 1. `fields`
    has the column of each text, or of the values.
    """

    names: tuple[str, ...]  # of the features
    fields: Sequence[int | Sequence[int]]
    most: int
    columns: list[str]

    def widened(self, block: SourceBlock) -> Blocks:
        """Blocks in which a candidate is a number for each feature, few rows at a time."""
        size, at = self.most * len(self.names), block.table.column_names.index(CANDIDATES)
        step = max(1, _NUMBERS_OF_BLOCK // size)
        for start in range(0, len(block.table), step):
            table = block.table.slice(start, step)
            wide = pa.FixedSizeListArray.from_arrays(self._wide(table[CANDIDATES]), size)
            table = table.set_column(at, CANDIDATES, wide.cast(pa.list_(pa.float64())))
            yield SourceBlock(table, block.numbers[start : start + step])

    def _wide(self, column: pa.ChunkedArray) -> Array:
        values = column.combine_chunks().flatten().to_numpy().reshape(-1, len(self.fields))
        counts = pc.list_value_length(column).to_numpy() // len(self.fields)
        starts = np.arange(len(counts)) * self.most - np.cumsum(counts) + counts
        places = np.arange(len(values)) + np.repeat(starts, counts)
        wide = np.zeros((len(counts) * self.most, len(self.names)))
        for given, field in zip(values.T, self.fields, strict=True):
            if isinstance(field, int):
                wide[places, field] = given
            else:
                known = given > 0
                wide[places[known], np.array(field)[given[known].astype(int) - 1]] = 1.0
        return wide.ravel()


class _KeptDecisions(KeptUnit):
    """The decisions of a log, whose candidates are wide only when they are read."""

    items: _ItemColumns | None = None

    def blocks(self, columns: Sequence[str]) -> Blocks:
        for block in super().blocks(columns):
            if self.items is None or CANDIDATES not in columns or not len(block.table):
                yield block
            else:
                yield from self.items.widened(block)


def _candidates(kept: KeptUnit, context: str | None, options: ImportOptions) -> _ItemColumns | None:
    """The candidates of a log; None for a fixed set of actions, which have no features.

    Raises ImportFailed for decisions of several slots, for different sets without features, and for
    features that `options` do not name.
    """
    for key in _CANDIDATES[1:]:
        where = f"{_inner(key, context)} IS NOT NULL"
        _refuse(kept, key, where, "expected one decision in each line, got those of slots")
    key, items = _CANDIDATES[0], _inner(_CANDIDATES[0], context)
    size = f"json_array_length({items})"
    kinds = _kinds(kept, items, (key,))
    if not kinds:
        text = "expected candidates with features, or as many in each decision, got another number"
        _refuse(kept, key, f"{size} <> (SELECT min({size}) FROM source)", text)
        return None
    none = (
        f"coalesce({size}, 0) = 0 AND _label_cost IS NOT NULL "
        "AND \"_skipLearn\" IS DISTINCT FROM 'true'"
    )
    _refuse(kept, key, none, "expected one or more candidates, got none")
    most = options.most_candidates
    if most:
        _refuse(kept, key, f"{size} > {most}", f"expected at most {most} candidates, got more")
    listed = f"from_json({items}, '[\"JSON\"]')"
    names, fields = _fields(kept, kinds, listed, options.candidate_features)
    ((longest,),) = _found(kept, f"SELECT max({size}) FROM source")
    most = most or longest
    row = ", ".join(f"CAST({sql} AS DOUBLE)" for sql in fields)
    rows = f"flatten(list_transform({listed}, lambda item: [{row}]))"
    tags = f"list_transform({listed}, lambda item: item ->> '_tag')"
    ((tagged,),) = _found(kept, f"SELECT sum(list_count({tags})) FROM source")
    rank = f"{{'item': {tags}[_chosen + 1], 'items': {tags}}}"
    return _ItemColumns(
        tuple(names),
        [*fields.values()],
        most,
        [
            f"{rows} AS {CANDIDATES}",
            f"list_resize(list_transform({listed}, lambda item: 1), {most}, 0) AS {ACTION_MASK}",
            *([f"{rank} AS {_RANK}"] if tagged else []),
        ],
    )


def _fields(
    kept: KeptUnit,
    kinds: Mapping[tuple[str, ...], set[str]],
    listed: str,
    declared: Sequence[str],
) -> tuple[Sequence[str], dict[str, int | Sequence[int]]]:
    """The features' names, and SQL -> columns of each field of the candidate `item`.

    `listed` are all candidates of a line; `kinds` are by the path of a value in their list.

    Raises ImportFailed for a feature that is not among the `declared` ones, if there are any.
    """
    names: list[str] = []
    fields: dict[str, str | list[str]] = {}
    for path, found in kinds.items():
        name = ".".join(part for part in path[2:] if part != _EACH)
        cell = _cell("item", path[2:])
        if found == {"LIST"} or not name:
            text = "expected objects of numbers and texts, got numbers in a list"
            raise ImportFailed(f"{'.'.join(path)}: {text}")
        if name in names or f"{name}=*" in names:
            raise ImportFailed(f"{'.'.join(path)}: expected one feature {name}, got two")
        if found <= {*_NUMBERS, "BOOLEAN"}:
            names.append(name)
            fields[_number_sql(cell)] = name
            continue
        query = f"SELECT DISTINCT {cell} FROM (SELECT unnest({listed}) AS item FROM source)"
        texts = sorted(text for (text,) in _found(kept, f"{query} WHERE {cell} <> ''"))
        own, rest = [f"{name}={text}" for text in texts], f"{name}=*"
        if rest in declared:
            own = [one if one in declared else rest for one in own]
        names += dict.fromkeys(own if declared else [rest, *own])  # `=*`: for texts of later logs
        known = ", ".join(map(text_sql, texts))
        fields[f"coalesce(list_position([{known}]::VARCHAR[], {cell}), 0)"] = own
    if len(names) > _MOST_FEATURES:
        raise ImportFailed(
            f"{_CANDIDATES[0]}: expected at most {_MOST_FEATURES} features of a candidate, a text "
            f"being one for each of its values, got {len(names)}"
        )
    unknown = next((name for name in names if declared and name not in declared), None)
    if unknown is not None:
        shown = ", ".join(declared)
        raise ImportFailed(
            f"{_CANDIDATES[0]}: expected the declared candidate_features ({shown:.300}), got "
            f"{unknown!r:.80}"
        )
    at = {name: column for column, name in enumerate(declared or names)}
    return declared or names, {
        sql: at[own] if isinstance(own, str) else [at[one] for one in own]
        for sql, own in fields.items()
    }


def _inner(key: str, context: str | None) -> str:
    """A value of a line that is not a feature, in the context or beside it, in SQL."""
    own = f"{name_sql(key)}::JSON"
    return own if context is None else f"coalesce(json_extract({context}::JSON, '/{key}'), {own})"


def _refuse(kept: KeptUnit, key: str, where: str, text: str) -> None:
    """Raise ImportFailed for the first row with a condition."""
    query = f"SELECT {FILE}, {ROW} FROM source WHERE {where} ORDER BY {FILE}, {ROW} LIMIT 1"
    for file, row in _found(kept, query):
        raise ImportFailed(f"{file} row {row}: {key}: {text}")


def _features(kept: KeptUnit, roots: list[str]) -> Iterator[tuple[str, str, str]]:
    """(name, suffix of its option, SQL) of each feature; absent numbers are 0, texts _ABSENT."""
    seen: set[str] = set()
    for root in roots:
        column = f"{name_sql(root)}::JSON"
        for path, found in _kinds(kept, column, (root,)).items():
            name = "_".join(part for part in path[1:] or path if part != _EACH).replace(".", "_")
            name = f"c_{name}" if name.lower() in ("", *_OWN) else name
            if name.lower() in seen:
                raise ImportFailed(f"{'.'.join(path)}: expected one feature {name}, got two")
            seen.add(name.lower())  # SQL does not distinguish cases
            cell = _cell(column, path[1:])
            if found <= {*_NUMBERS, "BOOLEAN"}:
                yield name, "", _number_sql(cell)
            elif found == {"LIST"}:
                yield name, "", cell
            else:
                yield name, ":categories", f"coalesce(nullif({cell}, ''), {text_sql(_ABSENT)})"


def _kinds(kept: KeptUnit, column: str, path: tuple[str, ...]) -> dict[tuple[str, ...], set[str]]:
    """Path -> the types of its values in a column of JSON."""
    structures = _found(kept, f"SELECT DISTINCT json_structure({column}) FROM source")
    kinds: dict[tuple[str, ...], set[str]] = {}
    for (structure,) in sorted(structures, key=str):
        for inner, kind in _leaves(json.loads(structure or '"NULL"'), path):
            kinds.setdefault(inner, set()).add(kind)
    for inner, found in kinds.items():
        if _MIXED in found:
            found.remove(_MIXED)
            found |= _mixed(kept, column, inner)
    return {inner: found for inner, found in kinds.items() if found}


def _mixed(kept: KeptUnit, column: str, path: tuple[str, ...]) -> set[str]:
    """The types of values in lists of objects; none if all are empty objects."""
    if _EACH not in path:
        return set()
    values = f"json_extract({column}, {_pattern(path[1:])})"
    query = f"SELECT DISTINCT json_type(v) FROM (SELECT unnest({values}) AS v FROM source)"
    kinds = {kind for (kind,) in _found(kept, query)} - {None, "NULL"}
    if kinds <= {"OBJECT"}:
        return set()
    if path[-1] == _EACH or kinds & {"OBJECT", "ARRAY"}:
        raise _other_list(path)
    return kinds


def _other_list(path: Sequence[str]) -> ImportFailed:
    text = "expected numbers, a text or objects, got a list of others"
    return ImportFailed(f"{'.'.join(path)}: {text}")


def _pattern(path: Sequence[str]) -> str:
    """A path with lists of objects in SQL."""
    parts = (part if part == _EACH else f".{json.dumps(part)}" for part in path)
    return text_sql("$" + "".join(parts))


def _cell(column: str, path: Sequence[str]) -> str:
    """A value of JSON as text in SQL; in a list of objects only one may have it."""
    if _EACH not in path:
        pointer = "".join("/" + part.replace("~", "~0").replace("/", "~1") for part in path)
        return f"json_extract_string({column}, {text_sql(pointer or '$')})"
    found = f"json_extract_string({column}, {_pattern(path)})"
    text = text_sql(f"{'.'.join(path)}: expected one value in a list of objects, got ")
    two = f"error({text} || {found}::VARCHAR)"
    return f"CASE WHEN list_count({found}) > 1 THEN {two} ELSE list_any_value({found}) END"


def _number_sql(cell: str) -> str:
    """A number or truth value as a number's text in SQL; 0 if there is none."""
    numbers = f"CASE {cell} WHEN 'true' THEN '1' WHEN 'false' THEN '0' ELSE {cell} END"
    return f"coalesce({numbers}, '0')"


def _leaves(structure: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    """(path, type) of the values in a structure, without keys that VW takes for its own."""
    if isinstance(structure, dict):
        for key, inner in structure.items():
            if not key.startswith("_"):
                yield from _leaves(inner, (*path, key))
    elif isinstance(structure, list):
        if isinstance(structure[0], dict) or structure[0] in (_MIXED, "NULL"):
            yield from _leaves(structure[0], (*path, _EACH))
            return
        if structure[0] not in _NUMBERS:
            raise _other_list(path)
        yield path, "LIST"
    elif structure != "NULL":
        yield path, structure
