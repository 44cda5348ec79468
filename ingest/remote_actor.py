"""`get_action` in remote mode: the collector's live policy acts, and records the decision.

What is queued of an episode travels with the request for its next action. An answer that was lost
can be asked for again, with the same observation.
"""

from __future__ import annotations

from collections.abc import Mapping
from time import time_ns
from typing import Any

from ingest.client_book import ClientEpisode, EpisodeBook
from ingest.errors import ClientError, CollectorUnavailable, Refusal
from ingest.outbox import Outbox
from ingest.sender import Sender
from ingest.transport import refusal_from_json
from ingest.wire import ActionReply, GetAction

_ENDING = frozenset(
    {"completed", "abandoned", "broken", "not_found", "conflict", "gap", "unknown_instance"}
)


class RemoteActor:
    """Asks for the actions of one client. `durable`: the collector keeps what it acknowledges."""

    def __init__(self, book: EpisodeBook, outbox: Outbox, sender: Sender, timeout: float) -> None:
        self._book = book
        self._outbox = outbox
        self._sender = sender
        self._timeout = timeout
        self.durable = True

    def act(self, observations: dict[str, Any]) -> dict[str, Any]:
        """Actions for some episodes by one request."""
        episodes = {name: self._book.find(name, answered=False) for name in observations}
        wanted = {
            name: self._request(episode, observations[name]) for name, episode in episodes.items()
        }
        for episode in episodes.values():
            episode.step = None  # what is queued of it now travels with this request
        since = min((episode.since for episode in episodes.values()), default=0)
        end = self._outbox.end
        try:
            replies = self._sender.act(wanted, since, self.durable, self._timeout)
        except CollectorUnavailable as error:
            if error.maybe_applied:
                for name, episode in episodes.items():
                    episode.unanswered = wanted[name]
            raise
        except TimeoutError as error:
            raise TimeoutError(
                f"Episode {', '.join(episodes)}: no action in time: {error}"
            ) from error
        self._raise_refused(episodes, wanted, replies)
        for episode in episodes.values():
            episode.seq += 1
            episode.acted = True
            episode.unanswered = None
            episode.since = end
        return {
            name: episode.policy.action_value(replies[name].action)
            for name, episode in episodes.items()
        }

    def _request(self, episode: ClientEpisode, observation: Any) -> GetAction:
        name = episode.episode_id
        obs = episode.policy.observe(name, observation)
        before = episode.unanswered
        if before is None:
            return GetAction(episode_id=name, seq=episode.seq, obs=obs, ts=time_ns() // 1000)
        if before.obs != obs:
            raise ClientError(
                f"Episode {name}: the answer to its last get_action was lost; expected the same "
                f"observation again"
            )
        return before

    def _raise_refused(
        self,
        episodes: Mapping[str, ClientEpisode],
        wanted: Mapping[str, GetAction],
        replies: Mapping[str, ActionReply],
    ) -> None:
        """Raise the first refusal of a request, leaving every episode able to repeat it."""
        first: Refusal | None = None
        for name, episode in episodes.items():
            error = replies[name].error
            if error is None:
                continue
            refusal = episode.error or refusal_from_json(error)
            first = first or refusal
            if refusal.code in _ENDING:
                self._book.end(name, refusal)
        if first is None:
            return
        for name, episode in episodes.items():
            if replies[name].error is None:
                episode.unanswered = wanted[name]
        raise first
