"""`headrace demo`: the complete main job, without the live part.

Also of `headrace.demo.stage`.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest

from headrace.demo.run import show
from tests.headrace.command import answer, headrace, refused

ROWS = 2_000  # of each real log; `make long` runs all 10,000 on the wheel
ROOT = Path(__file__).parents[3]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """The demo's data, with the first rows of its real logs."""
    folder = tmp_path / "data"
    (folder / "open_bandit").mkdir(parents=True)
    (folder / "digits").symlink_to(ROOT / "data" / "digits")
    for file in (ROOT / "data" / "open_bandit").glob("*.parquet"):
        rows = pq.read_table(file).slice(0, ROWS)
        pq.write_table(rows, folder / "open_bandit" / file.name)
    return folder


@pytest.mark.long
def test_the_whole_way(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where the truth is known each verdict is right, and what was predicted is measured. Every row
    of both real logs is acknowledged, in shards and read once; they say too little to judge by.

    The clicks in the shards are those of the file, and what was there before is moved aside.
    """
    root = tmp_path / "demo"
    (root / "old").mkdir(parents=True)
    result = headrace("demo", "--root", root, "--data", data, "--no-live", "--json")
    assert result.returncode == 0, result.stderr
    whole = answer(result)
    assert (tmp_path / "demo-1" / "old").is_dir()
    digits, found = whole["digits"], whole["bandit"]
    assert (digits["better"]["verdict"], digits["worse"]["verdict"]) == ("better", "worse")
    assert digits["weak"] < 0.4 < digits["measured"]["value"]
    trained, own, other = found["train"], *(log["verify"] for log in found["logs"].values())
    assert trained["rows_read"] + trained["rows_held_out"] == ROWS
    assert own["acknowledged"] == own["in_shards"] == ROWS + found["acted"]["decisions"]
    assert other["acknowledged"] == other["in_shards"] == ROWS
    assert (own["ok"], other["ok"]) == (True, True)
    assert all(found["overlap"].values())
    assert {"ips", "snips", "dr"} <= found["overlap"].keys()
    assert (found["gate"]["published"], found["publish"]["published"]) == (False, True)
    assert found["acted"]["version"] == found["versions"]["live"]["version"] == 1
    show(whole)
    output = capsys.readouterr().out
    assert "every acknowledged step is accounted for exactly once" in output
    assert "What was learned is judged: better (" in output
    assert "What was barely learned is judged: worse (" in output
    assert "Prediction and measurement agree" in output
    assert "cannot tell:\n" in output
    assert found["gate"]["gate"]["reasons"][0] in output
    assert "Published without a gate" in output
    for picture in ("digits.png", "intervals.png"):
        assert (root / picture).read_bytes().startswith(b"\x89PNG")
    for name in found["logs"]:
        shards = sorted((root / name / "shards").glob("*/*.parquet"))
        rows = pd.concat([pd.read_parquet(path) for path in shards])
        logged = rows[rows["source"] == "replayed"]
        file = pd.read_parquet(data / "open_bandit" / f"{name}.parquet")
        assert logged["rewards"].sum() == file["click"].sum()
        assert sorted(logged["ts"]) == sorted(file["timestamp_us"])


@pytest.mark.parametrize("words", [("--data", "no/such/folder")])
def test_logs_that_are_not_there_are_named(tmp_path: Path, words: tuple[str, ...]) -> None:
    """A wheel has no data: the message names the missing file."""
    result = headrace("demo", "--root", tmp_path / "demo", *words)
    assert refused(result, "digits.parquet", "no/such/folder")
    assert not (tmp_path / "demo").exists()
