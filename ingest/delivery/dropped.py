"""Episodes whose events a client does not send, and their counts."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

from ingest.delivery.events import is_late, unsampled_names
from ingest.protocol.agent_names import Name
from ingest.protocol.messages import Decision, End, Event, LogAction


class DroppedEpisodes:
    """Episodes that a full queue has dropped or cut short, and those that are not sampled.

    Their events are dropped until their end. `lock` is the outbox's.
    """

    def __init__(self, lock: threading.RLock) -> None:
        self._lock = lock
        self.names: set[str] = set()
        self._unsampled: set[str] = set()  # those of them that are not sampled
        self.episodes = self.steps = self.rewards = 0
        self.unsampled_episodes = self.unsampled_rewards = 0

    @property
    def total(self) -> tuple[int, int]:
        """Episodes and steps that a full queue has dropped."""
        return self.episodes, self.steps

    def add(self, event: Event) -> None:
        """Drop an event's episode from now on, unless it is a reward for any client's episode."""
        if event.episode_id not in self.names and not is_late(event):
            self.names.add(event.episode_id)
            self.episodes += 1

    def count(self, events: Sequence[Event]) -> None:
        """Count dropped events; forget an episode of one agent after its end."""
        for event in events:
            if event.episode_id in self._unsampled:
                if is_late(event):
                    self.unsampled_rewards += 1
            elif is_late(event):
                self.rewards += 1
            elif isinstance(event, (LogAction, Decision)):
                self.steps += 1
            if isinstance(event, End) and event.agent_id is None:
                self._forget(event.episode_id)

    def _forget(self, episode_id: str) -> None:
        for name in (episode_id, *unsampled_names(episode_id)):
            self.names.discard(name)
            self._unsampled.discard(name)

    def over(self, episode_id: str) -> None:
        """Note that an episode has ended: no more of its events follow."""
        if self.names:
            with self._lock:
                self._forget(episode_id)

    def leave_out(self, names: Iterable[str]) -> None:
        """Note that an episode is not sampled: events under these ids are not sent."""
        with self._lock:
            self.unsampled_episodes += 1
            self.names.update(names)
            self._unsampled.update(names)

    def count_unsampled_reward(self) -> None:
        with self._lock:
            self.unsampled_rewards += 1

    def is_unsampled(self, episode_id: str) -> bool:
        return episode_id in self._unsampled

    def is_dropped(self, name: Name) -> bool:
        """Whether the events of an episode or track are dropped."""
        return (name if isinstance(name, str) else name[0]) in self.names
