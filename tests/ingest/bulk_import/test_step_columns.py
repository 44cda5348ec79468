"""Rows as columns: an import stores the same as its events would; a mask finds bad rows.

Also of `ingest.bulk_import.forms`, `ingest.columns.leaf_columns`, `ingest.columns.faults` and
`ingest.columns.step_numbers`.
"""

from __future__ import annotations

import asyncio
import random
import tracemalloc
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingest.bulk_import.arrow_stream import read_table
from ingest.bulk_import.forms import Form
from ingest.bulk_import.step_columns import BLOCK_BYTES, BLOCK_ROWS, Run, StepBlock, StepColumns
from ingest.collector.collector import Collector
from ingest.episodes.policy_rules import PolicyRules
from ingest.episodes.redaction import Redactor
from ingest.protocol import messages as wire
from ingest.protocol.errors import Refusal
from storage.declarations.declaration import PolicyDeclaration
from storage.journal.memory_journal import MemoryJournal
from storage.spaces.descriptors import (
    Box,
    Dict,
    Discrete,
    MultiBinary,
    MultiDiscrete,
    Space,
    Text,
    Tuple,
    parse_space,
)
from tests.ingest.bulk_import.test_handler import PATIENT, body, importing, steps

MIXED = Dict(
    (
        ("image", Box((2, 2), np.dtype(np.uint8))),
        ("items", parse_space("candidates:3x2")),
        ("many", MultiDiscrete((3, 4))),
        ("place", Discrete(5)),
        ("who", Text(40)),
    )
)


def columns_of(table: pa.Table, policy: PolicyDeclaration = PATIENT) -> StepColumns:
    rules = PolicyRules.of(policy)
    redaction = Redactor(b"key").of(rules)
    return StepColumns(table, Form(table.schema, rules), redaction, numbered=True)


def runs_of(block: StepBlock) -> list[Run]:
    """A block's episodes as objects."""
    return [block.run(block.runs, at) for at in range(len(block.runs))]


def block_of(table: pa.Table, policy: PolicyDeclaration = PATIENT) -> StepBlock:
    """The one block of a small table."""
    found = columns_of(table, policy)
    ((begin, end),) = found.blocks()
    return found.block(begin, end)


# --- the same as event by event -----------------------------------------------------------------

INFOS = [None, "", "{}", '{"a": 1.50, "b": {"c": "x"}}', '{"ü": [1, {"c": "\\u00e9"}]}']


def _step(draw: random.Random) -> dict[str, Any]:
    return {
        "obs.image": draw.randbytes(4),
        "obs.items": [[draw.random(), 1.0] for _ in range(draw.randrange(4))],
        "obs.many": [draw.randrange(3), draw.randrange(4)],
        "obs.place": draw.randrange(5),
        "obs.who": draw.choice(["", "a", "häß", "x" * 40]),
        "actions.0": draw.randrange(2),
        "actions.1": [draw.random() < 0.5, draw.random() < 0.5],
        "rewards": draw.gauss(0.0, 1e3),
        "infos": draw.choice(INFOS),
        "action_logp": draw.choice([None, -0.5, -20.0]),
        "policy_version": draw.choice([None, -1, 9]),
        "pass_prob": draw.choice([None, 0.1, 1.0]),
        "ts": draw.choice([None, -(2**62), 5, 2**62]),
    }


def drawn(seed: int) -> list[dict[str, Any]]:
    """A few episodes of a few steps."""
    draw = random.Random(seed)
    return [
        {
            "steps": [_step(draw) for _ in range(draw.choice([1, 1, 2, 7]))],
            "tags": draw.choice([None, "", '{"user": "u1", "z": "2"}']),
            "truncateds": draw.choice([None, True, False]),
            "final": draw.choice([None, _step(draw)]),
            "training_enabled": draw.choice([None, True, False]),
        }
        for _ in range(draw.randint(1, 4))
    ]


