"""Parts and episodes refuse values that would break their invariants."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.experience.endings import ENDINGS
from storage.experience.episode import Episode, EpisodeError, Part, encode_tags


def part(steps: int = 3, **changes: Any) -> Part:
    fields: dict[str, Any] = {
        "episode_id": "e1", "part": 0, "t0": 0, "steps": steps, "schema_id": "5c4e3a",
        "obs": bytes(4 * steps), "actions": bytes(8 * steps), "source": bytes(steps),
    }  # fmt: skip
    for name in ("rewards", "action_logp", "policy_version", "pass_prob", "ts", "received_ts"):
        fields[name] = bytes(8 * steps)
    return Part(**{**fields, **changes})


@pytest.mark.parametrize(
    "name",
    ["rewards", "action_logp", "policy_version", "source", "pass_prob", "ts", "received_ts"],
)
def test_every_step_column_has_one_value_per_step(name: str) -> None:
    """A buffer that is a byte short or long is refused, and the episode and column are named."""
    for change in (b"\0", -1):
        good = getattr(part(), name)
        wrong = good + change if isinstance(change, bytes) else good[:change]
        with pytest.raises(EpisodeError, match=f"episode e1: {name}: expected {len(good)} bytes"):
            part(**{name: wrong})


def test_a_part_holds_steps_and_a_known_ending() -> None:
    """No empty part, no ending that is not one of the words."""
    with pytest.raises(EpisodeError, match="1 or more steps"):
        part(0)
    with pytest.raises(EpisodeError, match="unknown ending 'done'"):
        part(ended="done")
    assert [part(ended=word).ended for word in ENDINGS] == list(ENDINGS)


def test_a_track_says_which_steps_of_the_environment_its_own_are() -> None:
    """env_t is there for every step or for none; how many agents there were, only at an end."""
    assert part(env_t=bytes(8 * part().steps)).nbytes == part().nbytes + 8 * part().steps
    with pytest.raises(EpisodeError, match=r"episode e1: env_t: expected .* or none, got 7"):
        part(env_t=bytes(7))
    assert part(ended="truncated", agents=2).agents == 2
    for wrong in ({"agents": 2}, {"ended": "truncated", "agents": 0}):
        with pytest.raises(EpisodeError, match="episode e1: agents: expected 1 or more"):
            part(**wrong)


def test_ordinals_are_given_by_a_copy() -> None:
    """with_ordinals leaves the part as it was; all else is the same; nbytes counts its columns."""
    before = part()
    after = before.with_ordinals(7, 5)
    assert (before.ordinal, before.episode_ordinal) == (-1, -1)
    assert (after.ordinal, after.episode_ordinal) == (7, 5)
    assert after.with_ordinals(-1, -1) == before
    columns = ("rewards", "action_logp", "policy_version", "source", "pass_prob", "ts")
    sizes = [len(getattr(before, name)) for name in (*columns, "received_ts", "obs", "actions")]
    assert before.nbytes == sum(sizes)


def test_an_episode_has_columns_of_one_length() -> None:
    """T is the same for all columns; the return is the sum of the rewards."""
    rewards = np.array([1.0, 0.5])
    with pytest.raises(EpisodeError, match=r"one length, got .*'t': 3"):
        Episode(episode_id="e1", columns={"rewards": rewards, "t": np.arange(3)})
    episode = Episode(episode_id="e1", columns={"rewards": rewards, "t": np.arange(2)})
    assert (len(episode), episode.total_reward) == (2, 1.5)


def test_endings_are_terminated_or_truncated_or_neither() -> None:
    """abandoned and broken count as truncated; an episode that goes on is neither."""
    columns = {"rewards": np.zeros(1)}
    found = {
        word: (episode.terminated, episode.truncated)
        for word in (*ENDINGS, None)
        for episode in [Episode(episode_id="e1", columns=columns, ended=word)]
    }
    cut = (False, True)
    assert found == {
        "terminated": (True, False), "truncated": cut, "abandoned": cut, "broken": cut,
        None: (False, False),
    }  # fmt: skip


@given(st.dictionaries(st.text(max_size=8), st.text(max_size=8), max_size=6))
def test_tags_are_one_json_text(tags: dict[str, str]) -> None:
    """The text holds the tags, and does not depend on their order."""
    text = encode_tags(tags, "e1")
    assert json.loads(text) == tags
    assert encode_tags(dict(reversed(tags.items())), "e1") == text


@pytest.mark.parametrize(
    ("tags", "message"),
    [
        ({str(n): "" for n in range(33)}, "at most 32 tags, got 33"),
        ({"user": 7}, "expected strings"),
        ({7: "user"}, "expected strings"),
        ({"user": "x" * 257}, r"tags\.user: expected at most 256"),
        ({"x" * 257: ""}, "at most 256"),
    ],
)
def test_tags_are_a_few_short_strings(tags: Any, message: str) -> None:
    """Anything else is refused, with the episode named."""
    with pytest.raises(EpisodeError, match=f"episode e1: .*{message}"):
        encode_tags(tags, "e1")
