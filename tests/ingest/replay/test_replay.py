"""Replay: each usable row of a log is in the shards exactly once; every other row is named.

Also of `ingest.client.import_client`, `ingest.replay.categories`, `ingest.replay.layout` and
`ingest.replay.values`.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ingest.protocol.errors import CollectorUnavailable, ReplayError
from ingest.replay.replay import ReplayOptions, ReplayReport, import_name, infer_spaces, replay
from storage.spaces.descriptors import Box, Dict, Discrete, MultiDiscrete
from tests.collector_process import CollectorProcess, declare, shard_rows

ROOT = Path(__file__).parents[3]
BANDIT: dict[str, Any] = {
    "observation": ("x", "y"),
    "action": "a",
    "reward": "r",
    "action_prob": "p",
}


def rows_of(count: int) -> list[dict[str, Any]]:
    """A bandit's log whose rewards tell its rows apart."""
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


def accounts_for_every_row(report: ReplayReport) -> bool:
    return report.rows == report.steps + report.rows_known + report.rows_left_out


# --- what arrives ----------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
def test_every_row_becomes_a_replayed_episode_of_one_step(
    suffix: str, collector: CollectorProcess, tmp_path: Path
) -> None:
    """Observation, action, reward, propensity, time and tags of each row are stored as given."""
    rows = [row | {"at": 1_700_000_000_000_000 + i} for i, row in enumerate(rows_of(50))]
    options = ReplayOptions(
        path=write(tmp_path / f"log.{suffix}", rows),
        address=collector.address,
        time="at",
        tags={"arm": "a"},
        **BANDIT,
    )
    report = replay(options)
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
    """An import is its content and what its columns mean, wherever the file lies."""
    path = write(tmp_path / "log.csv", rows_of(20))
    options = ReplayOptions(path=path, address=collector.address, **BANDIT)
    first, again = replay(options), replay(options)
    moved = dataclasses.replace(options, path=path.rename(tmp_path / "moved.csv"))
    third = replay(moved)
    assert (first.steps, again.steps, again.skipped_known, third.skipped_known) == (20, 0, 20, 20)
    assert first.name == again.name == third.name
    assert accounts_for_every_row(again)
    other = dataclasses.replace(moved, action_prob=None)
    assert import_name(other, {}) != first.name
    assert replay(other).steps == 20
    assert len(stored(collector)) == 40


def test_rows_of_an_episode_may_lie_anywhere_and_are_ordered_by_time(
    collector: CollectorProcess, tmp_path: Path
) -> None:
    """Interleaved rows are grouped; t follows the time column; the last row says how it ended."""
    rows = [
        {"e": name, "at": at, "x": 0, "y": at, "a": 0, "r": at, "p": 1, "end": at == 3}
        for at, name in [(2, "A"), (1, "B"), (3, "B"), (1, "A"), (1, "C"), (2, "B"), (3, "A")]
    ]
    rows[4]["end"] = False  # C was cut off
    options = ReplayOptions(
        path=write(tmp_path / "log.csv", rows),
        address=collector.address,
        episode="e",
        time="at",
        terminated="end",
        **BANDIT,
    )
    report = replay(options)
    assert (report.episodes, report.steps) == (3, 7)
    assert replay(options).skipped_known == 3
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
    """Each fault names the row, its line and the column; the other rows arrive."""
    path = tmp_path / "log.csv"
    path.write_text(
        'note,x,y,a,r,p\n"two\nlines",1,1,0,1,0.5\nb,one,1,0,1,0.5\nc,1,1,5,1,0.5\n'
        "d,1,1,0,1,1.5\ne,1,1\nf,1,nan,0,1,0.5\ng,1,1,0,,0.5\nh,1,1,0,1,-1\ni,1,1,1,2,0.5\n"
    )
    report = replay(ReplayOptions(path=path, address=collector.address, **BANDIT))
    assert (report.rows, report.steps, report.rows_left_out) == (9, 2, 7)
    assert accounts_for_every_row(report)
    assert [(bad.row, bad.line) for bad in report.bad] == [(i, i + 2) for i in range(2, 9)]
    reasons = [bad.reason for bad in report.bad]
    assert reasons[0] == "column x: expected a number, got 'one'"
    assert reasons[1].startswith("action: expected ")
    assert reasons[2] == "action_prob: expected a number in (0, 1], got 1.5"
    assert reasons[3] == "row: expected 6 fields, got 3"
    assert reasons[4].startswith("obs: expected ")
    assert reasons[5] == "column r: expected a number, got nothing"
    assert report.bad_counts["action_prob: expected a number in (0, 1]"] == 2
    assert sum(report.bad_counts.values()) == 7
    assert sorted(row["rewards"] for row in stored(collector)) == [1, 2]


