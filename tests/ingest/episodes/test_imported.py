"""Episodes of an import, from their journal event to parts, including pieces of long ones."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from ingest.episodes.event_checks import REPLAYED
from ingest.episodes.imported import Staged, parts_of
from ingest.episodes.journal_events import NO_TIME, Imported, ImportedEpisode, Started

RECEIVED = 77


def started(key: int) -> Started:
    return Started(key, f"e{key}", "i", key, "default", "s", True, "{}", None, None)


def event(episodes: list[ImportedEpisode], part_steps: int = 0, first: int = 0) -> Imported:
    """Steps from a first one on, whose observations, actions and rewards are their numbers."""
    count = sum(episode.steps for episode in episodes)
    numbers = np.arange(first, first + count)
    return Imported(
        episodes,
        REPLAYED,
        obs=numbers.astype(np.float32).tobytes(),
        actions=numbers.tobytes(),
        rewards=numbers.astype(np.float64).tobytes(),
        action_logp=b"",
        policy_version=b"",
        pass_prob=b"",
        ts=np.where(numbers % 2, NO_TIME, numbers).tobytes(),
        infos={1: '{"k": 1}'},
        part_steps=part_steps,
    )


@pytest.mark.parametrize("part_steps", [0, 2])
def test_each_step_is_in_one_part(part_steps: int) -> None:
    """A part ends with the observation with which the next one begins."""
    given = event([ImportedEpisode(started(n), n + 1, "terminated") for n in range(5)], part_steps)
    found = {episode.started.key: parts for episode, parts in parts_of(given, RECEIVED)}
    sizes = {0: [1], 1: [2], 2: [2, 1], 3: [2, 2], 4: [2, 2, 1]} if part_steps else {
        n: [n + 1] for n in range(5)
    }  # fmt: skip
    assert {key: [part.steps for part in parts] for key, parts in found.items()} == sizes
    parts = [part for key in range(5) for part in found[key]]
    assert b"".join(part.rewards for part in parts) == given.rewards
    assert b"".join(part.obs for part in parts) == given.obs
    times = np.frombuffer(b"".join(part.ts for part in parts), np.int64)
    assert times.tolist() == [n if n % 2 == 0 else RECEIVED for n in range(15)]
    assert [(part.episode_id, part.infos) for part in parts if part.infos] == [
        ("e1", {0: '{"k": 1}'})
    ]
    for _, episode in found.items():
        for part, after in pairwise(episode):
            assert part.final_obs == after.obs[:4]
            assert part.t0 + part.steps == after.t0
        assert episode[-1].final_obs is None


def test_pieces_make_the_parts_of_one_episode() -> None:
    """The pieces of an episode are sealed together, each with its own row; the last may be an end
    without a step."""
    staged, pieces = Staged(), ((3, "", 0), (2, "", 3), (0, "broken", 5))
    for row, (steps, how, t0) in enumerate(pieces, 10):
        episode = ImportedEpisode(started(7), steps, how, t0, "why")
        ((_, parts),) = parts_of(event([episode], 2, t0), RECEIVED)
        staged.add(parts, row, 4)
    sealed, finished = staged.sealed(episode, 12)
    assert [(item.number, item.rows) for item in sealed] == [(0, (10,)), (1, (10,)), (2, (11, 12))]
    parts = [item.part for item in sealed if item.part is not None]
    assert [(part.t0, part.steps, part.ended) for part in parts] == [
        (0, 2, None),
        (2, 1, None),
        (3, 2, "broken"),
    ]
    assert [part.final_obs for part in parts] == [parts[1].obs[:4], parts[2].obs[:4], None]
    assert (finished.next_seq, finished.how, finished.cause) == (7, "broken", "why")
    assert [item.finished for item in sealed] == [None, None, finished]
