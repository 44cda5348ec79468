"""An overview counts the stored data, and names unreadable files."""

from __future__ import annotations

from pathlib import Path

from policy.data.overview import overview
from policy.judging.canary import promote, start_canary
from tests.policy.judging.test_canary import EQUAL, SHARE, Traffic


def test_everything_is_counted_once(tmp_path: Path) -> None:
    """Steps are counted by hour, version and source; versions and decisions are listed."""
    traffic = Traffic(tmp_path)
    traffic.log(4000, EQUAL)
    start_canary(tmp_path, "default", traffic.candidate(2), SHARE)
    traffic.log(200, EQUAL)
    promote(tmp_path, "default")
    found = overview(tmp_path, "default")
    bars = found["data"]["bars"]
    assert found["data"]["steps"] == sum(one["steps"] for one in bars) == 4200
    assert {one["hour"] for one in bars} == {0, 3_600_000_000}
    assert {(one["version"], one["source"]) for one in bars} == {(1, "on_policy"), (2, "on_policy")}
    assert sum(one["episodes"] for one in bars) == 4200
    assert 0.2 < sum(one["rewards"] for one in bars) / 4200 < 0.4
    assert [one["version"] for one in found["versions"]] == [1, 2]
    assert [one["kind"] for one in found["decisions"]] == ["canary start", "canary"]
    assert found["live"]["canary_version"] == 2
    assert found["damaged"] == {}


def test_a_root_with_nothing_in_it_says_so(tmp_path: Path) -> None:
    found = overview(tmp_path, "default")
    assert (found["live"], found["versions"], found["decisions"]) == (None, [], [])
    assert found["data"]["bars"] == []
    assert (found["data"]["steps"], found["damaged"]) == (0, {})


def test_what_is_damaged_is_named(tmp_path: Path) -> None:
    """A damaged root still gives a report, which is needed most then."""
    traffic = Traffic(tmp_path)
    traffic.log(10, EQUAL)
    (tmp_path / "weights" / "default" / "live.json").write_text("{}")
    (tmp_path / "weights" / "default" / "versions" / "1" / "manifest.json").write_text("{")
    found = overview(tmp_path, "default")
    assert set(found["damaged"]) == {"live.json", "version 1"}
    assert found["data"]["steps"] == 10
