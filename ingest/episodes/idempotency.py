"""The `Idempotency-Key` of single calls, for callers that do not number their events.

A key belongs to one token and one episode. It is in the journal row of its event, so that both are
stored or neither. The same key with the same content is a retry, with other content a conflict. The
content is the message as sent, without redacted values. A collector remembers its latest keys up to
a count, even after their episodes have ended.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict, deque
from collections.abc import Iterable
from typing import Any

import msgspec

from ingest.episodes.journal_events import Keyed, encode_event
from ingest.episodes.open_episode import OpenEpisode
from ingest.protocol import messages as wire
from ingest.protocol.agent_names import Name, name_of
from ingest.protocol.errors import Refusal

STATE = "idem:"
MAX_KEYS = 65_536
"""The number of keys that are remembered; earlier keys are taken for new ones."""

MAX_LENGTH = 200

_encode = msgspec.msgpack.Encoder().encode
decode_keys = msgspec.msgpack.Decoder(list[Keyed]).decode


class Given(msgspec.Struct, frozen=True):
    """The key of a call. `digest` identifies the call's content, `track` the episode and agent.

    `name` is the key, preceded by the id of the caller's token.
    """

    episode_id: str
    track: Name
    name: str
    digest: bytes

    @property
    def key(self) -> str:
        """The key as it was sent."""
        return self.name.rpartition("\n")[2]

    @classmethod
    def of(cls, key: str, instance: str | None, message: Any, token_id: str = "") -> Given:
        """Return the key of a call; `message` is redacted already. Raises Refusal."""
        digest = hashlib.blake2b(_content(instance, message), digest_size=16).digest()
        name = f"{token_id}\n{key}" if token_id else key  # headers cannot contain line ends
        return cls(message.episode_id, name_of(message), name, digest)


def _content(instance: str | None, message: Any) -> bytes:
    """Encode the content of a call. Raises Refusal if it cannot be encoded."""
    content = [instance, message]
    try:
        try:
            return wire.encode(content, wire.MSGPACK)
        except OverflowError:  # msgpack's integers have 64 bits, JSON's any number
            return wire.encode(content, wire.JSON)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        text = f"expected values that can be encoded: {error}"
        raise Refusal("invalid", text, "$", message.episode_id) from error


def key_of(given: bytes | None) -> str | None:
    """Parse the header's value; None without one. Raises Refusal."""
    if given is None:
        return None
    if not 1 <= len(given) <= MAX_LENGTH:
        text = f"expected 1 to {MAX_LENGTH} characters, got {len(given)}"
        raise Refusal("invalid", text, "Idempotency-Key")
    return given.decode("latin-1")


def require_none(given: bytes | None, instead: str) -> None:
    """Raise Refusal for a key on a call that does not support keys: its caller relies on it."""
    if given is not None:
        text = f"expected none on this call, which it does not protect: {instead}"
        raise Refusal("invalid", text, "Idempotency-Key")


def episode_of(name: str, token_id: str) -> str:
    """The id of an episode that is started without one; a retry with the same key gets the same."""
    return hashlib.blake2b(f"{token_id}\n{name}".encode(), digest_size=16).hexdigest()


class KeyBook:
    """The known keys: those in journal rows, and older ones in the journal's state."""

    def __init__(self, limit: int = MAX_KEYS) -> None:
        self._limit = limit
        self._known: OrderedDict[tuple[str, str], Keyed] = OrderedDict()
        self._next = 0
        self._fresh: list[Keyed] = []  # not yet in the journal's state
        self._chunks: deque[tuple[str, int]] = deque()  # (state key, keys in it), oldest first
        self._kept = 0  # keys in all chunks

    def __len__(self) -> int:
        return len(self._known)

    @property
    def chunks(self) -> int:
        """The number of entries in the journal's state that hold keys."""
        return len(self._chunks)

    def find(self, given: Given) -> Keyed | None:
        """Return the earlier use of a key, None for a new one. Raises Refusal for other content."""
        known = self._known.get((given.episode_id, given.name))
        if known is not None and known.digest != given.digest:
            raise Refusal(
                "conflict",
                f"Idempotency-Key {given.key!r} of Episode {given.episode_id} was used with other "
                "content: use a new key for a new call",
                "Idempotency-Key",
                given.episode_id,
            )
        return known

    def note(self, given: Given, episode: OpenEpisode | None) -> bytes:
        """Remember a key of `episode`'s latest event; return the encoded journal event."""
        seq = -1 if episode is None else episode.open_seq
        event = Keyed(self._next, given.episode_id, given.name, given.digest, seq)
        self.add(event)
        return encode_event(event)

    def add(self, event: Keyed) -> None:
        """Apply a journal event; does nothing if the key is in the journal's state."""
        if event.number >= self._next:
            self._fresh.append(event)
            self._add(event)

    def _add(self, event: Keyed) -> None:
        self._next = event.number + 1
        self._known[event.episode_id, event.name] = event
        while len(self._known) > self._limit:
            self._known.popitem(last=False)

    def restore(self, chunks: Iterable[tuple[str, bytes]]) -> None:
        """Restore the keys from the journal's state, before rows are replayed."""
        for name, blob in sorted(chunks):
            events = decode_keys(blob)
            self._chunks.append((name, len(events)))
            self._kept += len(events)
            for event in events:
                self._add(event)

    def state(self) -> tuple[dict[str, bytes], list[str]]:
        """Return (state entries to store, state keys to delete) before journal rows are deleted."""
        if not self._fresh:
            return {}, []
        name, count, gone = f"{STATE}{self._fresh[0].number:016}", len(self._fresh), list[str]()
        blob, self._fresh = _encode(self._fresh), []
        self._chunks.append((name, count))
        self._kept += count
        while self._kept - self._chunks[0][1] >= self._limit:
            old, number = self._chunks.popleft()
            self._kept -= number
            gone.append(old)
        return {name: blob}, gone