NUMBERS = {
    "obs.many": pa.list_(pa.int16()),
    "obs.items": pa.list_(pa.list_(pa.float64())),
    "final_obs.items": pa.list_(pa.list_(pa.float32())),
    "obs.place": pa.uint8(),
    "actions.0": pa.int32(),
    "actions.1": pa.list_(pa.bool_()),
    "obs.image": pa.binary(),
    "final_obs.many": pa.list_(pa.int64()),
    "policy_version": pa.int32(),
}


def table_of(episodes: list[dict[str, Any]]) -> pa.Table:
    rows: list[dict[str, Any]] = []
    for number, episode in enumerate(episodes):
        for step in episode["steps"]:
            final = {k.replace("obs.", "final_obs."): None for k in step if k.startswith("obs.")}
            rest = {name: episode[name] for name in ("tags", "training_enabled")}
            rows.append({"eps_id": f"e{number}", **step, **final, **rest, "truncateds": None})
        rows[-1]["truncateds"] = episode["truncateds"]
        if episode["final"] is not None:
            given = {f"final_{k}": v for k, v in episode["final"].items() if k.startswith("obs.")}
            rows[-1].update(given)
    kinds = {"tags": pa.string(), "truncateds": pa.bool_(), "training_enabled": pa.bool_()}
    kinds |= {"ts": pa.int64(), "infos": pa.string(), "action_logp": pa.float64(), **NUMBERS}
    kinds |= {"pass_prob": pa.float64(), "final_obs.who": pa.string()}
    kinds |= {"final_obs.image": pa.binary(), "final_obs.place": pa.int64()}
    names = rows[0].keys()
    return pa.table({n: pa.array([row[n] for row in rows], kinds.get(n)) for n in names})


def value_of(step: Mapping[str, Any]) -> dict[str, Any]:
    image = np.frombuffer(step["obs.image"], np.uint8).reshape(2, 2)
    return {"image": image, **{n: step[f"obs.{n}"] for n in ("items", "many", "place", "who")}}


def events_of(episodes: list[dict[str, Any]]) -> list[wire.Event]:
    """The same log as the events that its program would have sent."""
    events: list[wire.Event] = []
    for number, episode in enumerate(episodes):
        name, first = f"e{number}", episode["steps"][0]
        tags = msgspec.json.decode(episode["tags"] or "{}")
        on = episode["training_enabled"] is not False
        events.append(wire.Start(episode_id=name, tags=tags, training_enabled=on, ts=first["ts"]))
        for step in episode["steps"]:
            version, passed = step["policy_version"], step["pass_prob"]
            events.append(
                wire.LogAction(
                    episode_id=name,
                    obs=value_of(step),
                    action=[step["actions.0"], [int(bit) for bit in step["actions.1"]]],
                    reward=step["rewards"],
                    info=msgspec.json.decode(step["infos"] or "{}"),
                    action_logp=step["action_logp"],
                    policy_version=-1 if version is None else version,
                    pass_prob=1.0 if passed is None else passed,
                    ts=step["ts"],
                    replayed=True,
                )
            )
        final = None if episode["final"] is None else value_of(episode["final"])
        cut = bool(episode["truncateds"])
        events.append(wire.End(episode_id=name, obs=final, truncated=cut))
    return events


def stored(collector: Collector) -> dict[str, list[Any]]:
    """The parts of each episode, without fields that depend on the time and order of arrival."""
    found: dict[str, list[Any]] = {}
    for ready in collector.sealing._ready.values():
        for sealed in (one for item in ready.parts for one in item.split()):
            assert sealed.part is not None
            part = msgspec.structs.replace(sealed.part, ordinal=0, episode_ordinal=0)
            found.setdefault(part.episode_id, []).append(
                msgspec.structs.replace(part, infos=dict(sorted(part.infos.items())))
            )
    return found


REDACT = {
    "obs.who": "hash",
    "obs.many": "hash",
    "obs.image": "drop",
    "infos.b.c": "hash",
    "infos.ü": "drop",
    "tags.user": "hash",
}


