"""Requests are cut where episodes end, the same in every run; long episodes take several."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ingest.importing.posting as posting
from ingest.importing.episodes import WholeEpisodes
from ingest.importing.importing import import_table
from ingest.importing.posting import RequestCutter, RequestSender, row_bytes
from ingest.protocol.errors import CollectorUnavailable, ImportFailed
from tests.collector_process import CollectorProcess, declare, shard_rows

MAX_BULK = 12_000  # bytes, some hundred rows


def episodes(lengths: Sequence[int], first: int) -> WholeEpisodes:
    names = np.repeat([f"e{first + at}" for at in range(len(lengths))], lengths)
    rows = len(names)
    begins = np.cumsum([0, *lengths[:-1]])
    columns = {"eps_id": pa.array(names), "t": pa.array(np.arange(rows)), "rewards": np.ones(rows)}
    columns |= {"obs": pa.array(np.arange(rows)), "truncateds": pa.array(np.zeros(rows, bool))}
    return WholeEpisodes(pa.table(columns), begins, np.zeros(rows, int), np.arange(rows) + 1)


def requests(chunks: Sequence[Sequence[int]]) -> list[posting.Request]:
    cutter, first, found = RequestCutter(MAX_BULK), 0, []
    for lengths in chunks:
        if lengths:
            found += cutter.add(episodes(lengths, first))
        first += len(lengths)
    return [*found, *cutter.finish()]


CHUNKS = st.lists(st.lists(st.integers(1, 60) | st.just(300), max_size=8), max_size=6)


@given(CHUNKS)
def test_requests_hold_all_episodes_and_fit_a_body(chunks: list[list[int]]) -> None:
    """Whole episodes in order, numbered from 0; a long one is sent in pieces of its own."""
    found = requests(chunks)
    lengths = [length for chunk in chunks for length in chunk]
    assert [request.number for request in found] == list(range(len(found)))
    steps: Counter[str] = Counter()
    for request in found:
        table = request.episodes.table
        assert row_bytes(table).sum() <= MAX_BULK
        names = table["eps_id"].to_pylist()
        assert [names[at] for at in request.episodes.begins] == list(dict.fromkeys(names))
        steps.update(name.partition("~")[0] for name in names)
    assert steps == {f"e{at}": length for at, length in enumerate(lengths)}
    whole = [name for one in found for name in one.episodes.table["eps_id"].unique().to_pylist()]
    assert len(whole) == len(set(whole))


@given(CHUNKS)
def test_requests_are_the_same_however_rows_were_read(chunks: list[list[int]]) -> None:
    """Blocks may end anywhere: a key's content depends on the episodes alone."""
    one = requests([[length for chunk in chunks for length in chunk]])
    several = requests(chunks)
    assert [request.episodes.table["eps_id"].to_pylist() for request in one] == [
        request.episodes.table["eps_id"].to_pylist() for request in several
    ]


def test_a_long_episode_goes_on_in_another(tmp_path: Path) -> None:
    """The pieces of a long episode are truncated, name the one before, and end with the next
    observation."""
    declare(tmp_path / "root", "box:1", "discrete:2")
    count = 1_000
    table = pa.table({"x": np.arange(count), "a": [0] * count, "e": ["long"] * count})
    meaning = {"observation": ["x"], "action": "a", "reward": "x", "episode": "e"}
    options = ("--limit", "max_bulk=20000")
    with CollectorProcess(tmp_path / "root", options=options) as collector:
        first = import_table(table, address=collector.address, **meaning)
        again = import_table(table, address=collector.address, **meaning)
        assert collector.stop() == 0
    assert (first.steps, again.steps, again.rows_known) == (count, 0, count)
    rows = sorted(shard_rows(tmp_path / "root"), key=lambda row: row["rewards"])
    assert [row["obs"].tolist() for row in rows] == [[float(n)] for n in range(count)]
    ends = [row for row in rows if row["truncateds"] or row["terminateds"]]
    assert [row["ended"] for row in ends] == ["truncated"] * (len(ends) - 1) + ["terminated"]
    assert len(ends) > 2
    for before, after in pairwise(ends):
        assert after["continues"] == before["eps_id"]
        assert before["final_obs"].tolist() == [before["rewards"] + 1]


