"""Whole episodes of an import, from their journal event to parts: none of them is ever open."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from functools import lru_cache

from ingest.episodes.journal_events import UNKNOWN_LOGP, Imported, ImportedEpisode
from ingest.episodes.sealed_parts import Finished, Sealed
from storage.experience.episode import UNKNOWN_VERSION, Ending, Part

_LOGP, _PASSED = struct.pack("<d", UNKNOWN_LOGP), struct.pack("<d", 1.0)
_VERSION = struct.pack("<q", UNKNOWN_VERSION)


@lru_cache(maxsize=64)
def _repeated(value: bytes, steps: int) -> bytes:
    """A column of one value: episodes of the same length share it, and its memory."""
    return value * steps


def sealed_episodes(
    event: Imported, row: int, received: int
) -> Iterator[tuple[ImportedEpisode, Sealed, Finished]]:
    """Each episode, its one part, what is remembered of it; `row` is the event's own."""
    total = sum(episode.steps for episode in event.episodes)
    obs, action = len(event.obs) // total, len(event.actions) // total
    came, source = struct.pack("<q", received), bytes([event.source])
    begin = 0
    for episode in event.episodes:
        started, steps, end = episode.started, episode.steps, begin + episode.steps
        numbers = slice(8 * begin, 8 * end)
        received_ts = _repeated(came, steps)
        how: Ending = episode.how  # type: ignore[assignment]  # judged before it was journaled
        part = Part(
            episode_id=started.episode_id,
            part=0,
            t0=0,
            steps=steps,
            schema_id=started.schema_id,
            obs=event.obs[obs * begin : obs * end],
            actions=event.actions[action * begin : action * end],
            rewards=event.rewards[numbers],
            action_logp=event.logp[numbers] or _repeated(_LOGP, steps),
            policy_version=event.versions[numbers] or _repeated(_VERSION, steps),
            source=_repeated(source, steps),
            pass_prob=event.pass_prob[numbers] or _repeated(_PASSED, steps),
            ts=event.ts[numbers] or received_ts,
            received_ts=received_ts,
            ended=how,
            policy_id=started.policy_id,
            training_enabled=started.training_enabled,
            continues=started.continues,
            tags=started.tags,
        )
        finished = Finished(
            started.episode_id,
            started.key,
            started.instance,
            started.start,
            steps + 2,
            how,
            policy_id=started.policy_id,
            schema_id=started.schema_id,
        )
        yield episode, Sealed(started.key, part, (row,), finished=finished), finished
        begin = end
