"""The answer to `GET /v1/episodes/{id}`: the state of an episode and of each of its agents."""

from __future__ import annotations

from ingest.episodes.judge import KnownEpisodes
from ingest.protocol import messages as wire
from ingest.protocol.agent_names import Name, Whole
from storage.experience.endings import ENDINGS


def episode_state(known: KnownEpisodes, episode_id: str) -> wire.EpisodeState | None:
    """Return the state of an episode; None if it is not known."""
    whole = known.wholes.get(episode_id)
    if whole is None:
        alone = _track_state(known, episode_id)
        if alone is None:
            return None
        return wire.EpisodeState(
            episode_id=episode_id,
            state=alone.state,
            next_seq=alone.next_seq,
            steps=alone.steps,
            policy_id=alone.policy_id,
            cause=alone.cause,
        )
    found = {agent: _track_state(known, (episode_id, agent)) for agent in _agents(whole)}
    agents = {agent: track for agent, track in found.items() if track is not None}
    stopped = agents.get(whole.stopped or "")
    return wire.EpisodeState(
        episode_id=episode_id,
        state=_state(whole, agents),
        cause=None if stopped is None else stopped.cause,
        agents=agents,
    )


def _agents(whole: Whole) -> list[str]:
    return [*whole.ended, *whole.open]


def _state(whole: Whole, agents: dict[str, wire.TrackState]) -> str:
    """`open` while an agent acts or may join; otherwise how the episode ended as a whole."""
    states = {track.state for track in agents.values()}
    if whole.stopped is None and (whole.open or not whole.is_complete):
        return "open"
    return next((one for one in ("open", *reversed(ENDINGS)) if one in states), ENDINGS[0])


def _track_state(known: KnownEpisodes, name: Name) -> wire.TrackState | None:
    episode = known.episodes.get(name)
    if episode is not None:
        return wire.TrackState(
            state="open",
            next_seq=episode.next_seq,
            steps=episode.t_next,
            policy_id=episode.started.policy_id,
        )
    ended = known.finished.get(name)
    if ended is None:
        return None
    return wire.TrackState(state=ended.how, next_seq=ended.next_seq, cause=ended.cause or None)
