"""Errors of clients and the collector.

IngestError
├── Refusal           a rejected request or event: a code, an HTTP status, the place in the request
├── ClientError       PolicyClient cannot use the collector
│   ├── CollectorUnavailable   no answer in time; nothing queued is lost
│   └── BufferFull             the bounded queue is full, and the client is set to raise
├── ServingStopped    the program behind an ExternalEnv, or its worker, has ended
├── TokenError        (ingest.access.tokens) a token cannot be made, found or read
├── ImportFailed      a log cannot be imported: the file, its columns, or the options
├── ServeError        (ingest.server.listening) the collector cannot start; says what to change
└── CollectorFailed   the journal failed: the collector must stop and replay it

A Refusal is also a ValueError, which users of PolicyClient expect for a wrong call ("Episode X not
found.").
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ingest.protocol.agent_names import label, name_in


class IngestError(Exception):
    """The root of this package's errors."""


STATUS = {
    "malformed": 400,
    "unauthorized": 401,
    "forbidden": 403,
    "not_found": 404,
    "no_route": 404,
    "method_not_allowed": 405,
    "too_slow": 408,
    "completed": 409,
    "already_started": 409,
    "conflict": 409,
    "pinned": 409,
    "gap": 409,
    "abandoned": 409,
    "broken": 409,
    "no_action": 409,
    "window_closed": 409,
    "unknown_instance": 409,
    "decision_unknown": 409,
    "too_large": 413,
    "unsupported_media": 415,
    "invalid": 422,
    "other_schema": 422,
    "busy": 429,
    "header_too_large": 431,
    "draining": 503,
    "no_version": 503,
    "disk_full": 507,
}
"""The HTTP status of each error code of the wire protocol."""


MESSAGE_CHARACTERS, PATH_CHARACTERS = 1_000, 200
"""Upper bounds of a refusal's texts, which are stored, logged and sent, and may quote a request."""


@dataclass(eq=False)
class Refusal(IngestError, ValueError):
    """A refused request or event.

    `code` is a key of `STATUS`. `path` is the place in the request (`$.events[3].obs`; for an event
    that a client logged, `obs`). `agent_id` is the track in an episode of several agents,
    `expected_seq` the sequence number that was expected at a gap or conflict. `retry_after` is in
    seconds. `token_id` is the rejected caller's token, for the audit line; it is not sent. Of a
    refused reward for a named step, a client adds the `step` and the `reward_id`.
    """

    code: str
    message: str
    path: str | None = None
    episode_id: str | None = None
    expected_seq: int | None = None
    retry_after: float | None = None
    agent_id: str | None = None
    token_id: str | None = None
    step: int | None = None
    reward_id: str | None = None

    def __post_init__(self) -> None:
        self.message = _cut(self.message, MESSAGE_CHARACTERS)
        if self.path is not None:
            self.path = _cut(self.path, PATH_CHARACTERS)
        self.args = (self.code, self.message, self.path)  # `args` would keep the uncut texts

    @property
    def status(self) -> int:
        """The HTTP status of the code."""
        return STATUS[self.code]

    @property
    def breaks_episode(self) -> bool:
        """Whether an event's content was refused; an episode sent in batches is then broken."""
        return self.status in (400, 422)

    def with_broken_episode(self) -> Refusal:
        """The same refusal, which also says that the event's episode has ended."""
        end = "; the episode has ended as broken"
        return replace(self, message=_cut(self.message, MESSAGE_CHARACTERS - len(end)) + end)

    def to_json(self) -> dict[str, Any]:
        """The error as JSON: `ErrorBody` without the fields that are None."""
        fields = {
            "code": self.code,
            "message": self.message,
            "path": self.path,
            "episode_id": self.episode_id,
            "expected_seq": self.expected_seq,
            "retry_after": self.retry_after,
            "agent_id": self.agent_id,
        }
        return {key: value for key, value in fields.items() if value is not None}

    def __str__(self) -> str:
        text = f"{self.path}: {self.message}" if self.path else self.message
        if self.step is None or repr(self.reward_id) in self.message:
            return text
        return f"reward {self.reward_id!r} of step {self.step}: {text}"


def _cut(text: str, characters: int) -> str:
    return text if len(text) <= characters else text[: characters - 4] + " ..."


class ClientError(IngestError):
    """The collector cannot be used as requested; the text says why."""


class CollectorUnavailable(ClientError, ConnectionError):
    """No usable answer from the collector in time.

    `maybe_applied` is False if the request certainly had no effect: no connection was made, or the
    collector rejected the request for the moment. `retry_after` is in seconds.
    """

    def __init__(
        self, message: str, *, maybe_applied: bool = True, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.maybe_applied = maybe_applied
        self.retry_after = retry_after


class BufferFull(ClientError):
    """The client's queue of events is full."""


class ServingStopped(IngestError):
    """The program behind an ExternalEnv, or the worker that served it, has ended."""


class ImportFailed(IngestError):
    """A log cannot be imported because of its file, its columns or the options."""


class CollectorFailed(IngestError):
    """The journal failed: the collector must be restarted, and replays the journal then."""


def not_found(episode_id: str, agent_id: str | None = None) -> Refusal:
    text = f"Episode {label(name_in(episode_id, agent_id))} not found."
    return Refusal("not_found", text, episode_id=episode_id, agent_id=agent_id)


def completed(episode_id: str, agent_id: str | None = None) -> Refusal:
    text = f"Episode {label(name_in(episode_id, agent_id))} has already completed."
    return Refusal("completed", text, episode_id=episode_id, agent_id=agent_id)


def erased(episode_id: str) -> Refusal:
    text = f"Episode {episode_id} was erased, and nothing of it is accepted any more."
    return Refusal("completed", text, episode_id=episode_id)


def already_started(episode_id: str, agent_id: str | None = None) -> Refusal:
    text = f"Episode {label(name_in(episode_id, agent_id))} is already started"
    return Refusal("already_started", text, episode_id=episode_id, agent_id=agent_id)


def disk_full() -> Refusal:
    return Refusal(
        "disk_full",
        "the disk is full: nothing was acknowledged, retry later",
        retry_after=2.0,
    )
