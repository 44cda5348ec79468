"""Broken builds around episodes of several agents."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from ingest.collector import adoption, recovery
from ingest.episodes import assembler
from ingest.episodes import journal_events as events
from ingest.episodes.assembler import EpisodeAssembler
from ingest.episodes.journal_events import Acted, JournalEvent, Row, Started
from tests.faults.mutants import Patch, mutant


def _replayed(patch: Patch, lost: Callable[[JournalEvent], JournalEvent]) -> None:
    """A start replays every event after `lost` has changed it."""
    decode = patch.original(events, "decode_row")

    def poorer(blob: bytes) -> Row:
        row: Row = decode(blob)
        return msgspec.structs.replace(row, events=[lost(event) for event in row.events])

    patch.replace(recovery, "decode_row", poorer)


@mutant(simulation=("failed", "misplaced"))
def agents_forgotten_at_replay(patch: Patch) -> None:
    """A start replays every agent's track as an episode of one agent."""
    _replayed(
        patch,
        lambda event: (
            msgspec.structs.replace(event, agent_id=None) if isinstance(event, Started) else event
        ),
    )


@mutant(simulation="misplaced", crash="misplaced")
def env_t_lost_at_replay(patch: Patch) -> None:
    """A start replays an agent's actions without the step of the environment."""
    _replayed(
        patch,
        lambda event: (
            msgspec.structs.replace(event, env_t=-1) if isinstance(event, Acted) else event
        ),
    )


@mutant(simulation="apart")
def tracks_abandoned_alone(patch: Patch) -> None:
    """An agent that waits for its turn is abandoned while the others go on."""
    tick = patch.original(EpisodeAssembler, "tick")

    def alone(self: EpisodeAssembler, now: float) -> Iterator[Any]:
        for episode in list(self.episodes.values()):
            silent = now - episode.seen >= episode.rules.declaration.episode_timeout
            if episode.whole is not None and silent:
                yield assembler._closed(episode, "abandoned")
        yield from tick(self, now)

    patch.replace(EpisodeAssembler, "_is_silent", lambda self, name, whole, now: False)
    patch.replace(EpisodeAssembler, "tick", alone)


@mutant(restore="doubled")
def found_tracks_taken_for_one(patch: Patch) -> None:
    """`adopt` looks for an agent's parts under the name of the episode alone."""
    patch.replace(adoption, "_name_of", lambda part: part.episode_id)


@mutant(soak=("blocks", "objects"))
def whole_episodes_never_forgotten(patch: Patch) -> None:
    """The shared state of an episode's tracks is kept after the tracks are forgotten."""
    patch.replace(EpisodeAssembler, "_forget_track", lambda self, finished: None)
