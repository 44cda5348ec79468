"""The steps that all logging calls share, for episodes of one agent or of several.

A call finds its policy and the policy's spaces (`PolicyLookup`), checks and encodes its values, and
queues its events (`Queueing`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ingest.client.open_episodes import EpisodeBook
from ingest.delivery.declarations import ClientPolicy, Declarations
from ingest.delivery.events import too_large
from ingest.delivery.outbox import Outbox
from ingest.delivery.sender import Sender
from ingest.protocol.agent_names import name_in
from ingest.protocol.errors import CollectorUnavailable, Refusal


class PolicyLookup:
    """Finds policies by id, and waits for their declarations; `default` is used without an id.

    A logging call waits at most `max_wait` seconds, a call that needs an answer `timeout` seconds.
    After one of a kind has waited in vain, none waits: a collector that does not answer delays one
    call, not each.
    """

    def __init__(
        self,
        declarations: Declarations,
        outbox: Outbox,
        sender: Sender,
        *,
        default: str | None,
        timeout: float,
        max_wait: float,
    ) -> None:
        self._declarations, self._outbox, self._sender = declarations, outbox, sender
        self._default, self._timeout, self._max_wait = default, timeout, max_wait
        self._is_patient = True
        self._has_waited = False  # for an answer, in vain

    def find(self, policy_id: str | None) -> ClientPolicy:
        """A policy, whose declaration may not be known yet. Raises ValueError."""
        name = self._default if policy_id is None else policy_id
        if name is not None and not isinstance(name, str):
            raise ValueError(f"policy_id: expected the id of one policy, got {name!r:.80}")
        policy = self._declarations.policy(name)
        if not policy.is_settled:
            self._sender.ensure_running()
            self._outbox.ask()
            if self._is_patient:
                self._is_patient = self._outbox.wait_until(
                    lambda: policy.is_settled, self._max_wait
                )
        if policy.error is not None:
            raise ValueError(policy.error)
        return policy

    def require_declared(self, policy: ClientPolicy) -> None:
        """Wait until a policy's declaration is known. Raises ValueError, ClientError."""
        if policy.is_declared:
            self._has_waited = False
            return
        try:
            timeout = 0.0 if self._has_waited else self._timeout
            self._sender.connect(timeout, lambda: policy.is_settled)
        except CollectorUnavailable:
            self._has_waited = True
            raise
        self._has_waited = False
        if policy.error is not None:
            raise ValueError(policy.error)

    def find_declared(self, policy_id: str | None) -> ClientPolicy:
        """A policy, once its declaration is known. Raises ValueError, ClientError."""
        policy = self.find(policy_id)
        self.require_declared(policy)
        return policy


class Queueing:
    """Queues events that fit in a request, and keeps the sender running.

    `sync_timeout`: seconds that `settle` waits for the acknowledgement; None: it does not wait.
    """

    def __init__(
        self, outbox: Outbox, sender: Sender, book: EpisodeBook, sync_timeout: float | None
    ) -> None:
        self._outbox, self._sender, self._book = outbox, sender, book
        self._sync_timeout = sync_timeout

    def put(self, event: Any, size: int, *, draft: bool = False) -> int:
        """Queue one event; return its index. Raises BufferFull, ClientError, ValueError."""
        self.require_room(event.episode_id, size)
        return self._outbox.put(event, size, draft=draft)

    def require_room(self, episode_id: str, size: int) -> None:
        """Raise ValueError for an event that exceeds a request, ClientError without a sender."""
        largest = self._outbox.request_bytes
        if size > largest:
            raise too_large(episode_id, size, largest)
        if not self._sender.running:
            self._sender.ensure_running()

    def put_started(self, events: Sequence[Any]) -> int:
        """Queue an episode's first events together; return the index of the first."""
        size = sum(len(event.obs) + len(event.action) for event in events[1:2])
        self.require_room(events[0].episode_id, size)
        return self._outbox.put_all(events)[0]

    def settle(self, episode_id: str) -> None:
        """With `sync`: wait for the acknowledgement, and raise the episode's Refusal, if any."""
        if self._sync_timeout is None:
            return
        try:
            self._sender.flush(self._sync_timeout)
        except TimeoutError as error:
            raise TimeoutError(f"Episode {episode_id}: {error}") from error
        except Refusal as refusal:
            self._book.note_seen(name_in(episode_id, refusal.agent_id))
            raise
