"""Results of each version are counted once, as sums, for a bounded number of versions."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from ingest.collector.version_metrics import VersionMetrics
from storage.experience.endings import Ending
from storage.experience.episode import Part
from storage.experience.part_columns import PartColumns, PartScalars
from storage.experience.reward_history import BEFORE, TOTAL_VERSIONS, Moments
from storage.experience.step_columns import STEP_COLUMNS


def part(
    rewards: list[float],
    versions: list[int],
    *,
    number: int = 0,
    ended: Ending | None = "terminated",
    ordinal: int = 0,
    prob: float = 0.5,
) -> Part:
    steps = len(rewards)
    return Part(
        episode_id=f"e{ordinal}",
        part=number,
        t0=0,
        steps=steps,
        schema_id="s",
        obs=b"",
        actions=b"",
        rewards=np.array(rewards).tobytes(),
        action_logp=np.log(np.full(steps, prob)).tobytes(),
        policy_version=np.array(versions).tobytes(),
        source=b"\0" * steps,
        pass_prob=np.ones(steps).tobytes(),
        ts=np.zeros(steps, np.int64).tobytes(),
        received_ts=np.zeros(steps, np.int64).tobytes(),
        ended=ended,
        episode_ordinal=ordinal,
    )


def test_returns_rewards_and_propensities_are_summed() -> None:
    """A return belongs to the version of the first step, a reward to the version that acted."""
    played = VersionMetrics()
    played.note("s", [part([1.0, 2.0], [1, 2]), part([5.0], [2], ordinal=1, prob=float("nan"))])
    assert played.of("default", 1) == {
        "episode_return": Moments(1, 3.0, 9.0),
        "step_reward": Moments(1, 1.0, 1.0),
        "action_propensity": Moments(1, 0.5, 0.25),
    }
    assert played.of("default", 2)["episode_return"] == Moments(1, 5.0, 25.0)
    assert played.of("default", 2)["step_reward"] == Moments(2, 7.0, 29.0)
    assert played.of("default", 2)["action_propensity"].n == 1


def test_an_episode_in_several_parts_is_one_return() -> None:
    """An episode in several parts counts once, when it ends; one whose start is unknown has no
    return."""
    played = VersionMetrics()
    played.note("s", [part([1.0], [1], ended=None)])
    assert played.of("default", 1)["episode_return"].n == 0
    played.note("s", [part([2.0], [2], number=1, ended=None), part([4.0], [2], number=2)])
    assert played.of("default", 1)["episode_return"] == Moments(1, 7.0, 49.0)
    played.note("s", [part([9.0], [1], number=3, ordinal=5)])
    assert played.of("default", 1)["episode_return"].n == 1


def test_versions_and_unknown_ones_take_bounded_memory() -> None:
    """Steps without a version count as those before the first one, whatever comes later."""
    played = VersionMetrics()
    for version in range(-1, 1000):
        played.note("s", [part([1.0], [version], ordinal=version)])
    assert [v for v in range(1000) if played.of("default", v)["step_reward"].n] == list(
        range(1001 - TOTAL_VERSIONS, 1000)
    )
    assert played.of("default", BEFORE)["episode_return"] == Moments(1, 1.0, 1.0)
    assert played.of("default", None)["step_reward"].n == 0


def test_a_history_counts_each_part_once_whatever_is_repeated(tmp_path: Path) -> None:
    """A part that comes again after a restart is in the file already, or was never counted."""
    sealed = [msgspec.structs.replace(part([1.0], [3], ordinal=at), ordinal=at) for at in range(3)]
    first = VersionMetrics(tmp_path, ["default"])
    first.note("s", sealed[:2])
    first.note("s", sealed[:2])
    again = VersionMetrics(tmp_path, ["default"])
    again.note("s", sealed[:2])
    again.note("s", sealed[2:])
    assert again.of("default", 3)["step_reward"] == Moments(3, 3.0, 3.0)
    again.note("other", sealed)
    assert again.of("default", 3)["step_reward"].n == 6


def test_a_damaged_history_is_named_and_begins_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "history" / "default.json"
    VersionMetrics(tmp_path, ["default"]).note("s", [part([1.0], [3])])
    assert not caplog.messages
    path.write_bytes(path.read_bytes()[:-1])
    assert VersionMetrics(tmp_path, ["default"]).of("default", 3)["step_reward"].n == 0
    assert [str(path) in message for message in caplog.messages] == [True]


def test_imported_columns_count_as_their_parts_do() -> None:
    """The same sums for parts as objects and as columns, returns of long episodes among them."""
    given = [
        part([1.0, 2.0], [-1, -1]),
        part([4.0], [2], ordinal=1, ended=None),
        part([8.0], [2], ordinal=1, number=1),
    ]
    scalars = PartScalars(
        schema_id="s", **{
            name: [getattr(one, name) for one in given]
            for name in (
                "episode_id", "part", "t0", "steps", "policy_id", "agent_id", "ended",
                "training_enabled", "continues", "tags", "ordinal", "episode_ordinal", "agents",
                "final_obs",
            )
        }, info_rows=[], infos=[],
    )  # fmt: skip
    names = [column.name for column in STEP_COLUMNS]
    joined = {name: b"".join(getattr(one, name) for one in given) for name in names}
    lengths = {"obs": b"", "actions": b"", "obs_lengths": b"", "actions_lengths": b""}
    both = VersionMetrics(), VersionMetrics()
    both[0].note("s", given)
    both[1].note("s", [PartColumns(scalars=scalars, **lengths, **joined)])
    assert both[0].history("default") == both[1].history("default")
    assert both[0].of("default", 2)["episode_return"] == Moments(1, 12.0, 144.0)
    assert both[0].of("default", -1)["episode_return"] == Moments(1, 3.0, 9.0)
    both[0].note("s", [msgspec.structs.replace(given[0], source=b"\2\1")])
    assert (both[0].imported("default"), both[1].imported("default")) == (1, 0)
