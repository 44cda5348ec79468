"""Bearer tokens: their scopes, and the rate at which each may send.

A token has the form `hr_<id>_<secret>`. The id is public and names the token in files, logs and
errors. The secret is 256 random bits, and only its SHA-256 is stored. A slow password hash would
not help, because 2^256 values cannot be guessed at any speed, and it would slow down each request.

`wall` is in seconds since the epoch (for expiry), `now` in seconds of a monotonic clock (for
rates).
"""

from __future__ import annotations

import hashlib
import hmac
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from ingest.access import logins
from ingest.protocol.errors import IngestError, Refusal

LOG, ACT, READ, PUBLISH, ADMIN = "log", "act", "weights:read", "weights:publish", "admin"
ERASE = "erase"
SCOPES = (LOG, ACT, READ, PUBLISH, ERASE, ADMIN)
"""Log episodes; get actions and send decisions; read weights; publish weights; erase episodes;
everything else."""
LEDGER = "ledger"
"""A scope that no token can have: without tokens, callers on this machine may read the ledger, but
use no other route of an admin."""

ANY = frozenset(SCOPES)
LOGGING, ACTING, EITHER = frozenset({LOG}), frozenset({ACT}), frozenset({LOG, ACT})
READING, PUBLISHING, ERASING = frozenset({READ}), frozenset({PUBLISH}), frozenset({ERASE})
COUNTING = frozenset({ADMIN, LEDGER})
NOBODY_NEEDED: frozenset[str] = frozenset()
"""Sets of scopes that routes require; one of a set is enough. The last one requires no token."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_ID = re.compile(r"[0-9a-f]{8}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_BAR = "(?:_|%(?:25)*5f)"  # an underscore, percent-encoded any number of times
_SENT = re.compile(
    rf"(hr{_BAR}[0-9a-f]{{8}}){_BAR}[a-z0-9_%-]+|\b([0-9a-f]{{8}}){_BAR}[a-z0-9_%-]{{40,}}", re.I
)
_NOTHING = "0" * 64


class TokenError(IngestError, ValueError):
    """A token cannot be made, found or read; the text says what was expected."""


class Token(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A stored token. Times are in seconds since the epoch; `sha256` is that of the secret.

    `rate`: events per second (a request without events counts as one). `open_episodes`: how many of
    its episodes may be open at once. None: no limit. Raises TokenError for invalid fields.
    """

    id: str
    name: str
    scopes: tuple[str, ...]
    sha256: str
    created: int
    expires: int | None = None
    revoked: int | None = None
    rate: float | None = None
    open_episodes: int | None = None

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise TokenError(
                f"token name: expected 1 to 64 letters, digits, '.', '_' or '-', got "
                f"{self.name!r:.80}"
            )
        unknown = sorted(set(self.scopes) - ANY)
        if unknown or not self.scopes:
            raise TokenError(
                f"token {self.name}: expected scopes among {', '.join(SCOPES)}, got "
                f"{', '.join(unknown) or 'none'}"
            )
        if not (_ID.fullmatch(self.id) and _DIGEST.fullmatch(self.sha256)):
            raise TokenError(
                f"token {self.name}: expected an id of 8 hex digits and a SHA-256 of 64 hex "
                "digits, got something else"
            )
        if self.rate is not None and not 0.0 < self.rate < 1e9:
            raise TokenError(
                f"token {self.name}: rate: expected > 0 and < 1e9 events per second, got "
                f"{self.rate}"
            )
        if self.open_episodes is not None and self.open_episodes < 1:
            raise TokenError(
                f"token {self.name}: open episodes: expected >= 1, got {self.open_episodes}"
            )

    def state(self, wall: float) -> str:
        """`revoked`, `expired` or `live`."""
        if self.revoked is not None:
            return "revoked"
        return "expired" if self.expires is not None and wall >= self.expires else "live"


def hashed(secret: str) -> str:
    """The SHA-256 of a secret, as 64 hex digits."""
    return hashlib.sha256(secret.encode()).hexdigest()


def bearer(token_id: str, secret: str) -> str:
    """The token as a client sends it."""
    return f"hr_{token_id}_{secret}"


def masked(text: str) -> str:
    """A text with the secrets of tokens replaced, because people paste tokens into addresses."""
    return _SENT.sub(lambda found: f"{found[1] or found[2]}_***", text)


@dataclass
class Allowance:
    """A token bucket: its level rises by `rate` per second, up to the larger of `rate` and 1.

    A request is admitted while the level is 1 or more, and then charged for its events. So a large
    batch is admitted as a whole, and later requests wait.
    """

    rate: float
    level: float = field(init=False)
    since: float

    def __post_init__(self) -> None:
        self.level = max(1.0, self.rate)

    def wait(self, now: float) -> float:
        """Seconds until a request is admitted; 0 if it is admitted now."""
        risen = self.level + (now - self.since) * self.rate
        self.level, self.since = min(max(1.0, self.rate), risen), now
        return max(0.0, (1.0 - self.level) / self.rate) if self.level < 1.0 else 0.0

    def charge(self, events: int) -> None:
        self.level -= events