@pytest.mark.parametrize("redact", [{}, REDACT], ids=["plain", "redacted"])
@pytest.mark.parametrize("window", [0.0, 5.0])
@pytest.mark.parametrize("seed", range(6))
def test_an_import_stores_what_its_events_would(
    redact: dict[str, str], window: float, seed: int
) -> None:
    """Parts are equal with spaces of several leaves, casts, infos, redaction and reward windows."""
    episodes = drawn(seed)
    action = Tuple((Discrete(2), MultiBinary((2,))))
    policy = replace(PATIENT, observation=MIXED, action=action, redact=redact)
    policy = replace(policy, reward_window=window, part_steps=3)

    async def main(how: str) -> dict[str, list[Any]]:
        now = 0.0
        given = {"clock": lambda: now, "wall": lambda: 77, "redaction_key": b"key"}
        async with importing(MemoryJournal(), policy, **given) as (collector, send):
            if how == "import":
                answer = await send(table_of(episodes))
                assert answer == (sum(len(e["steps"]) + 2 for e in episodes), 0, [])
            else:
                reply, _ = collector.accept(wire.Batch(events=events_of(episodes)))
                assert reply.refused == []
            now = 10.0
            collector.tick()
            return stored(collector)

    imported, logged = asyncio.run(main("import")), asyncio.run(main("events"))
    if window:  # with a window, an import makes one part, and events are cut at the end
        imported, logged = ({n: _joined(p) for n, p in s.items()} for s in (imported, logged))
    assert imported == logged


def _joined(parts: list[Any]) -> Any:
    fields = ("obs", "actions", "rewards", "ts", "action_logp", "obs_lengths")
    return [b"".join(getattr(part, name) for part in parts) for name in fields], [
        text for part in parts for text in part.infos.values()
    ]


# --- what does not fit --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("space", "values", "bad"),
    [
        (parse_space("discrete:3"), pa.array([0, 3, None, -1, 2], pa.int8()), [1, 2, 3]),
        (parse_space("discrete:3"), pa.array([0, 2**63, 1, 2, 0], pa.uint64()), [1]),
        (Box((), np.dtype(np.float32)), pa.array([0.0, 1e300, float("nan"), 1.0, 2.0]), [1, 2]),
        (Box((), np.dtype(np.uint8)), pa.array([0, 256, -1, 255, 7]), [1, 2]),
        (Box((2,)), pa.array([[0, 1], [1], None, [1, None], [1, 2, 3]]), [1, 2, 3, 4]),
        (Box((2, 1)), pa.array([[[0], [1]], [[1, 2]], [[]], [[1]], None]), [2, 3, 4]),
        (
            parse_space("candidates:2x2"),
            pa.array([[[1, 2]], [[1, 2], [3]], None, [[1, 2], [3, None]], [[1, 2]] * 3]),
            [1, 2, 3, 4],
        ),
        (Box((2,)), pa.array([b"12345678", b"1234", None, b"", b"\0" * 8]), [1, 2, 3]),
        (Box((2,), np.dtype("?")), pa.array([b"\0\1", b"\2\0", b"\1"] + 2 * [b"\1\1"]), [1, 2]),
        (MultiBinary((2,)), pa.array([[0, 1], [2, 0], [1, 1], [0], [0, 0]]), [1, 3]),
        (Text(3, min_length=1, charset="ab"), pa.array(["a", "", "c", None, "aaaa"]), [1, 2, 3, 4]),
        (Text(3), pa.array([b"a", b"\xff", b"b", "é".encode(), b"aaaa"]), [1, 4]),
        (Box((0,)), pa.array([[], [1.0], [], None, []], pa.list_(pa.float32())), [1, 3]),
        (Discrete.of(["DE", "FR"]), pa.array(["FR", "de", None, "", "DE"]), [1, 2, 3]),
        (Discrete.of(["a"], other="b"), pa.array(["a", "x", None, "b", ""]), [2]),
        (Discrete.of(["DE", "FR"]), pa.array([1, 2, None, -1, 0]), [1, 2, 3]),
    ],
)  # fmt: skip
def test_values_that_do_not_fit_are_found(space: Space, values: pa.Array, bad: list[int]) -> None:
    """Exactly those rows, each with a message, whatever type the column has."""
    policy = replace(PATIENT, observation=space)
    block = block_of(steps({f"e{n}": 1 for n in range(5)}, obs=values), policy)
    assert [row for _, _, row in block.refused] == bad
    assert [run.number for run in runs_of(block)] == sorted({*range(5)} - {*bad})
    for row in bad:
        error = block.error(row, "e")
        assert error["path"] == f"$.obs[{row}]"
        assert "expected" in error["message"]
        assert "got" in error["message"]