def test_a_bad_row_leaves_its_whole_episode_out(
    collector: CollectorProcess, tmp_path: Path
) -> None:
    """No part of an episode with a hole is stored; the row at fault and its episode are named."""
    rows = [
        {"e": name, "x": 0, "y": 0, "a": 0, "r": r, "p": 1}
        for name, r in [("A", 1), ("A", "?"), ("A", 3), ("B", 4), ("B", 5), ("", 6)]
    ]
    options = ReplayOptions(
        path=write(tmp_path / "log.csv", rows),
        address=collector.address,
        episode="e",
        bad_shown=1,
        **BANDIT,
    )
    report = replay(options)
    assert (report.rows, report.steps, report.rows_left_out) == (6, 2, 4)
    assert len(report.bad) == 1
    assert sum(report.bad_counts.values()) == 2
    (bad,) = report.bad
    assert (bad.row, bad.line) == (2, 3)
    assert (bad.episode or "").endswith("-A")
    assert accounts_for_every_row(replay(options))
    assert sorted(row["rewards"] for row in stored(collector)) == [4, 5]


def test_an_end_before_the_last_row_is_a_fault(collector: CollectorProcess, tmp_path: Path) -> None:
    """An episode that goes on after its end is two episodes under one name."""
    rows = [{"e": 1, "x": 0, "y": 0, "a": 0, "r": 1, "p": 1, "end": end} for end in (1, 0)]
    path = write(tmp_path / "log.jsonl", rows)
    report = replay(
        ReplayOptions(path=path, address=collector.address, episode="e", terminated="end", **BANDIT)
    )
    assert report.bad_counts == {"row: expected the end on its episode's last row": 1}
    assert (report.bad[0].row, report.rows_left_out, report.steps) == (1, 2, 0)


# --- categories and spaces -------------------------------------------------------------------


def test_two_logs_share_one_numbering_of_categories(tmp_path: Path) -> None:
    """Codes are the places among the sorted values of the first log; others are named, unknown."""
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
        options = ReplayOptions(
            path=first,
            observation=("c:categories", "n"),
            action="a:categories",
            reward="r",
            categories=kept,
            address=collector.address,
        )
        replay(options)
        assert json.loads(kept.read_text()) == {"c": ["b", "k", "z"], "a": ["down", "up"]}
        report = replay(dataclasses.replace(options, path=second))
        assert [(bad.row, bad.reason) for bad in report.bad] == [
            (2, "column c: expected a known category, got 'new'")
        ]
        found = sorted((row["rewards"], *row["obs"], row["actions"]) for row in stored(collector))
    assert found == [(1, 0, 9, 0), (1, 1, 9, 1), (1, 2, 9, 1), (2, 1, 9, 1), (2, 2, 9, 1)]


def test_spaces_are_inferred_from_what_the_columns_hold(tmp_path: Path) -> None:
    """Few whole numbers are choices, measurements a float Box, categories names."""
    rows = [
        {"c": c, "n": n, "f": f, "v": [0.5, 1.5], "a": a, "r": 0}
        for c, n, f, a in [("x", 3, 0.5, 7), ("y", 5, -2.0, 300), ("x", None, "bad", 4)]
    ]
    path = write(tmp_path / "log.jsonl", rows)

    def infer(*observation: str, action: str = "a") -> Any:
        return infer_spaces(
            ReplayOptions(path=path, observation=observation, action=action, reward="r")
        )

    names = Discrete.of(["x", "y"])
    assert infer("n", "c:categories")[0] == Dict((("c", names), ("n", Discrete(3, 3))))
    assert infer("n", "n")[0] == MultiDiscrete((3, 3), (3, 3))
    assert infer("c:categories", action="c:categories:other") == (
        names,
        Discrete.of(["x", "y"], other="other"),
    )
    assert infer("n") == (Discrete(3, 3), Discrete(297, 4))
    assert infer("f", "v", "n", action="v") == (Box((4,)), Box((2,)))
    assert infer("c:categories", "f")[0] == Dict((("c", names), ("f", Box((1,)))))


