"""The numbers of late rewards survive their file, and a damaged one counts nothing."""

from pathlib import Path

import pytest

from storage.declarations.late_rewards import (
    LateReward,
    delay_of,
    late_rewards,
    read_late,
    say_late,
)

KIND = LateReward("default", 3, "an hour", 2)


def test_a_policys_rewards_of_all_collectors_add_up(tmp_path: Path) -> None:
    """By version, delay and action; other policies' are apart."""
    say_late(tmp_path, "one", {KIND: 5, KIND._replace(policy_id="other"): 1})
    say_late(tmp_path, "two", {KIND: 2, KIND._replace(action=None): 4})
    assert read_late(tmp_path, "two") == {KIND: 2, KIND._replace(action=None): 4}
    assert late_rewards(tmp_path, "default") == {KIND: 7, KIND._replace(action=None): 4}
    assert late_rewards(tmp_path / "empty", "default") == {}


@pytest.mark.parametrize("text", ["", "{", '{"late": [[1]]}', '{"late": 3}', "[]"])
def test_a_damaged_file_counts_nothing(tmp_path: Path, text: str) -> None:
    """A judgement goes on without it."""
    (tmp_path / "late").mkdir()
    (tmp_path / "late" / "one.json").write_text(text)
    assert late_rewards(tmp_path, "default") == {}


def test_a_delay_is_at_most_its_word() -> None:
    """The last moment of a word is within it."""
    times = (None, 60.0, 60.1, 3600.0, 86_400.0, 86_401.0)
    words = ["unknown", "a minute", "an hour", "an hour", "a day", "longer"]
    assert [delay_of(seconds) for seconds in times] == words