@pytest.mark.parametrize(
    ("space", "kind"),
    [
        (parse_space("discrete:3"), pa.float64()),
        (parse_space("discrete:3"), pa.list_(pa.int64())),
        (Box((2,)), pa.float32()),
        (Box((2,)), pa.list_(pa.list_(pa.float32()))),
        (Box((2,)), pa.list_(pa.string())),
        (Box((2,), np.dtype(np.bool_)), pa.list_(pa.int8())),
        (Text(3), pa.int8()),
        (Discrete.of(["DE", "FR"]), pa.list_(pa.string())),
        (Discrete.of(["42", "7"]), pa.int64()),
        (Discrete(2), pa.string()),
    ],
)
def test_a_column_of_another_kind_is_refused_as_a_whole(space: Space, kind: pa.DataType) -> None:
    """A column of another kind is refused before any of its values is read; a column of nulls has
    no type."""
    policy = replace(PATIENT, observation=space)
    with pytest.raises(Refusal) as refused:
        columns_of(steps({"e": 2}, obs=pa.nulls(2, kind)), policy)
    assert refused.value.path == "$.obs"
    assert [row for _, _, row in block_of(steps({"e": 2}, obs=pa.nulls(2)), policy).refused] == [0]


def test_names_are_stored_as_their_codes() -> None:
    """A column of names, as text or as a dictionary, equals that of its codes, in any leaf."""
    country = Discrete.of(["DE", "FR", "IT"], other="other")
    space = Dict((("age", Box(())), ("country", country)))
    policy = replace(PATIENT, observation=space, action=Discrete.of(["42", "7"]))
    ages = pa.array([1.0, 2.0, 3.0], pa.float32())

    def block(names: pa.Array, actions: pa.Array, last: pa.Array) -> StepBlock:
        columns = {"obs.age": ages, "obs.country": names, "actions": actions}
        finals = {"final_obs.age": ages, "final_obs.country": last}
        given = steps({"a": 2, "b": 1}, obs=None, **columns, **finals)
        return block_of(read_table(body(given)), policy)

    names, actions = pa.array(["IT", "DE", "?"]), pa.array(["7", "42", "7"])
    by_name = block(names, actions, pa.array(["FR", "FR", "IT"]))
    codes = block(pa.array([2, 0, 3]), actions.dictionary_encode(), pa.array([1, 1, 2], pa.int8()))
    by_dictionary = block(
        names.dictionary_encode(), actions.cast(pa.large_string()), pa.array(["FR", "FR", "IT"])
    )
    assert by_name.columns == codes.columns == by_dictionary.columns
    assert runs_of(by_name) == runs_of(codes) == runs_of(by_dictionary)
    assert np.frombuffer(by_name.columns["actions"], np.int64).tolist() == [1, 0, 1]


def test_an_unknown_name_is_told_with_its_row_and_column() -> None:
    country = Discrete.of(["DE", "FR"])
    policy = replace(PATIENT, observation=Dict((("country", country),)))
    table = steps({"a": 2, "b": 1}, obs=None, **{"obs.country": ["DE", "UK", "FR"]})
    block = block_of(table, policy)
    error = block.error(1, "a")
    assert error["path"] == "$.obs.country[1]"
    assert error["message"] == "Episode a: expected one of the 2 names 'DE', 'FR', got 'UK'"
    assert dict(block.sums()) == {"obs.country: expected one of the 2 names 'DE', 'FR'": 1}