def test_other_rows_under_a_name_are_refused(tmp_path: Path) -> None:
    """A query that returns other rows the second time must not lose or double rows."""
    declare(tmp_path / "root", "box:1", "discrete:2")
    meaning = {"observation": ["x"], "action": "a", "reward": "x", "name": "mine"}
    with CollectorProcess(tmp_path / "root") as collector:
        meaning["address"] = collector.address
        table = pa.table({"x": [1.0, 2.0], "a": [0, 1]})
        assert import_table(table, **meaning).steps == 2
        more = pa.table({"x": [1.0, 2.0, 3.0], "a": [0, 1, 1]})
        grown = import_table(more, **meaning)
        assert (grown.steps, grown.rows_known) == (1, 2)
        with pytest.raises(ImportFailed, match="knows this import with other rows"):
            import_table(table.slice(1), **meaning)


def test_what_the_collector_refuses_is_named(tmp_path: Path) -> None:
    """An episode that exists already, from another source."""
    declare(tmp_path / "root", "box:1", "discrete:2")
    meaning = {"observation": ["x"], "action": "a", "reward": "x", "episode": "e", "name": "mine"}
    with CollectorProcess(tmp_path / "root") as collector:
        meaning["address"] = collector.address
        table = pa.table({"x": [1.0, 2.0, 3.0], "a": [0, 1, 1], "e": ["A", "A", "B"]})
        name = import_table(table, check=True, **meaning).name
        taken = f"{name.removeprefix('import-')[:12]}-A"
        assert collector.post("/v1/episodes", {"episode_id": taken})[0] == 201
        report = import_table(table, **meaning)
        assert (report.rows, report.steps, report.rows_left_out) == (3, 1, 2)
        (bad,) = report.bad
        assert (bad.source, bad.row, bad.episode) == ("table", 1, taken)
        assert sum(report.bad_counts.values()) == 1


def decisions(count: int, first: float = 0.0) -> pa.Table:
    """Episodes of one step, whose reward is their number from `first` on."""
    numbers = first + np.arange(count)
    return pa.table({"x": numbers, "a": [0] * count})


def test_nothing_follows_a_refused_request(tmp_path: Path) -> None:
    """Other rows under a known name: none is stored, though later requests have new keys."""
    declare(tmp_path, "box:1", "discrete:2")
    meaning = {"observation": ["x"], "action": "a", "reward": "x", "name": "shop"}
    with CollectorProcess(tmp_path, options=("--limit", "max_bulk=20000")) as collector:
        assert import_table(decisions(50), address=collector.address, **meaning).steps == 50
        with pytest.raises(ImportFailed, match="other rows"):
            import_table(decisions(3_000, 10_000.0), address=collector.address, **meaning)
        assert collector.stop() == 0
    assert sorted(row["rewards"] for row in shard_rows(tmp_path)) == list(range(50))


def test_an_import_that_lost_a_request_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The collector was away for one request: the same import stores it, and those behind it."""
    declare(tmp_path, "box:1", "discrete:2")
    meaning = {"observation": ["x"], "action": "a", "reward": "x"}
    post, sent = RequestSender._post, []

    def away_once(self: RequestSender, body: bytes, headers: dict[str, str]) -> Any:
        sent.append(headers["Idempotency-Key"])
        if len(sent) == 2:
            raise CollectorUnavailable("away")
        return post(self, body, headers)

    monkeypatch.setattr(RequestSender, "_post", away_once)
    with CollectorProcess(tmp_path, options=("--limit", "max_bulk=20000")) as collector:
        with pytest.raises(CollectorUnavailable, match="away"):
            import_table(decisions(2_000), address=collector.address, **meaning)
        assert len(sent) == 2
        done = import_table(decisions(2_000), address=collector.address, **meaning)
        assert done.rows_known + done.steps == 2_000
        assert done.steps > 0
        assert collector.stop() == 0
    assert sorted(row["rewards"] for row in shard_rows(tmp_path)) == list(range(2_000))
