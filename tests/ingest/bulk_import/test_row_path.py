"""Tables row by row: a window moves over the columns, and nobody can tell where it was."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingest.bulk_import.import_known import events_of
from ingest.bulk_import.row_path import (
    WHOLE_ROWS,
    WINDOW_BYTES,
    WINDOW_ROWS,
    WINDOW_VALUES,
    BulkColumns,
)
from ingest.protocol import messages as wire
from ingest.protocol.errors import Refusal
from storage.declarations.declaration import PolicyDeclaration
from storage.experience.range_set import RangeSet
from storage.spaces.descriptors import parse_space
from tests.ingest.bulk_import.test_handler import steps

POLICY = PolicyDeclaration(observation=parse_space("box:2"), action=parse_space("discrete:3"))
LONG = 3 * WINDOW_ROWS
"""Rows of an episode that goes on over several windows."""


def columns(table: pa.Table, policy: PolicyDeclaration = POLICY) -> BulkColumns:
    return BulkColumns(table, policy, numbered=True)


def names_of(lengths: list[int]) -> dict[str, int]:
    return {f"e{number}": length for number, length in enumerate(lengths)}


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 2 * WINDOW_ROWS), min_size=1, max_size=6), st.integers(1, 300))
def test_every_row_is_an_event_of_its_episode(lengths: list[int], chunk: int) -> None:
    """Whatever the lengths of episodes and chunks: each one's events, in order, with its values."""
    table = steps(names_of(lengths))
    found = columns(pa.Table.from_batches(table.to_batches(max_chunksize=chunk)))
    row = 0
    for number, (episode, length) in enumerate(zip(found.episodes(), lengths, strict=True)):
        assert (episode.number, episode.begin, episode.end) == (number, row, row + length)
        start, *actions, end = episode.events
        assert isinstance(start, wire.Start)
        assert isinstance(end, wire.End)
        assert (start.episode_id, start.start) == (f"e{number}", number)
        assert end.seq == length + 1
        for t, action in enumerate(actions):
            assert isinstance(action, wire.LogAction)
            assert (action.seq, action.reward) == (t + 1, row + t)
            assert action.obs == [2 * (row + t), 2 * (row + t) + 1]
        row += length


def test_wide_rows_are_looked_at_a_few_at_a_time() -> None:
    """A window has a bound in bytes, too; what it holds of the last row is an episode's end."""
    policy = PolicyDeclaration(
        observation=parse_space("box:9000"), action=parse_space("discrete:3")
    )
    values = np.arange(9_000 * 5, dtype=np.float32)
    obs = pa.FixedSizeListArray.from_arrays(pa.array(values), 9_000)
    assert WINDOW_BYTES < 2 * 9_000 * 4
    finals = [None, None, b"a", None, b"b"]
    table = steps({"a": 3, "b": 2}, obs=obs, final_obs=finals)
    first, second = columns(table, policy).episodes()
    for episode, final in ((first, b"a"), (second, b"b")):
        *events, end = episode.events[1:]
        for row, event in enumerate(events, episode.begin):
            assert isinstance(event, wire.LogAction)
            assert event.obs == values[9_000 * row : 9_000 * (row + 1)].tolist()
        assert isinstance(end, wire.End)
        assert end.obs["data"] == final


def lists(counts: list[int], kind: pa.DataType | None = None) -> pa.Array:
    """A list of so many values in each row."""
    return pa.array([[0.0] * count for count in counts], kind or pa.list_(pa.float32()))


@pytest.mark.parametrize(
    ("obs", "row"),
    [
        (lists([2, 100_000, 2]), 1),
        (lists([2, 2, 73], pa.large_list(pa.float32())), 2),
        (lists([100_000] * 3, pa.list_(pa.float32(), 100_000)), 0),
        (pa.array([[[0.0]], [[]] * 100_000, [[0.0]]], pa.list_(pa.list_(pa.float32()))), 1),
        (pa.array([None, [[0.0]], [[0.0] * 40] * 60], pa.list_(pa.list_(pa.float32()))), 2),
    ],
)
@pytest.mark.parametrize("name", ["obs", "final_obs"])
def test_a_row_of_far_too_many_values_is_refused_unread(obs: pa.Array, row: int, name: str) -> None:
    """Lists of them would hold up everybody; a few too many are for the space to refuse."""
    with pytest.raises(Refusal, match="expected 2 values, got") as refused:
        columns(steps({"x": 3}, **{name: obs}))
    assert refused.value.path == f"$.{name}[{row}]"
    few = lists([0, 3, 70], pa.list_(pa.float32()))
    columns(steps({"x": 3}, **{name: few})).check()


