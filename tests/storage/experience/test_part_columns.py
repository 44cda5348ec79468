"""Parts as columns are the same as the parts, in memory and in the block of a shard."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from ingest.episodes.event_checks import REPLAYED
from ingest.episodes.imported import columns_of
from ingest.episodes.journal_events import NO_TIME, ImportedBlock
from storage.experience.part_columns import PartColumns, each_part, parts_in
from storage.shards.part_block import PartBlock, frames_of

LENGTHS = [1, 3, 2]


def block(part_steps: int, *, texts: bool) -> ImportedBlock:
    """Three episodes, whose steps have their number as observation, action and reward."""
    count = sum(LENGTHS)
    numbers = np.arange(count)
    obs = [b"x" * n for n in range(count)] if texts else [bytes([n] * 4) for n in range(count)]
    return ImportedBlock(
        7, "i", "", "default", "s", ["a", "b", "c"],
        starts=np.arange(3).tobytes(),
        lengths=np.array(LENGTHS).tobytes(),
        ended=bytes([0, 1, 0]),
        tags=["{}", '{"k":"v"}', "{}"],
        continues=[],
        training_enabled=[True, False, True],
        final_obs=[None, b"last", None],
        source=REPLAYED,
        obs=b"".join(obs),
        obs_lengths=np.array([*map(len, obs)], np.uint32).tobytes() if texts else b"",
        actions=numbers.tobytes(),
        rewards=numbers.astype(float).tobytes(),
        action_logp=b"",
        policy_version=b"",
        pass_prob=b"",
        ts=np.where(numbers % 2, NO_TIME, numbers).tobytes(),
        infos={2: '{"k": 1}'},
        part_steps=part_steps,
    )  # fmt: skip


@pytest.mark.parametrize("texts", [False, True])
@pytest.mark.parametrize(("part_steps", "sizes"), [(0, LENGTHS), (2, [1, 2, 1, 2])])
def test_columns_are_their_parts(part_steps: int, sizes: list[int], texts: bool) -> None:
    """Every value is in the part of its step; a part of an episode that goes on ends with the next
    observation."""
    columns = columns_of(block(part_steps, texts=texts), 77).with_ordinals(5)
    parts = list(each_part([columns]))
    assert [part.steps for part in parts] == sizes
    assert parts_in(columns) == columns.count == len(parts)
    assert columns.nbytes == sum(part.nbytes for part in parts)
    assert PartBlock.of([columns]) == PartBlock.of(parts)
    joined = [b"".join(pieces) for pieces in frames_of([columns])]
    assert joined == [b"".join(pieces) for pieces in frames_of(parts)]
    assert [part.ordinal for part in parts] == [5 + n for n in range(len(parts))]
    firsts = {part.episode_id: part.ordinal for part in parts if part.part == 0}
    assert all(part.episode_ordinal == firsts[part.episode_id] for part in parts)
    assert sum(part.ended is not None for part in parts) == len(LENGTHS)
    ended = {part.episode_id: (part.ended, part.final_obs) for part in parts if part.ended}
    assert ended == {
        "a": ("terminated", None),
        "b": ("truncated", b"last"),
        "c": ("terminated", None),
    }
    assert [(part.episode_id, part.infos) for part in parts if part.infos] == [
        ("b", {1: '{"k": 1}'})
    ]
    if part_steps:
        assert parts[1].final_obs == (b"xxx" if texts else bytes([3] * 4))
    assert np.frombuffer(parts[1].ts, np.int64)[0] == 77


def test_columns_and_parts_make_one_block() -> None:
    """In their order, whichever comes first."""
    columns = columns_of(block(0, texts=False), 77).with_ordinals(0)
    (alone, *_) = columns.parts()
    later = replace(alone, episode_id="z", ordinal=3, episode_ordinal=3)
    mixed = PartBlock.of([columns, later])
    assert mixed == PartBlock.of([*columns.parts(), later])
    assert isinstance(columns, PartColumns)
    assert mixed.scalars.ordinal == [0, 1, 2, 3]
