"""Import: each usable row of a log is in the shards exactly once; every other row is named.

Also of `ingest.importing.categories`, `ingest.importing.episodes`, `ingest.importing.inference`,
`ingest.importing.options`, `ingest.importing.report` and `ingest.importing.values`.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ingest.importing.categories import Categories, known_categories
from ingest.importing.importing import import_table, run_import
from ingest.importing.inference import infer_spaces
from ingest.importing.options import ImportOptions
from ingest.importing.posting import RequestSender
from ingest.importing.readers import Blocks
from ingest.importing.report import ImportReport, Seen
from ingest.importing.sources import open_source
from ingest.protocol.errors import CollectorUnavailable, ImportFailed
from storage.declarations.declaration import PolicyDeclaration
from storage.declarations.policy_files import save_declaration
from storage.errors import NothingYet
from storage.spaces.descriptors import Box, Dict, Discrete, MultiDiscrete, Text
from tests.collector_process import CollectorProcess, declare, shard_rows

BANDIT: dict[str, Any] = {
    "observation": ("x", "y"),
    "action": "a",
    "reward": "r",
    "action_prob": "p",
}


def rows_of(count: int) -> list[dict[str, Any]]:
    """A bandit's log with a different reward in each row."""
    return [
        {"x": i / 8, "y": -float(i), "a": i % 2, "r": float(i), "p": 0.25 + i % 2 / 2}
        for i in range(count)
    ]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    return path


@pytest.fixture
def collector(tmp_path: Path) -> Iterator[CollectorProcess]:
    root = tmp_path / "root"
    declare(root, "box:2", "discrete:2")
    with CollectorProcess(root) as running:
        yield running


def stored(collector: CollectorProcess) -> list[dict[str, Any]]:
    """All rows, once everything is sealed."""
    assert collector.stop() == 0
    return shard_rows(collector.root)


def accounts_for_every_row(report: ImportReport) -> bool:
    apart = report.rows_known + report.rows_left_out + report.rows_dropped
    return report.rows == report.steps + apart


# --- what arrives ----------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
def test_every_row_becomes_an_episode_of_one_step(
    suffix: str, collector: CollectorProcess, tmp_path: Path
) -> None:
    """Observation, action, reward, propensity, time and tags of each row are stored as given."""
    rows = [row | {"at": 1_700_000_000_000_000 + i} for i, row in enumerate(rows_of(50))]
    options = ImportOptions(
        source=write(tmp_path / f"log.{suffix}", rows),
        address=collector.address,
        time="at",
        tags={"arm": "a"},
        **BANDIT,
    )
    report = run_import(options)
    assert (report.rows, report.episodes, report.steps, report.bad) == (50, 50, 50, [])
    found = sorted(stored(collector), key=lambda row: row["rewards"])
    assert len(found) == 50
    for row, sent in zip(found, rows, strict=True):
        assert row["obs"].tolist() == [sent["x"], sent["y"]]
        assert (row["actions"], row["rewards"]) == (sent["a"], sent["r"])
        assert row["action_logp"] == math.log(sent["p"])
        assert (row["ts"], row["source"], row["ended"]) == (sent["at"], "replayed", "terminated")
        assert json.loads(row["tags"]) == {"arm": str(sent["a"])}
    assert len({row["eps_id"] for row in found}) == 50


def test_a_second_run_adds_nothing_but_another_file_or_meaning_does(
    collector: CollectorProcess, tmp_path: Path
) -> None:
    """An import is identified by its content and its columns' meaning, wherever the file is."""
    path = write(tmp_path / "log.csv", rows_of(20))
    options = ImportOptions(source=path, address=collector.address, **BANDIT)
    first, again = run_import(options), run_import(options)
    moved = dataclasses.replace(options, source=path.rename(tmp_path / "moved.csv"))
    third = run_import(moved)
    assert (first.steps, again.steps, again.skipped_known, third.skipped_known) == (20, 0, 20, 20)
    assert first.name == again.name == third.name
    fourth = run_import(dataclasses.replace(moved, policy_id="default"))
    assert (fourth.name, fourth.skipped_known) == (first.name, 20), "the only policy may be named"
    assert accounts_for_every_row(again)
    other = dataclasses.replace(moved, action_prob=None)
    further = run_import(other)
    assert (further.steps, further.name == first.name) == (20, False)
    assert len(stored(collector)) == 40


@pytest.mark.parametrize("episode", [None, "e"])
def test_a_file_that_grows_or_changes_its_format_adds_new_rows_under_its_name(
    collector: CollectorProcess, tmp_path: Path, episode: str | None
) -> None:
    """With `name` the rows are known; without it they belong to another import, and are stored
    again.
    """
    rows = [row | {"e": f"{at // 2:03d}"} for at, row in enumerate(rows_of(60))]
    options = ImportOptions(
        source="", address=collector.address, name="shop", episode=episode, **BANDIT
    )
    runs = [("log.csv", 40), ("log.csv", 60), ("log.parquet", 60)]
    reports = [
        run_import(dataclasses.replace(options, source=write(tmp_path / name, rows[:count])))
        for name, count in runs
    ]
    assert [report.steps for report in reports] == [40, 20, 0]
    bare = dataclasses.replace(options, source=tmp_path / "log.parquet", name=None)
    assert run_import(bare).steps == 60


@pytest.mark.parametrize("episode", [None, "e"])
def test_periods_share_a_log_without_a_row_twice(
    collector: CollectorProcess, tmp_path: Path, episode: str | None
) -> None:
    """An episode belongs to the period in which it began, in whatever order and how often periods
    are imported, also after the log has grown; an empty period is nothing yet."""
    rows = [row | {"e": f"{at // 4}", "t": at} for at, row in enumerate(rows_of(40))]
    options = ImportOptions(
        source=write(tmp_path / "log.csv", rows[:28]),
        address=collector.address,
        name="shop",
        episode=episode,
        time="t",
        time_unit="s",
        **BANDIT,
    )
    seconds = 1_000_000
    first = dataclasses.replace(options, until=10 * seconds)
    later = dataclasses.replace(options, since=10 * seconds, until=30 * seconds)
    steps = [run_import(one).steps for one in (later, first, later)]
    assert steps == ([18, 10, 0] if episode is None else [16, 12, 0])
    write(tmp_path / "log.csv", rows)
    assert [run_import(one).steps for one in (first, later)] == [0, 2 if episode is None else 4]
    with pytest.raises(NothingYet):
        run_import(dataclasses.replace(options, since=90 * seconds))
    assert len(stored(collector)) == (30 if episode is None else 32)


