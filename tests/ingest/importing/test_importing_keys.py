"""The keys of an import: a row has the same one in every run, and no other row has it."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from ingest.importing.importing import import_table, run_import
from ingest.importing.options import ImportOptions
from ingest.importing.posting import RequestSender
from ingest.protocol.errors import ImportFailed
from tests.collector_process import CollectorProcess, declare, shard_rows

COLUMNS = ("x", "y", "a", "r", "e")
BANDIT: dict[str, Any] = {"observation": ("x", "y"), "action": "a", "reward": "r"}


def write(path: Path, rewards: Sequence[int]) -> Path:
    """A log with these rewards; two rows have one value in `e`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [f"{n / 4},{-n},{n % 2},{n},{n // 2}" for n in rewards]
    path.write_text("\n".join([",".join(COLUMNS), *rows]) + "\n")
    return path


@pytest.fixture
def collector(tmp_path: Path) -> Iterator[CollectorProcess]:
    declare(tmp_path / "root", "box:2", "discrete:2")
    with CollectorProcess(tmp_path / "root") as running:
        yield running


def stored(collector: CollectorProcess) -> Counter[int]:
    """How often each reward is stored."""
    assert collector.stop() == 0
    return Counter(int(row["rewards"]) for row in shard_rows(collector.root))


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[str]]]:
    """The key of each request that is sent, and the ids of its episodes."""
    found: list[tuple[str, list[str]]] = []
    send = RequestSender.send

    def noting(self: RequestSender, request: Any, name: str) -> None:
        ids = dict.fromkeys(request.episodes.table["eps_id"].to_pylist())
        found.append((f"{name}:{request.number}", list(ids)))
        send(self, request, name)

    monkeypatch.setattr(RequestSender, "send", noting)
    return found


def test_a_named_folder_stores_each_row_once_and_grows(
    collector: CollectorProcess, tmp_path: Path
) -> None:
    """A row's key is the name, the path in the folder and its number: files added later, at any
    place, and rows appended to one are imported alone. The folder may be moved."""
    folder = tmp_path / "logs"
    write(folder / "b.csv", range(10))
    write(folder / "c/b.csv", range(10, 20))
    options = ImportOptions(source=folder, name="shop", address=collector.address, **BANDIT)
    reports = [run_import(options), run_import(options)]
    write(folder / "a.csv", range(20, 30))
    write(folder / "c/a.csv", range(30, 40))
    reports.append(run_import(options))
    write(folder / "b.csv", [*range(10), *range(40, 45)])
    reports.append(run_import(options))
    moved = dataclasses.replace(options, source=folder.rename(tmp_path / "moved"))
    reports.append(run_import(moved))
    assert [report.bad_counts for report in reports] == [{}] * 5
    assert [report.steps for report in reports] == [20, 0, 20, 5, 0]
    assert [report.rows_known for report in reports] == [0, 20, 20, 40, 45]
    assert stored(collector) == Counter(range(45))


def test_a_changed_file_of_a_named_folder_is_refused(
    collector: CollectorProcess, tmp_path: Path
) -> None:
    """Its name and path stand for the earlier rows; the other files' rows are known."""
    folder = tmp_path / "logs"
    write(folder / "a.csv", range(10))
    write(folder / "b.csv", range(10, 20))
    options = ImportOptions(source=folder, name="shop", address=collector.address, **BANDIT)
    run_import(options)
    write(folder / "b.csv", range(11, 21))
    with pytest.raises(ImportFailed, match="knows this import with other rows"):
        run_import(options)
    assert stored(collector) == Counter(range(20))


def test_a_named_folder_with_episodes_is_one_import(
    collector: CollectorProcess, tmp_path: Path
) -> None:
    """An episode may have rows in several files; a file behind the others is imported alone."""
    folder = tmp_path / "logs"
    write(folder / "a.csv", range(5))
    write(folder / "b.csv", range(5, 10))
    options = ImportOptions(
        source=folder, name="shop", episode="e", address=collector.address, **BANDIT
    )
    first = run_import(options)
    write(folder / "c.csv", range(10, 14))
    again = run_import(options)
    assert (first.episodes, first.steps) == (5, 10)
    assert (again.episodes, again.steps, again.rows_known) == (2, 4, 10)
    assert stored(collector) == Counter(range(14))


@pytest.mark.parametrize("name", [None, "shop"])
def test_a_copy_in_a_folder_is_known_without_a_name(
    name: str | None, collector: CollectorProcess, tmp_path: Path
) -> None:
    """Without a name the same bytes are the same import; with one, another path is another row."""
    folder = tmp_path / "logs"
    for file in ("a.csv", "b.csv", "c.csv"):
        write(folder / file, range(10) if file != "c.csv" else range(10, 20))
    options = ImportOptions(source=folder, name=name, address=collector.address, **BANDIT)
    report = run_import(options)
    assert report.bad_counts == {}
    assert (report.steps, report.rows_known) == ((20, 10) if name is None else (30, 0))
    expected = Counter(range(20)) + (Counter(range(10)) if name else Counter())
    assert stored(collector) == expected