def test_a_row_of_far_too_many_values_costs_nothing() -> None:
    """The values that are read are never larger than the body."""
    obs = pa.array([[0.0] * 2, [0.0] * 100_000, [0.0] * 2], pa.list_(pa.float32()))
    table = steps({"a": 1, "b": 1, "c": 1}, obs=obs)
    tracemalloc.start()
    try:
        block = block_of(table)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert [row for _, _, row in block.refused] == [1]
    assert "got 100000 values" in block.error(1, "b")["message"]
    assert peak < 2 * table.nbytes


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.data(), st.integers(1, 5))
def test_an_episode_has_the_steps_before_its_first_bad_row(
    lengths: list[int], data: st.DataObject, chunk: int
) -> None:
    """This holds for any bad rows and any chunks of the table."""
    total = sum(lengths)
    bad = data.draw(st.sets(st.integers(0, total - 1)))
    actions = pa.array([9 if row in bad else 1 for row in range(total)])
    table = steps({f"e{n}": length for n, length in enumerate(lengths)}, actions=actions)
    block = block_of(pa.Table.from_batches(table.to_batches(max_chunksize=chunk)))
    good, refused, row = [], [], 0
    for number, length in enumerate(lengths):
        first = min((b for b in bad if row <= b < row + length), default=row + length)
        if first == row:
            refused.append((number, length, row))
        else:
            good.append((number, row, first, "broken" if first < row + length else "terminated"))
        row += length
    assert [(run.number, run.begin, run.end, run.how) for run in runs_of(block)] == good
    assert block.refused == refused
    assert sum(count for _, count in block.sums()) == len(bad)
    rewards = np.frombuffer(
        block.columns_of((run.begin, run.end) for run in runs_of(block))["rewards"]
    )
    assert rewards.tolist() == [float(r) for _, a, b, _ in good for r in range(a, b)]


def test_a_bad_final_observation_keeps_all_steps() -> None:
    """The episode is broken, as its ending is unknown; an absent final observation is no error."""
    finals = pa.array([None, b"1234", None, None, b"12345678", None], pa.binary())
    block = block_of(steps({"a": 2, "b": 1, "c": 2, "d": 1}, final_obs=finals))
    runs = [(run.steps, run.how, run.final_obs) for run in runs_of(block)]
    assert runs == [
        (2, "broken", None),
        (1, "terminated", None),
        (2, "terminated", b"12345678"),
        (1, "terminated", None),
    ]
    assert block.error(1, "a")["path"] == "$.final_obs[1]"


@pytest.mark.parametrize(
    ("ended", "terminated", "truncated", "how"),
    [
        (None, None, None, "terminated"),
        (None, None, False, "terminated"),
        (None, None, True, "truncated"),
        (None, True, None, "terminated"),
        (None, True, False, "terminated"),
        (None, False, None, "truncated"),
        (None, False, True, "truncated"),
        (None, False, False, ""),
        (None, True, True, ""),
        ("terminated", None, None, "terminated"),
        ("terminated", True, False, "terminated"),
        ("terminated", False, None, ""),
        ("terminated", None, True, ""),
        ("truncated", False, True, "truncated"),
        ("truncated", True, None, ""),
        ("abandoned", None, None, "abandoned"),
        ("abandoned", False, True, "abandoned"),
        ("abandoned", None, False, ""),
        ("broken", False, True, "broken"),
        ("broken", True, True, ""),
    ],
)
def test_the_last_row_says_how_an_episode_ended(
    ended: str | None, terminated: bool | None, truncated: bool | None, how: str
) -> None:
    """By a word, by flags, or by both if they agree; otherwise it is broken and keeps its steps."""
    columns = {
        "ended": pa.array([None, ended, None], pa.string()),
        "terminateds": pa.array([None, terminated, None], pa.bool_()),
        "truncateds": pa.array([None, truncated, None], pa.bool_()),
    }
    block = block_of(steps({"a": 2, "b": 1}, **columns))
    assert [(run.steps, run.how) for run in runs_of(block)] == [
        (2, how or "broken"),
        (1, "terminated"),
    ]
    assert (runs_of(block)[0].bad is None) == bool(how)
    expected = "expected one ending from ended, terminateds, truncateds"
    assert dict(block.sums()) == ({} if how else {f"ended: {expected}": 1})
    if not how:
        message = f"Episode a: {expected}, got {ended!r}, {terminated}, {truncated}"
        error = block.error(1, "a")
        assert (error["path"], error["message"]) == ("$.ended[1]", message)


