"""`headrace demo`: the main job, whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from headrace.demo.bandit import overlapping, show
from tests.headrace.command import answer, headrace, refused

ROWS = 10_000
ROOT = Path(__file__).parents[3]


def estimates(**intervals: list[float | None]) -> list[dict[str, Any]]:
    return [{"name": name, "interval": interval} for name, interval in intervals.items()]


def test_the_whole_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every row of both logs is acknowledged, in shards and read once; the policy is live and acts.

    The clicks in the shards are those of the file, and what was there before is moved aside.
    """
    root = tmp_path / "demo"
    (root / "old").mkdir(parents=True)
    result = headrace("demo", "--root", root, "--no-live", "--json")
    assert result.returncode == 0, result.stderr
    found = answer(result)
    assert (tmp_path / "demo-1" / "old").is_dir()
    trained, own, other = found["train"], *(log["verify"] for log in found["logs"].values())
    assert trained["rows_read"] + trained["rows_held_out"] == ROWS
    assert own["acknowledged"] == own["in_shards"] == ROWS + found["acted"]["decisions"]
    assert other["acknowledged"] == other["in_shards"] == ROWS
    assert (own["ok"], other["ok"]) == (True, True)
    assert all(found["overlap"].values())
    assert {"ips", "snips", "dr"} <= found["overlap"].keys()
    assert (found["gate"]["published"], found["publish"]["published"]) == (False, True)
    assert found["acted"]["version"] == found["versions"]["live"]["version"] == 1
    show(found)
    told = capsys.readouterr().out
    assert "every acknowledged step is accounted for exactly once" in told
    assert "cannot tell:\n" in told
    assert found["gate"]["gate"]["reasons"][0] in told
    assert "Published without a gate" in told
    assert (root / "intervals.png").read_bytes().startswith(b"\x89PNG")
    for name in found["logs"]:
        shards = sorted((root / name / "shards").glob("*/*.parquet"))
        rows = pd.concat([pd.read_parquet(path) for path in shards])
        logged = rows[rows["source"] == "replayed"]
        file = pd.read_parquet(ROOT / "data" / "open_bandit" / f"{name}.parquet")
        assert logged["rewards"].sum() == file["click"].sum()
        assert sorted(logged["ts"]) == sorted(file["timestamp_us"])


def test_overlap_is_judged_by_estimator() -> None:
    """Neither interval lies beyond the other; None is without a bound; dm does not judge."""
    first = estimates(ips=[0.0, 1.0], dr=[0.0, 1.0], snips=[None, 0.1], dm=[0.0, 0.1])
    second = estimates(ips=[1.0, 2.0], dr=[1.1, 2.0], snips=[0.0, None], dm=[5.0, 6.0])
    assert overlapping(first, second) == {"ips": True, "dr": False, "snips": True}
    assert overlapping(second, first) == {"ips": True, "dr": False, "snips": True}


@pytest.mark.parametrize("words", [("--data", "no/such/folder")])
def test_logs_that_are_not_there_are_named(tmp_path: Path, words: tuple[str, ...]) -> None:
    """From a wheel there is no data: the message says what was looked for."""
    result = headrace("demo", "--root", tmp_path / "demo", *words)
    assert refused(result, "random_all.parquet", "no/such/folder")
    assert not (tmp_path / "demo").exists()