SHOP, LOG = "f8082c85a45cc311e840a7216dbfe77a", "dbdd3aed6c25fbcfc0e231507a97735e"
FIRST, SECOND = "7cd3e0661fddc87088a3806588061fcc", "0d71e9e1cfcf10c4bbff854520b4c1bc"
EPISODES, NAMED = "abc4b5954445a323e485cfaab83b74dc", "fd9f0b4c08167cbbde14579fc1ade848"
KEPT: list[tuple[dict[str, Any], dict[str, list[str]]]] = [
    ({"name": "shop"}, {SHOP: ["1", "2", "3"]}),
    ({}, {LOG: ["1", "2", "3"]}),
    ({"source": "logs"}, {FIRST: ["1", "2"], SECOND: ["1", "2"]}),
    ({"source": "logs", "episode": "e"}, {EPISODES: ["1", "2", "3"]}),
    ({"source": "logs", "episode": "e", "name": "days"}, {NAMED: ["1", "2", "3"]}),
]


@pytest.mark.parametrize(("changes", "expected"), KEPT)
def test_the_keys_of_release_0_1_0_are_kept(
    changes: dict[str, Any],
    expected: dict[str, list[str]],
    collector: CollectorProcess,
    tmp_path: Path,
    sent: list[tuple[str, list[str]]],
) -> None:
    """Rows that it stored are known under the same keys of requests and ids of episodes."""
    write(tmp_path / "log.csv", range(3))
    write(tmp_path / "logs/a.csv", range(3, 5))
    write(tmp_path / "logs/day=1/b.csv", range(5, 7))
    source = tmp_path / changes.get("source", "log.csv")
    options = {**BANDIT, "address": collector.address, **changes, "source": source}
    assert run_import(ImportOptions(**options)).bad_counts == {}
    assert sent == [
        (f"import-{name}:0", [f"{name[:12]}-{key}" for key in keys])
        for name, keys in expected.items()
    ]


def test_a_file_of_a_named_folder_has_keys_of_name_and_path(
    collector: CollectorProcess, tmp_path: Path, sent: list[tuple[str, list[str]]]
) -> None:
    """They are the same on every machine, wherever the folder is."""
    write(tmp_path / "logs/a.csv", range(3, 5))
    write(tmp_path / "logs/day=1/b.csv", range(5, 7))
    options = ImportOptions(
        source=tmp_path / "logs", name="folder", address=collector.address, **BANDIT
    )
    assert run_import(options).bad_counts == {}
    names = ["c40e51674912ad0fa93702a5c0b2759a", "c8e7834e07d113d6ae026b1f7d5d80a4"]
    expected = [(f"import-{name}:0", [f"{name[:12]}-1", f"{name[:12]}-2"]) for name in names]
    assert sent == expected


@pytest.mark.parametrize(
    "changes",
    [
        {"observation": ("y", "x")},
        {"observation": ("x", "r")},
        {"action": "e"},
        {"reward": "x"},
        {"final_observation": ("x", "y")},
        {"tags": {"day": "x"}},
        {"infos": {"day": "x"}},
        {"time": "e"},
        {"action_logp": "y"},
    ],
)
def test_other_columns_make_another_import(
    changes: dict[str, Any], collector: CollectorProcess, tmp_path: Path
) -> None:
    """The columns' names are in the key of an import without a name: with other columns of the same
    file it has other rows, which would otherwise be refused, or be taken for known ones."""
    options = ImportOptions(
        source=write(tmp_path / "log.csv", [0, 1]), address=collector.address, **BANDIT
    )
    assert run_import(options).steps == 2
    other = run_import(dataclasses.replace(options, **changes))
    assert (other.steps, other.rows_known, other.bad_counts) == (2, 0, {})
    assert stored(collector).total() == 4


@pytest.mark.parametrize("name", ["log.jsonl", "log.csv", "log.parquet"])
def test_ids_of_64_bits_keep_their_digits(
    name: str, collector: CollectorProcess, tmp_path: Path
) -> None:
    """As episodes, tags and infos, also beside an id that no int64 has."""
    ids = [9007199254740993, 9007199254740992, 18446744073709551615]
    columns = {"x": [1, 1, 1], "y": [0, 0, 0], "a": [0, 1, 0], "r": [1.0, 0.5, 1.0]}
    table, path = pa.table({"e": pa.array(ids, pa.uint64()), **columns}), tmp_path / name
    if name.endswith("jsonl"):
        path.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))
    elif name.endswith("csv"):
        pyarrow.csv.write_csv(table, path)
    else:
        pq.write_table(table, path)
    more: dict[str, Any] = {"tags": {"user": "e"}, "infos": {"id": "e"}, "episode": "e"}
    report = import_table(path, address=collector.address, **BANDIT, **more)
    assert (report.episodes, report.bad) == (3, [])
    assert collector.stop() == 0
    rows = shard_rows(collector.root)
    assert {row["eps_id"].rpartition("-")[2] for row in rows} == {*map(str, ids)}
    assert {json.loads(row["tags"])["user"] for row in rows} == {*map(str, ids)}
    assert {str(json.loads(row["infos"])["id"]) for row in rows} == {*map(str, ids)}


def test_a_float_that_may_be_several_ids_is_refused() -> None:
    """pandas writes ids so beside an empty cell; smaller whole floats are the integers."""
    table = pa.table({"e": [9007199254740992.0 * 2, 5.0], "x": [1, 1], "r": [1.0, 0.5]})
    report = import_table(table, observation=["x"], action="x", reward="r", episode="e", check=True)
    (bad,) = report.bad
    assert (bad.row, report.steps) == (1, 1)
    assert "column e: expected a text or whole number" in bad.reason