def test_rows_of_many_values_among_short_ones_are_not_looked_at_together() -> None:
    """Rows differ: a window has a bound in values beside the one in rows."""
    size = 1_000
    policy = PolicyDeclaration(
        observation=parse_space(f"box:{size}"), action=parse_space("discrete:3")
    )
    counts = [1] * 4_000 + [size] * 40 + [1] * 4_000
    found = columns(steps({"x": len(counts)}, obs=lists(counts)), policy)
    most = 0
    for row in range(len(counts)):
        found._look_at(row)
        most = max(most, sum(map(len, found._lists["obs"])))
        assert len(found._obs[row - found._begin]) == counts[row]
    assert size < most <= WINDOW_VALUES


def test_the_final_observation_has_its_place_in_a_later_piece() -> None:
    """A refusal names the last row of the episode and the column, whatever piece it comes in."""
    rows = 3 * WHOLE_ROWS
    table = steps({"x": 2, "long": rows})
    finals = pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(2 * len(table)), pa.float32()), 2)
    found = columns(table.append_column("final_obs", finals))
    *_, last = found.episodes()
    assert last.first > 0
    assert last.place(len(last.events) - 1, "obs") == f"$.final_obs[{rows + 1}]"
    assert last.place(len(last.events) - 2, "obs") == f"$.obs[{rows + 1}]"
    assert last.rest == 0


def test_known_episodes_are_left_out_and_counted() -> None:
    """The others keep their numbers."""
    found = columns(steps({"a": 3, "b": 1, "c": 2}))
    known = RangeSet.of([0, 2, 7])
    assert [episode.number for episode in found.episodes(known)] == [1]
    assert events_of(found, known) == 5 + 4


@pytest.mark.parametrize(
    ("given", "path"),
    [
        ({"t": [*range(700), 9, *range(701, LONG)]}, "$.t[700]"),
        ({"infos": [None] * 600 + ["["] + [None] * (LONG - 601)}, "$.infos[600]"),
        ({"rewards": [1.0] * 300 + [None] + [1.0] * (LONG - 301)}, "$.rewards[300]"),
        ({"policy_version": [0] * 650 + [-2] + [0] * (LONG - 651)}, "$.policy_version[650]"),
        ({"ts": [0] * (LONG - 1) + [2**62 + 1]}, f"$.ts[{LONG - 1}]"),
    ],
)
def test_what_is_no_event_is_named_by_its_row(given: dict[str, Any], path: str) -> None:
    """Also in a later window of a long episode, and behind a short one."""
    ((column, values),) = given.items()
    values = [None if column == "infos" else 0, *values]
    found = columns(steps({"short": 1, "long": LONG}, **{column: pa.array(values)}))
    name, _, row = path.rstrip("]").partition("[")
    with pytest.raises(Refusal) as refused:
        found.check()
    assert refused.value.path == f"{name}[{int(row) + 1}]"
    with pytest.raises(Refusal) as again:
        list(found.episodes())
    assert str(again.value) == str(refused.value)


@pytest.mark.parametrize(
    ("ids", "path"),
    [
        (pa.array(["a", "", "b"]), "$.eps_id[1]"),
        (pa.array(["a", "a", None]), "$.eps_id[2]"),
        (pa.array([None, "a", "a"], pa.large_string()), "$.eps_id[0]"),
        (pa.array(["a", "b", "a"]), "$.eps_id[2]"),
        (pa.array([b"a", b"a", b"b"]), "$.eps_id[0]"),
        (pa.array([1, 2, 3]), "$.eps_id[0]"),
        (pa.nulls(3), "$.eps_id[0]"),
    ],
)
def test_ids_are_texts_in_one_place_each(ids: pa.Array, path: str) -> None:
    with pytest.raises(Refusal) as refused:
        columns(steps({"x": 3}, eps_id=ids))
    assert refused.value.path == path


def test_a_table_without_rows_has_no_episodes() -> None:
    found = columns(steps({"x": 1}).slice(0, 0))
    found.check()
    assert list(found.episodes()) == []


def test_to_look_at_a_body_takes_no_memory_to_speak_of() -> None:
    """Its columns as lists, or its events, would be ten times the body."""
    table = steps({f"e{number}": 1 for number in range(10_000)})
    found = columns(table)
    tracemalloc.start()
    try:
        found.check()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2 * table.nbytes
