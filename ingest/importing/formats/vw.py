"""Vowpal Wabbit's JSON logs of contextual bandits: `dsjson`, and `cb_json`.

A line is a decision, or in dsjson a dangling observation: a reward that arrived after its decision
had been written. In dsjson the context is the object `c`, in cb_json the line itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ingest.importing.engine import FILE, ROW, Workspace, failures, name_sql, text_sql
from ingest.importing.formats.recipes import Recipe, json_files
from ingest.importing.options import ImportOptions
from ingest.importing.sources import KeptUnit
from ingest.protocol.errors import ImportFailed
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
        coalesce("_skipLearn" = 'true', false) AS _skipped
    FROM source
), late AS (
    SELECT _id AS _late, sum(TRY_CAST("RewardValue" AS DOUBLE)) AS _reward
    FROM lines WHERE _dangling GROUP BY _id
)
SELECT {FILE}, {ROW}, _id AS event_id, _dangling AS dangling, _skipped AS skipped,
    coalesce(TRY_CAST("_labelIndex" AS BIGINT),
        TRY_CAST(coalesce("_label_Action", a::JSON ->> 0) AS BIGINT) - 1) AS action,
    "_label_cost" AS cost, coalesce(_reward, 0) AS observed,
    coalesce("_label_probability", p::JSON ->> 0) AS probability,
    CASE WHEN pdrop IS NULL THEN 1 ELSE 1 - TRY_CAST(pdrop AS DOUBLE) END AS pass_prob,
    "Timestamp"::JSON ->> '$' AS timestamp{{features}}
FROM lines LEFT JOIN late ON NOT _dangling AND _id = _late
"""
_OWN = (
    *(FILE, ROW, "event_id", "dangling", "skipped", "action", "cost", "observed", "probability"),
    *("pass_prob", "timestamp"),
)
"""The columns of the decisions: a feature with the name of one gets a prefix."""
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
    return _opened(path, space, "c")


def cb_json(path: Path, options: ImportOptions, space: Workspace) -> Recipe:
    """Files whose lines are the context, or have it under `c`, beside the label's keys."""
    return _opened(path, space, None)


def _opened(path: Path, space: Workspace, context: str | None) -> Recipe:
    more = (*_LABELS, *_OF_LINE, *_CANDIDATES, *([context] if context else ()))
    kept = KeptUnit.every(json_files(path), space.connection(), more, raw=True)
    names = kept.names()
    context = "c" if "c" in names else None
    own = {FILE, ROW, *_KNOWN}
    roots = [name for name in names if name.lower() not in own and name[:1] != "_"]
    roots = [context] if context else roots
    kept.rows.show({})
    _require_fixed_actions(kept, context)
    features = list(_features(kept, roots))
    columns = [f"{sql} AS {name_sql(name)}" for name, _, sql in features] or ["1 AS constant"]
    decisions = _DECISIONS.format(features="".join(f", {column}" for column in columns))
    ((learnable, *unused),) = _found(kept, f"WITH decisions AS ({decisions}) {_UNUSED}")
    if not learnable:
        raise ImportFailed(f"{path}: expected decisions with _label_cost, got none")
    kept.select(f"SELECT * FROM ({decisions}) WHERE {_LEARNABLE}", (FILE, ROW))
    found = {
        "observation": [name + suffix for name, suffix, _ in features] or ["constant"],
        "action": ["action"],
        "reward": ["-cost", "observed"],
        "action_prob": "probability",
        "sample_prob": "pass_prob",
        "tags": {"event_id": "event_id"} if _any(kept, "event_id") else {},
        "time": "timestamp" if _any(kept, "timestamp") else None,
    }
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


def _require_fixed_actions(kept: KeptUnit, context: str | None) -> None:
    """Raise ImportFailed for candidates with features, and for decisions of several slots."""
    for key in _CANDIDATES:
        inner = (
            f"{name_sql(key)}::JSON"
            if context is None
            else f"json_extract({context}::JSON, '/{key}')"
        )
        found = f"coalesce({inner}, {name_sql(key)}::JSON)"
        where = f"{found} IS NOT NULL"
        if key == "_multi":  # candidates without features are no more than their number
            counts = f"SELECT count(DISTINCT json_array_length({found})) FROM source"
            ((sizes,),) = _found(kept, counts)
            if sizes <= 1:
                where = (
                    f"len(list_filter(from_json({found}, '[\"JSON\"]'), lambda x: x <> '{{}}')) > 0"
                )
        query = f"SELECT {FILE}, {ROW} FROM source WHERE {where} ORDER BY {FILE}, {ROW} LIMIT 1"
        for file, row in _found(kept, query):
            raise ImportFailed(
                f"{file} row {row}: {key}: expected decisions over a fixed set of actions, "
                "got candidates of their own, which are not read yet. To import the position of "
                "the chosen one, name the columns without a format: --observation c.KEY --action "
                "_labelIndex --reward -_label_cost --action-prob _label_probability"
            )


def _features(kept: KeptUnit, roots: list[str]) -> Iterator[tuple[str, str, str]]:
    """(name, suffix of its option, SQL) of each feature; absent numbers are 0, texts _ABSENT."""
    seen: set[str] = set()
    for root in roots:
        column = f"{name_sql(root)}::JSON"
        structures = _found(kept, f"SELECT DISTINCT json_structure({column}) FROM source")
        kinds: dict[tuple[str, ...], set[str]] = {}
        for (structure,) in sorted(structures, key=str):
            for path, kind in _leaves(json.loads(structure or '"NULL"'), (root,)):
                kinds.setdefault(path, set()).add(kind)
        for path, found in kinds.items():
            name = "_".join(path[1:] or path)
            name = f"c_{name}" if name.lower() in ("", *_OWN) else name
            if name.lower() in seen:
                raise ImportFailed(f"{'.'.join(path)}: expected one feature {name}, got two")
            seen.add(name.lower())  # SQL does not distinguish cases
            pointer = "".join("/" + part.replace("~", "~0").replace("/", "~1") for part in path[1:])
            cell = f"json_extract_string({column}, {text_sql(pointer or '$')})"
            if found <= {*_NUMBERS, "BOOLEAN"}:
                numbers = f"CASE {cell} WHEN 'true' THEN '1' WHEN 'false' THEN '0' ELSE {cell} END"
                yield name, "", f"coalesce({numbers}, '0')"
            elif found == {"LIST"}:
                yield name, "", cell
            else:
                yield name, ":categories", f"coalesce(nullif({cell}, ''), {text_sql(_ABSENT)})"


def _leaves(structure: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    """(path, type) of the values in a structure, without keys that VW takes for its own."""
    if isinstance(structure, dict):
        for key, inner in structure.items():
            if not key.startswith("_"):
                yield from _leaves(inner, (*path, key))
    elif isinstance(structure, list):
        if structure[0] not in _NUMBERS:
            raise ImportFailed(
                f"{'.'.join(path)}: expected numbers or a text, got a list of others"
            )
        yield path, "LIST"
    elif structure not in ("NULL", "JSON"):  # JSON is an empty object
        yield path, structure
