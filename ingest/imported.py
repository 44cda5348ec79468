"""Whole episodes of an import, from their journal event to parts: none of them is ever open."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from ingest.events import UNKNOWN_LOGP, Imported, ImportedEpisode
from ingest.sealed import Finished, Sealed
from storage.episode import UNKNOWN_VERSION, Ending, Part

_LOGP, _PASSED = struct.pack("<d", UNKNOWN_LOGP), struct.pack("<d", 1.0)
_VERSION = struct.pack("<q", UNKNOWN_VERSION)


def sealed_episodes(
    event: Imported, row: int, received: int
) -> Iterator[tuple[ImportedEpisode, Sealed, Finished]]:
    """Each episode, its one part, what is remembered of it; `row` is the event's own."""
    total = sum(episode.steps for episode in event.episodes)
    obs, action = len(event.obs) // total, len(event.actions) // total
    came = struct.pack("<q", received) * total
    logp, versions = event.logp or _LOGP * total, event.versions or _VERSION * total
    pass_prob, ts = event.pass_prob or _PASSED * total, event.ts or came
    source = bytes([event.source]) * total
    begin = 0
    for episode in event.episodes:
        started, steps, end = episode.started, episode.steps, begin + episode.steps
        numbers = slice(8 * begin, 8 * end)
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
            action_logp=logp[numbers],
            policy_version=versions[numbers],
            source=source[begin:end],
            pass_prob=pass_prob[numbers],
            ts=ts[numbers],
            received_ts=came[numbers],
            ended=how,
            policy_id=started.policy_id,
            training_enabled=started.training_enabled,
            continues=started.continues,
            tags=started.tags,
        )
        finished = Finished(
            started.episode_id, started.key, started.instance, started.start, steps + 2, how
        )
        yield episode, Sealed(started.key, part, (row,), finished=finished), finished
        begin = end
