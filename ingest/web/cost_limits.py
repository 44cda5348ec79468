"""Limits on the CPU time that refused requests can take from the event loop.

The loop handles one body at a time, and a costly one (of many kilobytes, or an import of many rows)
occupies it for milliseconds. That is accepted for valid bodies. Bodies that are refused for their
content have a rate limit: *the refused bodies of one account get at most a hundredth of the loop's
time.*

An account is a token. Without tokens all callers share one, because a new connection costs nothing.
A refused request extends its account's *penalty* by a hundred times its cost beyond a free amount
(1 ms with a costly body, 10 ms with any other), up to a maximum. During the penalty

- the refusal itself is held back, which slows down a connection that sends one request after
  another;
- costly bodies of the account wait before they are read, and get 429 if that takes too long.

A *trusted* connection, whose latest costly body was accepted, does not wait: one faulty process
must not stop the others with the same token. Small bodies and other accounts do not wait either.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from contextvars import ContextVar
from time import monotonic, perf_counter, thread_time
from typing import Any, Generic, ParamSpec, TypeVar

from ingest.protocol.errors import Refusal

P = ParamSpec("P")
T = TypeVar("T")

SHARE = 0.01
"""The share of the loop's time that refused bodies of one account may take."""

FREE_SECONDS, FREE_SMALL_SECONDS = 0.001, 0.01
"""The free cost of a refused request with a costly body, and with any other."""

MAX_HELD_SECONDS = 4.0
"""The most by which one refusal extends a penalty, and for which it is held back."""

MAX_WAIT_SECONDS = MAX_HELD_SECONDS + 1.0
"""How long a costly body waits until it gets 429: longer than a single refusal's penalty."""

MAX_PENALTY_SECONDS = 60.0
"""The longest penalty, after many refusals at once."""

MOSTLY = 0.5
"""The refused share of a costly body above which its connection is not trusted."""

MAX_TRUSTED = 4_096
"""The most trusted connections that are remembered, by the latest accepted body."""


class Penalties:
    """The accounts' penalties, and the trusted connections. Times are in seconds."""

    def __init__(self) -> None:
        self.charged = 0.0  # the total cost of refused requests, beyond the free cost
        self._over: dict[str, float] = {}  # account (at most one per token) -> penalty's end
        self._trusted: dict[str, None] = {}  # in the order of their latest accepted body

    def remaining(self, account: str, connection: str, now: float) -> float:
        """Seconds for which costly bodies of that connection must wait."""
        if connection in self._trusted:
            return 0.0
        return max(0.0, self._over.get(account, now) - now)

    def trust(self, connection: str, trusted: bool) -> None:
        """Note whether the connection's latest costly body was accepted."""
        self._trusted.pop(connection, None)
        if trusted:
            self._trusted[connection] = None
            if len(self._trusted) > MAX_TRUSTED:
                del self._trusted[next(iter(self._trusted))]

    def charge(self, account: str, cost: float, now: float) -> float:
        """Extend the penalty by a cost above the free one; return how long to hold the answer."""
        self.charged += cost
        left = max(0.0, self._over.get(account, now) - now)
        left = min(left + min(cost / SHARE, MAX_HELD_SECONDS), MAX_PENALTY_SECONDS)
        self._over[account] = now + left
        return min(left, MAX_HELD_SECONDS)


class Requester:
    """The sender of one request: the account that is charged, and the connection.

    `is_costly` says whether the body is costly: by its length, or because its handler found it to
    be.
    """

    def __init__(self, penalties: Penalties, account: str = "", connection: str = "") -> None:
        self._penalties, self.account, self.connection = penalties, account, connection
        self.is_costly = False

    @property
    def penalty(self) -> float:
        """Seconds for which a costly body must wait."""
        return self._penalties.remaining(self.account, self.connection, monotonic())

    async def wait(self) -> None:
        """Wait until a costly body may be processed. Raises Refusal (busy)."""
        self.is_costly = True
        until = monotonic() + MAX_WAIT_SECONDS
        while penalty := self.penalty:
            left = until - monotonic()
            if left <= 0.0:
                text = "too much of the collector's time went to refused bodies: try again later"
                raise Refusal("busy", text, retry_after=MAX_HELD_SECONDS)
            await asyncio.sleep(min(penalty, left))

    def settle(self, cost: float, refused: float, accepted: bool) -> float:
        """Charge a request that took `cost` seconds for its refused share, 0 to 1.

        Returns the seconds for which the answer is held back.
        """
        if self.is_costly and (accepted or refused > MOSTLY):
            self._penalties.trust(self.connection, refused <= MOSTLY)
        free = FREE_SECONDS if self.is_costly else FREE_SMALL_SECONDS
        if cost * refused <= free:
            return 0.0
        return self._penalties.charge(self.account, cost * refused - FREE_SECONDS, monotonic())


class Metered(Generic[T]):
    """Await a coroutine, and measure in `seconds` how long it occupies the event loop.

    This includes its own steps and its calls of `in_thread`, but not what other tasks do while it
    waits.
    """

    def __init__(self, inner: Coroutine[Any, Any, T]) -> None:
        self._inner = inner
        self.seconds = 0.0

    def __await__(self) -> Generator[Any, Any, T]:
        _metered.set(self)
        steps = self._inner.__await__()
        send, given = steps.send, None
        while True:
            began = perf_counter()
            try:
                waited_for = send(given)
            except StopIteration as end:
                result: T = end.value
                return result
            finally:
                self.seconds += perf_counter() - began
            send = steps.send
            try:
                given = yield waited_for
            except BaseException as error:  # passes a cancellation on to the coroutine
                send, given = steps.throw, error


_metered: ContextVar[Metered[Any] | None] = ContextVar("metered", default=None)


async def in_thread(function: Callable[P, T], *args: P.args, **given: P.kwargs) -> T:
    """`asyncio.to_thread` whose CPU time counts as the request's (see `Metered`)."""

    def run() -> T:
        began = thread_time()
        try:
            return function(*args, **given)
        finally:
            metered = _metered.get()
            if metered is not None:  # no race: the coroutine waits for this thread
                metered.seconds += thread_time() - began

    return await asyncio.to_thread(run)