def test_other_options_under_a_name_are_refused(
    collector: CollectorProcess, tmp_path: Path
) -> None:
    """Other options make other rows of the same source. Under the same name they are refused
    instead of being added."""
    path = write(tmp_path / "log.csv", [row | {"e": "one"} for row in rows_of(20)])
    options = ImportOptions(source=path, address=collector.address, name="shop", **BANDIT)
    assert run_import(options).steps == 20
    for other in ({"action_prob": None}, {"tags": {"arm": "a"}}, {"episode": "e"}):
        changed = dataclasses.replace(options, **other)
        with pytest.raises(ImportFailed, match=r"its options.*another name all of its rows"):
            run_import(changed)
    same = dataclasses.replace(options, default={"x": "0"})  # no empty cells: the same rows
    assert run_import(same).rows_known == 20
    assert run_import(dataclasses.replace(changed, name="shop as one episode")).steps == 20
    assert len(stored(collector)) == 40


def test_the_mean_of_many_times_lies_between_them() -> None:
    """The sum of a few thousand microseconds since 1970 exceeds int64."""
    seen, now = Seen(), 1_793_491_200_000_000
    seen.add(np.full(10_000, now))
    assert seen.to_dict() == {"count": 10_000, "low": now, "mean": now, "high": now}


def test_an_interrupted_import_tells_what_is_acknowledged(
    collector: CollectorProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Repeating the import finds exactly these rows, and adds the rest."""
    monkeypatch.setattr("ingest.importing.posting.ROWS", 10)
    monkeypatch.setattr("ingest.importing.sources.BLOCK_ROWS", 20)

    def interrupt(report: ImportReport) -> None:
        if report.rows >= 40:
            raise KeyboardInterrupt

    table = pa.Table.from_pylist(rows_of(60))
    options = ImportOptions(source=table, address=collector.address, **BANDIT)
    with pytest.raises(KeyboardInterrupt) as interrupted:
        run_import(options, on_report=interrupt)
    again = run_import(options)
    assert (again.steps, again.rows_known) == (20, 40)
    (note,) = interrupted.value.__notes__
    assert note == (
        "40 rows are acknowledged, more may be stored; "
        "the same command continues and adds none twice"
    )


def test_a_collector_that_stops_answering_leaves_the_rest_to_the_next_run(
    collector: CollectorProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error says how many rows are acknowledged; repeating the import adds the others."""
    monkeypatch.setattr("ingest.importing.posting.ROWS", 10)
    post = RequestSender._post

    def unanswered(sender: RequestSender, body: bytes, headers: dict[str, str]) -> Any:
        if headers["Idempotency-Key"].endswith(":3"):
            raise CollectorUnavailable("HTTP 507", maybe_applied=False)
        return post(sender, body, headers)

    table = pa.Table.from_pylist(rows_of(60))
    with monkeypatch.context() as planted:
        planted.setattr(RequestSender, "_post", unanswered)
        with pytest.raises(CollectorUnavailable) as failed:
            import_table(table, address=collector.address, **BANDIT)
    assert str(failed.value) == (
        "HTTP 507; 30 rows are acknowledged, more may be stored; "
        "the same command continues and adds none twice"
    )
    again = import_table(table, address=collector.address, **BANDIT)
    assert (again.rows_known, again.steps) == (30, 30)


def test_an_interrupted_import_sends_no_request_again(
    collector: CollectorProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an interrupt, a request without an answer is given up, and its failure does not hide
    the interrupt."""
    monkeypatch.setattr("ingest.importing.posting.ROWS", 10)
    monkeypatch.setattr("ingest.importing.sources.BLOCK_ROWS", 20)
    post = RequestSender._post

    def unanswered(sender: RequestSender, body: bytes, headers: dict[str, str]) -> Any:
        if not headers["Idempotency-Key"].endswith(":3"):
            return post(sender, body, headers)
        sender._transport.closing.wait(60)
        raise CollectorUnavailable("no answer", maybe_applied=False)

    def interrupt(report: ImportReport) -> None:
        if report.rows >= 40:
            raise KeyboardInterrupt

    table = pa.Table.from_pylist(rows_of(60))
    options = ImportOptions(source=table, address=collector.address, **BANDIT)
    with monkeypatch.context() as planted:
        planted.setattr(RequestSender, "_post", unanswered)
        with pytest.raises(KeyboardInterrupt) as interrupted:
            run_import(options, on_report=interrupt)
    (note,) = interrupted.value.__notes__
    assert note.startswith("30 rows are acknowledged, more may be stored; ")
    assert run_import(options).rows_known == 30


def test_rows_of_an_episode_may_lie_anywhere_and_are_ordered_by_time(
    collector: CollectorProcess, tmp_path: Path
) -> None:
    """Interleaved rows are grouped; t follows the time column; the last row gives the ending."""
    rows = [
        {"e": name, "at": at, "x": 0, "y": at, "a": 0, "r": at, "p": 1, "end": at == 3}
        for at, name in [(2, "A"), (1, "B"), (3, "B"), (1, "A"), (1, "C"), (2, "B"), (3, "A")]
    ]
    rows[4]["end"] = False  # C was cut off
    options = ImportOptions(
        source=write(tmp_path / "log.csv", rows),
        address=collector.address,
        episode="e",
        time="at",
        terminated="end",
        **BANDIT,
    )
    report = run_import(options)
    assert (report.episodes, report.steps) == (3, 7)
    assert run_import(options).skipped_known == 3
    found = stored(collector)
    by_id: dict[str, list[Any]] = {}
    for row in sorted(found, key=lambda row: row["t"]):
        by_id.setdefault(row["eps_id"].rpartition("-")[2], []).append(row)
    assert {name: [row["rewards"] for row in part] for name, part in by_id.items()} == {
        "A": [1, 2, 3],
        "B": [1, 2, 3],
        "C": [1],
    }
    endings = {name: part[-1]["ended"] for name, part in by_id.items()}
    assert endings == {"A": "terminated", "B": "terminated", "C": "truncated"}


# --- bad rows --------------------------------------------------------------------------------


def test_a_bad_row_is_named_counted_and_stops_nothing(
    collector: CollectorProcess, tmp_path: Path
) -> None:
    """Each fault names the file, the row and the column; the other rows arrive."""
    path = tmp_path / "log.csv"
    path.write_text(
        'note,x,y,a,r,p\n"two\nlines",1,1,0,1,0.5\nb,one,1,0,1,0.5\nc,1,1,5,1,0.5\n'
        "d,1,1,0,1,1.5\ne,1,1\nf,1,nan,0,1,0.5\ng,1,1,0,,0.5\nh,1,1,0,1,-1\ni,1,1,1,2,0.5\n"
    )
    report = run_import(ImportOptions(source=path, address=collector.address, **BANDIT))
    assert (report.rows, report.steps, report.rows_left_out) == (9, 2, 7)
    assert accounts_for_every_row(report)
    assert [(bad.source, bad.row) for bad in report.bad] == [("log.csv", i) for i in range(2, 9)]
    reasons = [bad.reason for bad in report.bad]
    assert reasons[0] == "column x: expected a number, got 'one'"
    assert reasons[1].startswith("action: expected ")
    assert reasons[2].startswith("action_prob: expected a number in (0, 1], got 1.5; logarithms")
    assert reasons[3] == "row: expected 6 fields, got 3"
    assert reasons[4].startswith("observation: expected finite ")
    assert reasons[5] == "column r: expected a number, got nothing"
    assert report.bad_counts["action_prob: expected a number in (0, 1]"] == 2
    assert sum(report.bad_counts.values()) == 7
    assert sorted(row["rewards"] for row in stored(collector)) == [1, 2]


def test_a_bad_row_leaves_its_whole_episode_out(
    collector: CollectorProcess, tmp_path: Path
) -> None:
    """No part of an episode with a gap is stored; the faulty row and its episode are named."""
    rows = [
        {"e": name, "x": 0, "y": 0, "a": 0, "r": r, "p": 1}
        for name, r in [("A", 1), ("A", "?"), ("A", 3), ("B", 4), ("B", 5), ("", 6)]
    ]
    options = ImportOptions(
        source=write(tmp_path / "log.csv", rows),
        address=collector.address,
        episode="e",
        bad_shown=1,
        **BANDIT,
    )
    report = run_import(options)
    assert (report.rows, report.steps, report.rows_left_out) == (6, 2, 4)
    assert len(report.bad) == 1
    assert sum(report.bad_counts.values()) == 2
    (bad,) = report.bad
    assert (bad.source, bad.row) == ("log.csv", 2)
    assert (bad.episode or "").endswith("-A")
    assert accounts_for_every_row(run_import(options))
    assert sorted(row["rewards"] for row in stored(collector)) == [4, 5]


ODD = [b"a", b"b", b"\xff", b"d"]


def odd_source(how: str, path: Path) -> Any:
    """Four rows of two episodes; the texts of the third row are not UTF-8."""
    texts = pa.array(ODD, pa.binary())
    columns: dict[str, Any] = {
        "binary": texts,
        "large": texts.cast(pa.large_binary()),
        "view": texts.cast(pa.binary_view()),
        "fixed": pa.array(ODD, pa.binary(1)),
        "dictionary": texts.dictionary_encode(),
        "string": pa.StringArray.from_buffers(4, *texts.buffers()[1:]),
    }
    usual = {"e": [1, 1, 2, 2], "x": [0.5] * 4, "a": [0, 1] * 2, "r": [1.0] * 4}
    if how == "csv":
        rows = [b"%d,0.5,%d,1,%s\n" % (1 + row // 2, row % 2, ODD[row]) for row in range(4)]
        path.with_suffix(".csv").write_bytes(b"e,x,a,r,t\n" + b"".join(rows))
        return path.with_suffix(".csv")
    table = pa.table({**usual, "t": columns.get(how, texts)})
    if how == "parquet":
        pq.write_table(table, path.with_suffix(".parquet"))
        return path.with_suffix(".parquet")
    return table.to_reader() if how == "reader" else table


@pytest.mark.parametrize(
    "how",
    ["csv", "parquet", "reader", "binary", "large", "view", "fixed", "dictionary", "string"],
)
def test_a_text_that_is_not_utf_8_leaves_its_episode_out(how: str, tmp_path: Path) -> None:
    """Wherever it comes from, and whatever it is used as; the other episodes are whole."""
    known = {"observation": ["x"], "action": "a", "reward": "r", "address": "http://127.0.0.1:9"}
    known |= {"timeout": 0.1, "check": True, "name": "mine"}
    reason = "column t: expected UTF-8"
    for use in (
        {"tags": {"k": "t"}},
        {"infos": {"k": "t"}},
        {"observation": ["x", "t:categories"]},
    ):
        source = odd_source(how, tmp_path / "log")
        report = import_table(source, **{**known, "episode": "e", **use})
        assert (report.rows, report.steps, report.rows_left_out) == (4, 2, 2)
        assert report.bad_counts == {reason: 1}
        (bad,) = report.bad
        assert (bad.row, bad.reason) == (3, f"{reason}, got other bytes")
        assert (bad.episode or "").endswith("-2")
    report = import_table(odd_source(how, tmp_path / "log"), **known, tags={"k": "t"})
    assert (report.steps, report.bad_counts) == (3, {reason: 1})


def test_a_key_that_is_not_utf_8_is_not_a_missing_one() -> None:
    """It gets no default: another episode would have its row."""
    table = {"e": pa.array([b"a", b"\xff", None, b"a"])}
    found = checked(table, episode="e", default={"e": "none"})
    assert (found.episodes, found.steps) == (2, 3)
    assert found.bad_counts == {"column e: expected UTF-8": 1}


def test_an_end_before_the_last_row_is_a_fault(collector: CollectorProcess, tmp_path: Path) -> None:
    """An episode that continues after its end is two episodes under one name."""
    rows = [{"e": 1, "x": 0, "y": 0, "a": 0, "r": 1, "p": 1, "end": end} for end in (1, 0)]
    path = write(tmp_path / "log.jsonl", rows)
    report = run_import(
        ImportOptions(
            source=path, address=collector.address, episode="e", terminated="end", **BANDIT
        )
    )
    assert report.bad_counts == {"row: expected an end only on the last row of its episode": 1}
    assert (report.bad[0].row, report.rows_left_out, report.steps) == (1, 2, 0)


# --- rules for data --------------------------------------------------------------------------


def checked(table: dict[str, Any], **meaning: Any) -> ImportReport:
    """The result of an import without a collector, for a table with a reward r and an action a."""
    rows = len(next(iter(table.values())))
    usual = {"x": [0.5] * rows, "a": [n % 2 for n in range(rows)], "r": [1.0] * rows}
    whole = pa.table({**usual, **table})
    known = {"observation": ["x"], "action": "a", "reward": "r", "address": "http://127.0.0.1:9"}
    return import_table(whole, check=True, **{**known, "timeout": 0.1, **meaning})


def test_several_columns_of_rewards_are_added_up() -> None:
    """A row's reward is the sum of its reward columns; a missing one is a fault unless it has a
    default."""
    table = {"click": [1.0, None, 0.5], "margin": [2.0, 3.0, -1.0]}
    report = checked(table, reward=["click", "margin"])
    assert report.bad_counts == {"column click: expected a number": 1}
    report = checked(table, reward=["click", "margin"], default={"click": "0"})
    rewards = report.understood["rewards"]
    assert (rewards["count"], rewards["low"], rewards["high"]) == (3, -0.5, 3.0)


def test_rewards_in_another_order_make_the_same_import() -> None:
    """The sum is the same number too: 0.1 + 0.2 + 0.3 depends on the order of the columns."""
    table = {"b": [0.1], "c": [0.2], "d": [0.3], "e": [0.4]}
    reports = [checked(table, reward=list(order)) for order in ("bcd", "dcb", "bce")]
    first, second, other = ((report.name, report.understood["rewards"]) for report in reports)
    assert first == second
    assert first[0] != other[0]


@pytest.mark.parametrize(
    ("action", "space", "prob"),
    [
        ([1, 2, 4, 3], "discrete", 1 / 4),
        ([[0, 1], [1, 2], [0, 0], [1, 1]], "multi_discrete", 1 / 9),
    ],
)
def test_a_declared_uniform_policy_is_the_propensity(
    action: list[Any], space: str, prob: float
) -> None:
    """Every action of the space was equally likely, including those that the log lacks."""
    report = checked({"a": action}, uniform=True)
    seen = report.understood["propensities"]
    assert report.understood["spaces"]["action"]["kind"] == space
    assert seen["low"] == pytest.approx(prob) == pytest.approx(seen["high"])


@pytest.mark.parametrize("option", ["action_prob", "action_logp"])
@pytest.mark.parametrize("column", [[True, False], ["True", "false"]])
def test_a_boolean_is_no_propensity(option: str, column: list[Any]) -> None:
    """True would be 1, or a logarithm of False 0: a mistaken column is a fault in every row."""
    report = checked({"p": column}, **{option: "p"})
    assert report.bad_counts == {"column p: expected a number": 2}


def test_nothing_is_uniform_on_a_box_without_bounds() -> None:
    with pytest.raises(ImportFailed, match="uniform: expected a discrete action space"):
        checked({"a": [0.5, 1.5]}, uniform=True)


@pytest.mark.parametrize(
    ("steps", "rows", "bad"),
    [
        ([2, 0, 1], 3, {}),
        ([1, 2, 3], 3, {}),
        ([0, 2, 3], 0, {"column t: expected no gap or repeat": 1}),
        ([0, 1, 1], 0, {"column t: expected no gap or repeat": 1}),
        ([2, 3, 4], 0, {"column t: expected no gap or repeat": 1}),
        ([0, None, 1], 0, {"column t: expected a number": 1}),
    ],
)
def test_steps_of_an_episode_are_in_order_and_without_gaps(
    steps: list[int | None], rows: int, bad: dict[str, int]
) -> None:
    """Steps of an episode that are out of order or have gaps are a fault; other episodes are
    unchanged."""
    table = {"t": [*steps, 0], "e": ["A"] * 3 + ["B"]}
    report = checked(table, episode="e", step="t")
    assert (report.steps, report.bad_counts) == (rows + 1, bad)


def test_times_that_fall_along_the_steps_are_a_fault() -> None:
    """One of the two columns is wrong."""
    table = {"t": [0, 1, 2], "at": [5, 7, 6], "e": [1, 1, 1]}
    report = checked(table, episode="e", step="t", time="at")
    assert report.bad_counts == {"column at: expected times in the order of t": 1}


def test_a_dropped_row_leaves_its_episode(collector: CollectorProcess) -> None:
    """The rest of the episode is kept; the report counts the row apart from faults."""
    table = pa.table(
        {
            "e": ["A", "A", "A", "B"],
            "x": [1.0, None, 3.0, 4.0],
            "y": [0.0] * 4,
            "a": [0] * 4,
            "r": [1.0, 2.0, 3.0, 4.0],
            "end": [False, False, True, True],
        }
    )
    report = import_table(
        table,
        observation=["x", "y"],
        action="a",
        reward="r",
        episode="e",
        terminated="end",
        missing="drop",
        address=collector.address,
    )
    assert (report.steps, report.rows_dropped, report.rows_left_out, report.bad) == (3, 1, 0, [])
    assert accounts_for_every_row(report)
    found = sorted((row["t"], row["rewards"]) for row in stored(collector))
    assert found == [(0, 1), (0, 4), (1, 3)]


def test_tags_and_keys_of_any_text_arrive(collector: CollectorProcess) -> None:
    """Quotes, line ends and characters that are special in paths; a missing tag is absent."""
    texts = ['say "hi"', "back\\slash", "line\nend", "a/b", None, "ünï"]
    rows = range(len(texts))
    table = {
        "x": list(rows),
        "y": [0] * 6,
        "a": [0] * 6,
        "r": list(rows),
        "e": texts,
        "n": [7.0] * 6,
    }
    report = import_table(
        pa.table(table),
        observation=["x", "y"],
        action="a",
        reward="r",
        episode="e",
        default={"e": "none"},
        tags={"text": "e", "number": "n"},
        address=collector.address,
    )
    assert (report.steps, report.bad) == (6, [])
    found = {row["rewards"]: row for row in stored(collector)}
    assert [json.loads(found[at]["tags"]) for at in rows] == [
        {"text": text or "none", "number": "7"} for text in texts
    ]
    ids = [found[at]["eps_id"].partition("-")[2] for at in rows]
    assert ids[1] == texts[1]
    assert ids[4:] == ["none", "ünï"]
    assert not any("/" in name or "\n" in name for name in ids)


def test_infos_without_numbers_arrive_as_null(collector: CollectorProcess) -> None:
    """NaN and infinity, which JSON lacks: in a list as null, alone as no key at all."""
    nan = float("nan")
    table = {"x": [0.0] * 3, "y": [0.0] * 3, "a": [0] * 3, "r": [1.0, 2.0, 3.0]}
    table |= {"list": [[1.0, nan], [nan], None], "alone": [1.5, nan, 2.5]}
    report = import_table(
        pa.table(table),
        observation=["x", "y"],
        action="a",
        reward="r",
        infos={"list": "list", "alone": "alone"},
        address=collector.address,
    )
    assert (report.steps, report.bad) == (3, [])
    found = sorted(stored(collector), key=lambda row: row["rewards"])
    assert [json.loads(row["infos"]) for row in found] == [
        {"list": [1.0, None], "alone": 1.5},
        {"list": [None]},
        {"alone": 2.5},
    ]


@pytest.mark.parametrize("first", ["csv", "jsonl"])
def test_infos_of_json_stay_as_they_are_beside_a_csv(
    collector: CollectorProcess, tmp_path: Path, first: str
) -> None:
    """True, lists and whole numbers of any size are no texts, whichever file is read first."""
    values = [True, "true", [1, {"k": None}], 2**63 + 1, "007", "5"]
    rows = [
        {"e": f"j{at}", "x": 0, "y": 0, "a": 0, "r": at, "note": value}
        for at, value in enumerate(values)
    ]
    folder = tmp_path / "log"
    folder.mkdir()
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / ("2.jsonl" if first == "csv" else "1.jsonl")).write_text(lines)
    text = "e,x,y,a,r,note\nc,0,0,0,9,true\n"
    (folder / ("1.csv" if first == "csv" else "2.csv")).write_text(text)
    report = import_table(
        folder,
        observation=["x", "y"],
        action="a",
        reward="r",
        episode="e",
        dedupe=["e"],
        infos={"note": "note"},
        address=collector.address,
    )
    assert (report.steps, report.bad) == (7, [])
    found = {row["rewards"]: json.loads(row["infos"])["note"] for row in stored(collector)}
    assert found == {**dict(enumerate([*values[:-1], 5])), 9: "true"}


def test_spaces_of_several_leaves_are_filled_by_name(tmp_path: Path) -> None:
    """A Dict takes a column for each of its names, one of which may be text or a list."""
    space = Dict((("words", Text(8)), ("kind", Discrete(2)), ("size", Box((2,)))))
    rules = {"observation": space, "action": Discrete(2), "seal_seconds": 0.2}
    save_declaration(tmp_path / "root", PolicyDeclaration(**rules))
    table = {"words": ["ab", "too long to fit", "c"], "kind": ["u", "v", "v"], "a": [0, 1, 0]}
    table |= {"size": [[1.0, 2.0], [1.0, 2.0], [3.0, 4.0]], "r": [1.0, 2.0, 3.0]}
    with CollectorProcess(tmp_path / "root") as collector:
        report = import_table(
            pa.table(table),
            observation=["size", "words", "kind:categories"],
            action="a",
            reward="r",
            categories=tmp_path / "codes.json",
            address=collector.address,
        )
        reason = "observation.words: expected a string of 0 to 8 characters"
        assert report.bad_counts == {reason: 1}
        found = sorted(stored(collector), key=lambda row: row["rewards"])
    sizes = [row["obs__size"].tolist() for row in found]
    named = [(row["obs__words"], row["obs__kind"]) for row in found]
    assert named == [("ab", 0), ("c", 1)]
    assert sizes == [[1, 2], [3, 4]]


@pytest.mark.parametrize("tags", [{"c": "c"}, {"c": "c", "d": "d"}])
def test_tags_may_be_missing_in_all_rows_of_a_block(tags: dict[str, str]) -> None:
    """Tags may be missing in all rows of a block, for example in a folder whose partition has no
    value."""
    none = pa.array([None, None], pa.string())
    table = {"x": [1.0, 2.0], "a": [0, 1], "r": [0.0, 1.0], "c": none, "d": none}
    assert checked(table, tags=tags).bad_counts == {}
    assert checked(table, infos=tags).steps == 2


def test_a_late_key_of_json_lines_is_a_column(tmp_path: Path) -> None:
    """A sparse reward may first occur late in the file."""
    rows = [{"x": 0.5, "a": 0} for _ in range(3_000)] + [{"x": 0.5, "a": 0, "r": 1.0}]
    path = write(tmp_path / "log.jsonl", rows)
    given = {"observation": ["x"], "action": "a", "reward": "r", "missing": "value"}
    report = import_table(path, check=True, address="http://127.0.0.1:9", timeout=0.1, **given)
    assert (report.steps, report.understood["rewards"]["mean"] > 0) == (3_001, True)


def test_a_text_that_is_no_name_is_refused_by_its_column() -> None:
    """An empty one."""
    log = pa.table({"x": ["", "b"], "a": [0, 1], "r": [1.0, 2.0]})
    given = {"observation": ["x:categories"], "action": "a", "reward": "r"}
    with pytest.raises(ImportFailed, match=r"column x: .* as names, got ''"):
        infer_spaces(ImportOptions(source=log, **given))


def test_options_that_make_no_sense_are_refused() -> None:
    """The error comes before any file is read."""
    table = {"x": [1.0]}
    for meaning, text in (
        ({"action_prob": "x", "uniform": True}, "one of action_prob, action_logp and uniform"),
        ({"step": "x"}, "step: expected an episode column"),
        ({"missing": "maybe"}, "missing: expected error, drop or value"),
        ({"time_unit": "h"}, "time_unit: expected s, ms, us, ns"),
        ({"timezone": "Mars"}, "timezone: expected one such as"),
        ({"timezone": "Europe/Berlin"}, "timezone: expected a time column as well"),
        ({"time_unit": "s"}, "time_unit: expected a time column as well"),
        ({"default": {"z": "1"}}, "default: expected columns that are imported"),
        ({"timezone": 5, "time": "x"}, "timezone: expected str"),
        ({"observation": []}, "observation: expected one or more"),
        ({"observation": "x"}, "observation: expected a list of columns, got 'x'"),
        ({"observation": [1]}, "expected the names of columns, which are texts, got 1"),
        ({"sample_prob": np.float32(2)}, "sample_prob: expected a column or a number in"),
        ({"reward": []}, "reward: expected one or more"),
    ):
        with pytest.raises(ImportFailed, match=text):
            checked(table, **meaning)


def test_a_folder_that_has_grown_adds_its_new_file(
    collector: CollectorProcess, tmp_path: Path
) -> None:
    """Where each row is an episode, files are named individually."""
    folder = tmp_path / "logs"
    folder.mkdir()
    write(folder / "1.csv", rows_of(10))
    options = ImportOptions(source=folder, address=collector.address, **BANDIT)
    assert run_import(options).steps == 10
    write(folder / "2.parquet", rows_of(20)[10:])
    again = run_import(options)
    assert (again.steps, again.rows_known) == (10, 10)
    assert sorted(row["rewards"] for row in stored(collector)) == list(range(20))


# --- categories and spaces -------------------------------------------------------------------


def test_two_logs_share_one_numbering_of_categories(tmp_path: Path) -> None:
    """Codes are positions in the sorted values of the first log; unknown values are named."""
    declare(tmp_path / "root", "multi_discrete:3,10", "discrete:2")
    first = write(
        tmp_path / "first.parquet",
        [{"c": c, "n": 9, "a": a, "r": 1.0} for c, a in [("z", "up"), ("b", "down"), ("k", "up")]],
    )
    second = write(
        tmp_path / "second.parquet",
        [{"c": c, "n": 9, "a": "up", "r": 2.0} for c in ("k", "new", "z")],
    )
    kept = tmp_path / "kept.json"
    with CollectorProcess(tmp_path / "root") as collector:
        options = ImportOptions(
            source=first,
            observation=("c:categories", "n"),
            action="a:categories",
            reward="r",
            categories=kept,
            address=collector.address,
        )
        run_import(options)
        assert json.loads(kept.read_text()) == {"c": ["b", "k", "z"], "a": ["down", "up"]}
        report = run_import(dataclasses.replace(options, source=second))
        assert [(bad.row, bad.reason) for bad in report.bad] == [
            (2, "column c: expected one of the 3 names 'b', 'k', 'z', got 'new'")
        ]
        found = sorted((row["rewards"], *row["obs"], row["actions"]) for row in stored(collector))
    assert found == [(1, 0, 9, 0), (1, 1, 9, 1), (1, 2, 9, 1), (2, 1, 9, 1), (2, 2, 9, 1)]


def test_each_log_does_not_get_codes_of_its_own(tmp_path: Path) -> None:
    """The only value of a log would be code 0, whatever it is: names or one file are needed."""
    declare(tmp_path / "root", "discrete:2", "discrete:2")
    days = {
        day: write(tmp_path / f"{day}.csv", [{"back": back, "a": 0, "r": at}])
        for at, (day, back) in enumerate({"monday": "yes", "tuesday": "no"}.items())
    }
    kept = tmp_path / "codes.json"
    with CollectorProcess(tmp_path / "root") as collector:
        given = {"observation": ["back:categories"], "action": "a", "reward": "r"}
        given |= {"address": collector.address}
        for check in (False, True):
            with pytest.raises(
                ImportFailed, match=r"back: expected names .*--declare.*--categories FILE.*default"
            ):
                import_table(days["monday"], check=check, **given)
        kept_as: dict[str, Any] = given | {"categories": str(kept)}
        looked = import_table(days["monday"], check=True, **kept_as)
        assert (looked.steps, list(tmp_path.glob("*.json"))) == (1, []), "a check writes no file"
        codes = {"file": str(kept), "names": {"back": 1}}
        assert looked.understood["codes"] == codes
        first = import_table(days["monday"], **kept_as)
        second = import_table(days["tuesday"], **kept_as)
        assert (first.steps, first.understood["codes"]) == (1, codes)
        assert second.bad_counts == {"column back: expected the name 'yes'": 1}
        assert [row["obs"] for row in stored(collector)] == [0]


class MetUnit:
    """A unit that is read while another one is, after both imports have found no file of codes."""

    once = False

    def __init__(self, path: Path, meeting: threading.Barrier) -> None:
        (self._unit,) = open_source(path, None)
        self.label, self._meeting = self._unit.label, meeting

    def names(self) -> list[str]:
        return self._unit.names()

    def digest(self) -> str | None:
        return self._unit.digest()

    def blocks(self, columns: Sequence[str]) -> Blocks:
        self._meeting.wait(120)
        return self._unit.blocks(columns)


def test_first_imports_at_the_same_time_have_one_file_of_codes(tmp_path: Path) -> None:
    """The first to write a column gives it its codes; neither undoes the other's columns."""
    kept, meeting = tmp_path / "codes.json", threading.Barrier(2)

    def codes(word: str, *columns: str) -> Categories:
        path = write(tmp_path / f"{word}.csv", [dict.fromkeys(columns, word)])
        return known_categories([MetUnit(path, meeting)], columns, {}, kept, save=True)

    with ThreadPoolExecutor(2) as both:
        runs = [both.submit(codes, "yes", "back", "left"), both.submit(codes, "no", "back")]
        first, second = (run.result() for run in runs)
    assert first["back"] == second["back"], "one code is one name, whichever import wrote it"
    assert json.loads(kept.read_text()) == first


def test_declaring_writes_no_file_of_codes(tmp_path: Path) -> None:
    """The declaration has the names, in the order of a given file."""
    path = write(tmp_path / "log.csv", [{"c": c, "a": 0, "r": 0} for c in "ab"])
    kept = tmp_path / "codes.json"
    options = ImportOptions(
        source=path, observation=["c:categories"], action="a", reward="r", categories=str(kept)
    )
    assert infer_spaces(options)[0] == Discrete.of(["a", "b"])
    assert not kept.exists()
    kept.write_text('{"c": ["b", "a"]}')
    assert infer_spaces(options)[0] == Discrete.of(["b", "a"])


def test_names_that_are_numbers_are_sent_as_names(tmp_path: Path) -> None:
    """The route takes no integers for them, which could be meant as codes."""
    rules = {"observation": Box((1,)), "action": Discrete.of(["42", "7"]), "seal_seconds": 0.2}
    save_declaration(tmp_path / "root", PolicyDeclaration(**rules))
    with CollectorProcess(tmp_path / "root") as collector:
        options = {"observation": ["x"], "reward": "r", "address": collector.address}
        table = {"x": [0.0, 0.0, 0.0], "item": [7, 42, 1], "r": [1.0, 2.0, 3.0]}
        report = import_table(pa.table(table), action="item:categories", **options)
        assert report.bad_counts == {"column item: expected one of the 2 names '42', '7'": 1}
        again = import_table(pa.table(table), action="item", **options)
        assert (again.name, again.rows_known) == (report.name, 2), "a name in either form"
        found = sorted((row["rewards"], row["actions"]) for row in stored(collector))
    assert found == [(1, 1), (2, 0)]


def test_codes_are_not_names(tmp_path: Path) -> None:
    """A log with the codes of a policy's names is not understood, and the error says what to do."""
    fruit = Discrete.of(["apples", "pears", "plums"])
    save_declaration(tmp_path / "root", PolicyDeclaration(observation=Box((1,)), action=fruit))
    declare(tmp_path / "coded", "discrete:3", "discrete:2")
    kept = tmp_path / "codes.json"
    kept.write_text('{"code": ["apples", "pears", "plums"]}')
    names = "column code: expected one of the 3 names 'apples', 'pears', 'plums'"
    codes = f"{names} (not their codes: map these to names first)"
    table = {"x": [0.0] * 5, "code": [0, 2, 3, 1, -1], "r": [1.0] * 5}
    for root, given in (
        ("root", {"observation": ["x"], "action": "code"}),
        ("coded", {"observation": ["code:categories"], "action": "x", "categories": kept}),
    ):
        with CollectorProcess(tmp_path / root) as collector:
            known: dict[str, Any] = {**given, "reward": "r", "address": collector.address}
            report = import_table(pa.table(table), check=True, **known)
        assert report.bad_counts == {codes: 3, names: 2}
        assert report.bad[0].reason == f"{codes}, got '0'"


@pytest.mark.parametrize("checks", [True, False])
def test_values_that_become_the_other_name_are_counted(tmp_path: Path, checks: bool) -> None:
    """A column of codes is read without an error then, and would be `other` in silence."""
    country = Discrete.of(["DE", "FR"], other="other")
    save_declaration(tmp_path, PolicyDeclaration(observation=country, action=country))
    rewards = [0.0, 0.0, 0.0, 0.0, math.nan]  # the last row is left out, too
    table = {"from": ["0", "1", None, "2", "3"], "to": ["DE", "IT", "FR", "other", "DE"]}
    with CollectorProcess(tmp_path) as collector:
        report = import_table(
            pa.table({**table, "r": rewards}), observation=["from"], action="to", reward="r",
            check=checks, address=collector.address, name="countries",
        )  # fmt: skip
        both = import_table(
            pa.table({**table, "r": rewards}), observation=["from"], action="from", reward="r",
            check=checks, address=collector.address, name="one column twice",
        )  # fmt: skip
    assert report.read_as_other == {"from": 3, "to": 1}
    assert report.rows_left_out == 2
    assert both.read_as_other == {"from": 3}


@pytest.mark.parametrize("name", [None, "shop"])
def test_a_check_without_a_collector_shows_the_name_of_the_import(
    name: str | None, tmp_path: Path
) -> None:
    """It assumes the policy and the spaces that are declared from the same columns."""
    table = pa.table({"c": ["a", "b"], "x": [0.5, 1.5], "a": [0, 1], "r": [1.0, 2.0]})
    columns: dict[str, Any] = {"observation": ["c:categories", "x"], "action": "a", "reward": "r"}
    away = {"address": "http://127.0.0.1:9", "timeout": 0.1}
    checked = import_table(table, check=True, name=name, **away, **columns)
    observation, action = infer_spaces(ImportOptions(source=table, **columns))
    save_declaration(tmp_path / "root", PolicyDeclaration(observation=observation, action=action))
    with CollectorProcess(tmp_path / "root") as collector:
        given = {"name": name, "address": collector.address, **columns}
        looked = import_table(table, check=True, **given)
        assert checked.name == looked.name == import_table(table, **given).name


def test_a_changed_list_of_names_makes_another_import(tmp_path: Path) -> None:
    """The meaning of an import's codes is part of its name, so new codes are not "known"."""
    path = write(tmp_path / "log.csv", [{"x": 0, "item": "b", "r": 1}])
    steps = []
    for names in (["a", "b"], ["a", "b"], ["b", "a"]):
        rules = {"observation": Box((1,)), "action": Discrete.of(names), "seal_seconds": 0.2}
        save_declaration(tmp_path / "root", PolicyDeclaration(**rules))
        with CollectorProcess(tmp_path / "root") as collector:
            options = ImportOptions(
                source=path,
                observation=["x"],
                action="item:categories",
                reward="r",
                address=collector.address,
            )
            steps.append(run_import(options).steps)
            rows = stored(collector)
    assert steps == [1, 0, 1]
    assert sorted(row["actions"] for row in rows) == [0, 1]


def test_a_named_log_grows_with_the_list_of_names(tmp_path: Path) -> None:
    """A name added to the declaration adds the new rows alone."""
    steps, rows = [], [{"x": 0, "item": name, "r": 1} for name in ("a", "b", "c")]
    for count in (2, 3):
        names = Discrete.of(["a", "b", "c"][:count])
        rules = {"observation": Box((1,)), "action": names, "seal_seconds": 0.2}
        save_declaration(tmp_path / "root", PolicyDeclaration(**rules))
        with CollectorProcess(tmp_path / "root") as collector:
            options = ImportOptions(
                source=write(tmp_path / "log.csv", rows[:count]),
                observation=["x"],
                action="item:categories",
                reward="r",
                name="shop",
                address=collector.address,
            )
            steps.append(run_import(options).steps)
            found = stored(collector)
    assert steps == [2, 1]
    assert sorted(row["actions"] for row in found) == [0, 1, 2]


def test_a_reader_is_kept_only_where_it_is_read_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Categories whose names the policy declares need no pass of their own."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    rules = {"observation": Box((1,)), "action": Discrete.of(["a", "b"])}
    save_declaration(tmp_path / "root", PolicyDeclaration(**rules))
    batch = pa.record_batch({"x": [0.0, 1.0], "item": ["a", "b"], "r": [1.0, 2.0]})
    kept: list[int] = []

    def batches() -> Iterator[pa.RecordBatch]:
        yield batch
        kept.append(len(list(tmp_path.glob("headrace-import-*/*.duckdb"))))
        yield batch

    with CollectorProcess(tmp_path / "root") as collector:
        for episode in (None, "x"):
            report = import_table(
                pa.RecordBatchReader.from_batches(batch.schema, batches()),
                observation=["x"],
                action="item:categories",
                reward="r",
                episode=episode,
                name=f"log of {episode}",
                address=collector.address,
            )
            assert (report.steps, report.bad) == (4, [])
    assert kept == [0, 1]


def test_spaces_are_inferred_from_what_the_columns_hold(tmp_path: Path) -> None:
    """An action's integers are choices, other numbers a float Box, categories names."""
    rows = [
        {"c": c, "n": n, "f": f, "v": [0.5, 1.5], "a": a, "r": 0}
        for c, n, f, a in [("x", 3, 0.5, 7), ("y", 5, -2.0, 300), ("x", None, "bad", 4)]
    ]
    path = write(tmp_path / "log.jsonl", rows)

    def infer(*observation: str, action: str = "a", source: Path = path) -> Any:
        return infer_spaces(
            ImportOptions(source=source, observation=observation, action=action, reward="r")
        )

    names = Discrete.of(["x", "y"])
    assert infer("n", "c:categories")[0] == Dict((("c", names), ("n", Box((1,)))))
    lists = write(tmp_path / "lists.jsonl", [{"n": n, "a": [n, 7], "r": 0} for n in (1, 2)])
    assert infer("n", source=lists) == (Box((1,)), MultiDiscrete((7, 7), (1, 1)))
    assert infer("c:categories", action="c:categories:other") == (
        names,
        Discrete.of(["x", "y"], other="other"),
    )
    assert infer("n") == (Box((1,)), Discrete(297, 4))
    assert infer("f", "v", "n", action="v") == (Box((4,)), Box((2,)))
    assert infer("c:categories", "f")[0] == Dict((("c", names), ("f", Box((1,)))))


def test_the_collectors_declaration_holds(collector: CollectorProcess, tmp_path: Path) -> None:
    """Columns that do not fit the declared space are refused before anything is sent."""
    path = write(tmp_path / "log.csv", rows_of(3))
    options = ImportOptions(source=path, address=collector.address, **BANDIT)
    with pytest.raises(ImportFailed, match="expects 2 numbers, got the columns x, y, r"):
        run_import(dataclasses.replace(options, observation=("x", "y", "r")))
    coded = dataclasses.replace(options, action="r:categories", categories=tmp_path / "codes.json")
    with pytest.raises(ImportFailed, match=r"expects at most 2 \(policy default of http:"):
        run_import(coded)
    with pytest.raises(ImportFailed, match="expected spaces of schema other, got "):
        run_import(dataclasses.replace(options, schema_id="other"))
    with pytest.raises(ValueError, match=r"policy_id: expected one of \['default'\], got 'other'"):
        run_import(dataclasses.replace(options, policy_id="other"))
    short = run_import(dataclasses.replace(options, observation=("x",)))
    assert short.bad_counts == {"observation: expected 2 numbers": 3}


# --- files that cannot be used ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("log.csv", b"x,y,a\n1,2,3\n", r"no column 'r', 'p'; it has x, y, a"),
        ("log.csv", b"", "is empty"),
        ("log.csv", b"x,x\n", r"unique column names, got \['x'\] twice"),
        ("log.jsonl", b"[]\nnot json\n", "expected a JSON object in each line"),
        ("log.parquet", b"PAR1 no more", "expected Parquet"),
        ("log.xlsx", b"PK", r"expected a file of \.csv, "),
    ],
)
def test_a_file_that_cannot_be_used_says_why(
    name: str, content: bytes, message: str, tmp_path: Path
) -> None:
    """An unusable file is refused before any request: the address of this test has no server."""
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ImportFailed, match=message):
        run_import(ImportOptions(source=path, address="http://127.0.0.1:9", **BANDIT))


def test_a_missing_file_and_an_absent_collector_are_told_apart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The caller has to correct the one; the other is waited for, with a message."""
    options = ImportOptions(source=tmp_path / "no.csv", address="http://127.0.0.1:9", **BANDIT)
    with pytest.raises(ImportFailed, match="cannot be read: No such file"):
        run_import(options)
    path = write(tmp_path / "log.csv", rows_of(3))
    with pytest.raises(CollectorUnavailable):
        run_import(dataclasses.replace(options, source=path, timeout=0.2))
    assert "Connection refused" in caplog.text
    assert "trying for 0 s more" in caplog.text


def test_a_header_alone_is_no_log(collector: CollectorProcess, tmp_path: Path) -> None:
    """A file without rows is an error, not a success."""
    path = tmp_path / "log.csv"
    path.write_text("x,y,a,r,p\n")
    with pytest.raises(ImportFailed, match="has no rows"):
        run_import(ImportOptions(source=path, address=collector.address, **BANDIT))
