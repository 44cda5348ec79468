"""An overview counts the stored data, and names unreadable files."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np

from ingest.collector.version_metrics import VersionMetrics
from policy.data.overview import overview
from policy.judging.canary import promote, start_canary
from storage.declarations.history_files import read_history
from storage.experience.reward_history import Moments
from storage.shards.shard import ShardWriter
from storage.spaces.descriptors import canonical_json
from tests.ingest.collector.test_version_metrics import part
from tests.policy.judging.test_canary import EQUAL, SCHEMA, SHARE, SPACES, STREAM, Traffic


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


def test_the_history_of_the_shards_is_the_collectors(tmp_path: Path) -> None:
    """Rewards and returns by version and minute, also of episodes in several interleaved parts."""
    played, parts = VersionMetrics(tmp_path, ["default"]), []
    for at, (episode, number, version, ended) in enumerate(
        [(0, 0, -1, None), (1, 0, 2, "terminated"), (2, 0, 3, None), (0, 1, 2, "abandoned"),
         (2, 1, 3, None), (2, 2, 4, "terminated"), (6, 0, 4, None)]
    ):  # fmt: skip
        given = part([1.0, 2.0**at], [version] * 2, number=number, ended=ended, ordinal=episode)
        parts.append(
            msgspec.structs.replace(
                given,
                episode_id=f"e{episode}",
                ordinal=at,
                t0=2 * number,
                schema_id=SCHEMA,
                obs=np.zeros(4, np.float32).tobytes(),
                actions=np.zeros(2, np.int64).tobytes(),
                received_ts=np.full(2, at * 90_000_000).tobytes(),
            )
        )
    ShardWriter(tmp_path / "shards").write(STREAM, canonical_json(*SPACES), parts)
    played.note(STREAM, parts)
    kept, found = played.history("default"), overview(tmp_path, "default")["history"]
    assert (found.totals, found.levels, found.begin) == (kept.totals, kept.levels, kept.begin)
    assert found.total(-1, "returns") == Moments(1, 1 + 1 + 1 + 8, 11**2)
    assert read_history(tmp_path, "default") == kept


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