@dataclass(frozen=True)
class Caller:
    """Who makes a request: a token's id ("" without a token), scopes, and limits."""

    token_id: str = ""
    scopes: frozenset[str] = frozenset()
    open_episodes: int | None = None
    allowance: Allowance | None = None
    book: TokenBook | None = field(default=None, repr=False, compare=False)

    def may(self, needed: frozenset[str]) -> bool:
        """Whether the caller has one of the scopes, or none is needed."""
        return not needed or bool(self.scopes & needed)

    def require(self, needed: frozenset[str], what: str) -> None:
        """Raise Refusal (403) unless `may(needed)`; `what` names the request in its text."""
        if not self.may(needed):
            raise Refusal(
                "forbidden",
                f"{what} needs a token with the scope {' or '.join(sorted(needed & ANY))}; this "
                f"caller has {', '.join(sorted(self.scopes & ANY)) or 'none'}",
                token_id=self.token_id or None,
            )

    def require_live(self, wall: float) -> None:
        """Raise Refusal (401) if the token was revoked or has expired since the request began."""
        if self.book is not None:
            self.book.require_live(self.token_id, wall)

    def charge(self, events: int) -> None:
        """Count a request's events against the rate; one was counted at its admission."""
        if self.allowance is not None and events > 1:
            self.allowance.charge(events - 1)


NOBODY = Caller()
LOCAL = Caller(scopes=frozenset({LOG, ACT, READ, LEDGER}))
"""A caller of a collector without tokens: it may log, act and read weights, but not publish."""


class Change(msgspec.Struct, frozen=True):
    """A change of a token between two readings of its file; `what`: `created` or `revoked`."""

    what: str
    token_id: str
    name: str


class TokenBook:
    """The tokens that a collector knows. With at least one, every caller needs a token."""

    def __init__(self) -> None:
        self._tokens: dict[str, Token] = {}
        self._callers: dict[str, Caller] = {}

    @property
    def required(self) -> bool:
        """Whether callers need a token: there is one, possibly revoked."""
        return bool(self._tokens)

    def live(self, wall: float) -> list[Token]:
        return [token for token in self._tokens.values() if token.state(wall) == "live"]

    def replace(self, tokens: Iterable[Token], now: float) -> list[Change]:
        """Use these tokens from now on, and return the changes. Unchanged tokens keep their rate's
        level."""
        before, self._tokens = self._tokens, {token.id: token for token in tokens}
        changes: list[Change] = []
        callers: dict[str, Caller] = {}
        for token in self._tokens.values():
            old = before.get(token.id)
            if old == token:
                callers[token.id] = self._callers[token.id]
                continue
            callers[token.id] = self._caller(token, now)
            if old is None:
                changes.append(Change("created", token.id, token.name))
            if token.revoked is not None and (old is None or old.revoked is None):
                changes.append(Change("revoked", token.id, token.name))
        changes += [
            Change("revoked", old.id, old.name) for old in before.values() if old.id not in callers
        ]
        self._callers = callers
        return changes

    def caller(self, authorization: bytes | None, wall: float) -> Caller:
        """The caller of an `Authorization` header. Raises Refusal (401), without its content.

        Tokens are found by their public id. The secret is compared in constant time, against a
        dummy if the id is unknown.
        """
        if authorization is None:
            raise Refusal(
                "unauthorized", "expected a token: Authorization: Bearer hr_..., got no such header"
            )
        kind, _, text = authorization.decode("latin-1").partition(" ")
        parts = text.strip().split("_", 2)
        if kind.lower() != "bearer" or len(parts) != 3 or parts[0] != "hr":
            raise Refusal(
                "unauthorized", "expected Authorization: Bearer hr_<id>_<secret>, got another form"
            )
        token = self._tokens.get(parts[1])
        known = token.sha256 if token is not None else _NOTHING
        same = hmac.compare_digest(hashed(parts[2]), known)
        if token is None or not same:
            raise Refusal("unauthorized", "expected a token of this collector, got an unknown one")
        self.require_live(token.id, wall)
        return self._callers[token.id]

    def login(self, token_id: str, wall: float) -> tuple[str, int]:
        """The value of a cookie for a token's bearer, and the seconds that it lasts."""
        token = self._tokens[token_id]
        until = min(int(wall) + logins.SECONDS, token.expires or math.inf)
        return logins.signed(token.id, token.sha256, int(until)), int(until) - int(wall)

    def caller_of_login(self, value: str, wall: float) -> Caller:
        """The caller of a cookie. Raises Refusal (401)."""
        found = logins.parsed(value)
        token = None if found is None else self._tokens.get(found[0])
        if found is None or token is None:
            raise Refusal("unauthorized", "expected a login of this collector, got another cookie")
        if not hmac.compare_digest(value, logins.signed(token.id, token.sha256, found[1])):
            raise Refusal("unauthorized", "expected a login of this collector, got a false cookie")
        if found[1] <= wall:
            raise Refusal("unauthorized", "the login is over: log in again", token_id=token.id)
        self.require_live(token.id, wall)
        return self._callers[token.id]

    def require_live(self, token_id: str, wall: float) -> None:
        """Raise Refusal (401) unless there is such a token, neither revoked nor expired."""
        token = self._tokens.get(token_id)
        if token is None:
            text = "expected a token of this collector, got an unknown one"
            raise Refusal("unauthorized", text, token_id=token_id)
        state = token.state(wall)
        if state != "live":
            text = f"expected a live token, but token {token.name} ({token.id}) is {state}"
            raise Refusal("unauthorized", text, token_id=token.id)

    def _caller(self, token: Token, now: float) -> Caller:
        allowance = None if token.rate is None else Allowance(token.rate, since=now)
        scopes = frozenset(token.scopes)
        return Caller(token.id, scopes, token.open_episodes, allowance, book=self)


def require_allowance(caller: Caller, now: float) -> None:
    """Count one event; raise Refusal (429) if the caller's rate does not allow it yet."""
    allowance = caller.allowance
    if allowance is None:
        return
    wait = allowance.wait(now)
    if wait > 0.0:
        raise Refusal(
            "busy",
            f"token {caller.token_id}: expected at most {allowance.rate:g} events per second",
            retry_after=wait,
        )
    allowance.charge(1)