def test_the_collectors_declaration_holds(collector: CollectorProcess, tmp_path: Path) -> None:
    """Columns that cannot fill the declared space are refused before anything is sent."""
    path = write(tmp_path / "log.csv", rows_of(3))
    options = ReplayOptions(path=path, address=collector.address, **BANDIT)
    with pytest.raises(ReplayError, match="expects 2 numbers, got the columns x, y, r"):
        replay(dataclasses.replace(options, observation=("x", "y", "r")))
    with pytest.raises(ReplayError, match="r has 3 categories, the policy expects at most 2"):
        replay(dataclasses.replace(options, action="r:categories"))
    with pytest.raises(ReplayError, match="expected spaces of schema 0123, the collector declares"):
        replay(dataclasses.replace(options, schema_id="0123"))
    with pytest.raises(ValueError, match=r"policy_id: expected one of \['default'\], got 'other'"):
        replay(dataclasses.replace(options, policy_id="other"))
    short = replay(dataclasses.replace(options, observation=("x",)))
    assert short.bad_counts == {"observation: expected 2 numbers": 3}


# --- files that cannot be used ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("log.csv", b"x,y,a\n1,2,3\n", r"no column 'r', 'p'; it has x, y, a"),
        ("log.csv", b"", "is empty"),
        ("log.csv", b"x,x\n", r"different column names, got \['x'\] twice"),
        ("log.jsonl", b"[]\nnot json\n", "expected a JSON object in each line"),
        ("log.parquet", b"PAR1 no more", "expected Parquet"),
        ("log.xlsx", b"PK", r"expected a file of \.csv, "),
    ],
)
def test_a_file_that_cannot_be_used_says_why(
    name: str, content: bytes, message: str, tmp_path: Path
) -> None:
    """Before any request: the address leads nowhere."""
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ReplayError, match=message):
        replay(ReplayOptions(path=path, address="http://127.0.0.1:9", **BANDIT))


def test_a_missing_file_and_an_absent_collector_are_told_apart(tmp_path: Path) -> None:
    """The one is the caller's to mend, the other passes."""
    options = ReplayOptions(path=tmp_path / "no.csv", address="http://127.0.0.1:9", **BANDIT)
    with pytest.raises(ReplayError, match="cannot be read: No such file"):
        replay(options)
    path = write(tmp_path / "log.csv", rows_of(3))
    with pytest.raises(CollectorUnavailable):
        replay(dataclasses.replace(options, path=path, timeout=0.2))


def test_a_header_alone_is_no_log(collector: CollectorProcess, tmp_path: Path) -> None:
    """A file without rows is a mistake that must not look like success."""
    path = tmp_path / "log.csv"
    path.write_text("x,y,a,r,p\n")
    with pytest.raises(ReplayError, match="has no rows"):
        replay(ReplayOptions(path=path, address=collector.address, **BANDIT))


# --- kills -----------------------------------------------------------------------------------

RUN = """
import json, sys
from pathlib import Path
from ingest.replay.replay import ReplayOptions, replay
given = json.loads(sys.argv[1])
options = ReplayOptions(path=Path(given.pop("path")), **given)
report = replay(options, on_progress=lambda what, done, total: print(done, flush=True))
print(json.dumps(report.to_dict()), flush=True)
"""


class Running:
    """A replay as a process of its own."""

    def __init__(self, **options: Any) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", RUN, json.dumps(options)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )

    def read_rows(self, count: int) -> None:
        """Wait until the replay has read so many rows."""
        assert self.process.stdout is not None
        while int(self.process.stdout.readline()) < count:
            pass

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def report(self) -> dict[str, Any]:
        output, _ = self.process.communicate(timeout=60)
        assert self.process.returncode == 0
        report: dict[str, Any] = json.loads(output.splitlines()[-1])
        return report


def test_a_killed_replay_is_completed_without_doubles(
    collector: CollectorProcess, tmp_path: Path
) -> None:
    """Whatever was sent before SIGKILL counts once; the next run sends the rest, and no more."""
    rows = 12_000
    path = str(write(tmp_path / "log.parquet", rows_of(rows)))
    options = {"path": path, "address": collector.address, **BANDIT}
    for reached in (6_000, 9_000):
        running = Running(**options)
        running.read_rows(reached)
        running.kill()
    report = Running(**options).report()
    assert 5_000 <= report["skipped_known"] < rows
    assert report["steps"] == rows - report["skipped_known"]
    counts = Counter(row["rewards"] for row in stored(collector))
    assert counts == {float(i): 1 for i in range(rows)}