def test_an_ending_is_found_in_the_columns_that_there_are() -> None:
    """The error names these, and the row."""
    block = block_of(steps({"a": 2}, terminateds=[False, False], truncateds=[False, False]))
    expected = "expected one ending from terminateds, truncateds, got False, False"
    error = block.error(1, "")
    assert (error["path"], error["message"]) == ("$.terminateds[1]", expected)
    assert runs_of(block_of(steps({"a": 2}, terminateds=[False, False])))[0].how == "truncated"


@pytest.mark.parametrize(
    "columns",
    [
        {"ended": ["truncated", None, None]},
        {"terminateds": [True, False, True]},
        {"truncateds": [True, None, None]},
    ],
)
def test_no_episode_goes_on_after_its_end(columns: dict[str, list[Any]]) -> None:
    """An end before the last row is two episodes under one id, not one whole episode."""
    columns = {name: [None, *cells, None] for name, cells in columns.items()}
    block = block_of(steps({"a": 4, "b": 1}, **columns))
    assert [(run.steps, run.how) for run in runs_of(block)] == [(1, "broken"), (1, "terminated")]
    ((name, _),) = columns.items()
    assert block.error(1, "a")["path"] == f"$.{name}[1]"


def test_only_the_last_piece_of_a_long_episode_says_how_it_ended() -> None:
    """A piece is followed by others, whatever its last row says; its last row is no early end."""
    count = 2 * BLOCK_ROWS + 10
    ended = pa.array([None] * (count - 1) + ["abandoned"])
    found = columns_of(steps({"a": count}, ended=ended, truncateds=[*[False] * (count - 1), True]))
    runs = [run for begin, end in found.blocks() for run in runs_of(found.block(begin, end))]
    assert [run.how for run in runs] == ["", "", "abandoned"]
    assert [run.bad for run in runs] == [None] * 3


# --- blocks -------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 60_000), min_size=1, max_size=5))
def test_blocks_are_whole_episodes_or_pieces_of_one(lengths: list[int]) -> None:
    """All rows once, in order; no block has more rows than one turn may process."""
    found = columns_of(steps({f"e{n}": length for n, length in enumerate(lengths)}))
    blocks, begins = list(found.blocks()), {*found.begins.tolist(), found.rows}
    assert [begin for begin, _ in blocks] == [0, *(end for _, end in blocks[:-1])]
    assert blocks[-1][1] == found.rows
    for begin, end in blocks:
        assert 0 < end - begin <= BLOCK_ROWS
        whole = begin in begins and end in begins
        assert found.is_piece(begin, end) is not whole


def test_wide_rows_are_looked_at_a_few_at_a_time() -> None:
    """A block is also bounded in bytes; a row is never cut."""
    policy = replace(PATIENT, observation=parse_space("box:900000"))
    obs = pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(2_700_000, np.float32)), 900_000)
    found = columns_of(steps({"a": 3}, obs=obs), policy)
    assert 900_000 * 4 < BLOCK_BYTES < 2 * 900_000 * 4
    assert list(found.blocks()) == [(0, 1), (1, 2), (2, 3)]


def test_a_table_without_rows_has_no_episodes() -> None:
    found = columns_of(steps({"x": 1}).slice(0, 0))
    assert (found.count, list(found.blocks())) == (0, [])


def test_ids_by_a_dictionary_are_their_own() -> None:
    """A dictionary may have any order and any unused values."""
    ids = pa.DictionaryArray.from_arrays(pa.array([2, 2, 1]), pa.array(["x", "late", "early"]))
    block = block_of(steps({"_": 3}, eps_id=ids.cast(pa.string())))
    assert [(r.start.episode_id, r.steps) for r in runs_of(block)] == [("early", 2), ("late", 1)]


def test_rewards_of_single_precision_are_doubles_from_then_on() -> None:
    block = block_of(steps({"a": 2}, rewards=pa.array([0.5, 1.5], pa.float32())))
    assert block.columns["rewards"] == np.array([0.5, 1.5]).tobytes()