def test_a_killed_collector_is_waited_for(collector: CollectorProcess, tmp_path: Path) -> None:
    """Batches that it did not answer are repeated; those that it had applied count once."""
    rows = 12_000
    path = str(write(tmp_path / "log.parquet", rows_of(rows)))
    running = Running(path=path, address=collector.address, **BANDIT)
    for reached in (2_000, 7_000):
        running.read_rows(reached)
        collector.kill()
        collector.restart()
    assert running.report()["steps"] == rows
    counts = Counter(row["rewards"] for row in stored(collector))
    assert counts == {float(i): 1 for i in range(rows)}


def test_an_episode_that_arrived_in_part_is_completed(
    collector: CollectorProcess, tmp_path: Path
) -> None:
    """Killed within a long episode, the next run adds the steps that are missing."""
    length, episodes = 2_500, 12
    rows = [
        row | {"e": i // length, "r": float(i)} for i, row in enumerate(rows_of(length * episodes))
    ]
    path = str(write(tmp_path / "log.parquet", rows))
    options = {"path": path, "address": collector.address, "episode": "e", **BANDIT}
    running = Running(**options)
    running.read_rows(25_000)
    running.kill()
    report = Running(**options).report()
    assert report["rows_known"] >= 20_000
    assert report["steps"] == len(rows) - report["rows_known"]
    found = stored(collector)
    assert Counter(row["rewards"] for row in found) == {float(i): 1 for i in range(len(rows))}
    assert all(row["t"] == row["rewards"] % length for row in found)
    assert Counter(row["ended"] for row in found)["terminated"] == episodes


def begin_half(collector: CollectorProcess, options: ReplayOptions) -> None:
    """What a run leaves that is killed after the first of its first episode's two steps."""
    name = import_name(options, {})
    _, registered = collector.post("/v1/instances", {"name": name})
    episode = f"{name.removeprefix('import-')[:12]}-A"
    step = {"obs": [0.0, 0.0], "action": 0, "action_prob": 1.0, "reward": 1.0, "replayed": True}
    events = [
        {"type": "start", "episode_id": episode, "start": 0},
        {"type": "log_action", "episode_id": episode, "seq": 1, **step},
    ]
    body = {"instance": registered["instance"], "events": events}
    status, reply = collector.post("/v1/events", body)
    assert (status, reply["accepted"]) == (200, 2)


@pytest.mark.parametrize("timeout", [600.0, 0.05])
def test_half_an_episode_is_completed_or_named(timeout: float, tmp_path: Path) -> None:
    """It goes on where it is open; where its episode_timeout has passed, it is reported."""
    declare(tmp_path / "root", "box:2", "discrete:2", episode_timeout=timeout)
    rows = [{"e": e, "x": 0, "y": 0, "a": 0, "r": r, "p": 1} for e, r in [("A", 1), ("A", 2)]]
    rows.append({"e": "B", "x": 0, "y": 0, "a": 0, "r": 3, "p": 1})
    path = write(tmp_path / "log.csv", rows)
    with CollectorProcess(tmp_path / "root") as collector:
        options = ReplayOptions(path=path, address=collector.address, episode="e", **BANDIT)
        begin_half(collector, options)
        if timeout < 1:
            wait_until_abandoned(collector, options)
        report = replay(options)
        found = [(row["rewards"], row["ended"]) for row in stored(collector)]
    assert accounts_for_every_row(report)
    if timeout < 1:
        assert list(report.bad_counts) == ["episode: expected it open from an earlier run"]
        assert sorted(found) == [(1.0, "abandoned"), (3.0, "terminated")]
    else:
        assert (report.steps, report.rows_known, report.bad) == (2, 1, [])
        assert sorted(row[0] for row in found) == [1, 2, 3]


def wait_until_abandoned(collector: CollectorProcess, options: ReplayOptions) -> None:
    episode = f"{import_name(options, {}).removeprefix('import-')[:12]}-A"
    while collector.get(f"/v1/episodes/{episode}")[1]["state"] == "open":
        pass
