"""Limits on the processor time that refused requests can take from the event loop.

The loop handles one body at a time, and a costly one (of many kilobytes, or an import of many rows)
keeps it for milliseconds. For a body that is accepted that is fair. What is refused for its content
has a rate limit: *the refused bodies of one account get at most a hundredth of the loop's time.*

An account is a token. Without tokens all callers share one, because a new connection costs nothing.
A refused request lengthens its account's *penalty* by a hundred times what it cost beyond a free
millisecond, up to a maximum. While the penalty lasts

- the refusal itself is held back, so that a connection that sends one request after another slows
  down;
- costly bodies of the account wait before they are read, and get 429 when that takes too long.

A *trusted* connection, whose latest costly body was accepted, does not wait: one faulty process
must not stop the others that have its token. Neither do small bodies, nor other accounts.
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
"""Of the loop's time, what refused bodies of one account may take."""

FREE_SECONDS, FREE_SMALL_SECONDS = 0.001, 0.01
"""What a refused request may cost without a penalty: a costly body, and any other."""

MAX_HELD_SECONDS = 4.0
"""By how much one refusal lengthens a penalty, and for how long it is held back, at most."""

MAX_WAIT_SECONDS = MAX_HELD_SECONDS + 1.0
"""So long a costly body waits before it gets 429: a single refusal's penalty is over by then."""

MAX_PENALTY_SECONDS = 60.0
"""The longest penalty, of many refused at once."""

MOSTLY = 0.5
"""A connection whose costly body was refused by more than this part of it is not trusted."""

MAX_TRUSTED = 4_096
"""Trusted connections that are remembered; the one that was accepted longest ago goes."""


class Penalties:
    """The accounts' penalties, and the connections that are trusted. Time in seconds."""

    def __init__(self) -> None:
        self.charged = 0.0  # what refused requests cost so far, beyond what is free
        self._over: dict[str, float] = {}  # account -> when its penalty is over; as many as tokens
        self._trusted: dict[str, None] = {}  # ordered by when each was accepted last

    def remaining(self, account: str, connection: str, now: float) -> float:
        """For how long a costly body of that connection must not be looked at; 0: not at all."""
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
        """Lengthen the penalty by a cost that is not free; answers how long to hold the refusal."""
        self.charged += cost
        left = max(0.0, self._over.get(account, now) - now)
        left = min(left + min(cost / SHARE, MAX_HELD_SECONDS), MAX_PENALTY_SECONDS)
        self._over[account] = now + left
        return min(left, MAX_HELD_SECONDS)


class Requester:
    """Who sends one request: the account that is charged, and the connection.

    `is_costly` says whether the body is: because of its length, or because its handler found so.
    """

    def __init__(self, penalties: Penalties, account: str = "", connection: str = "") -> None:
        self._penalties, self.account, self.connection = penalties, account, connection
        self.is_costly = False

    @property
    def penalty(self) -> float:
        """Seconds for which a costly body must not be looked at."""
        return self._penalties.remaining(self.account, self.connection, monotonic())

    async def wait(self) -> None:
        """Wait until a costly body may be looked at. Raises Refusal (busy)."""
        self.is_costly = True
        until = monotonic() + MAX_WAIT_SECONDS
        while penalty := self.penalty:
            left = until - monotonic()
            if left <= 0.0:
                text = "too much of the collector's time went to refused bodies: try again later"
                raise Refusal("busy", text, retry_after=MAX_HELD_SECONDS)
            await asyncio.sleep(min(penalty, left))

    def settle(self, cost: float, refused: float, accepted: bool) -> float:
        """Charge a request that took `cost` seconds for the part of it that was refused, 0 to 1.

        Answers for how many seconds its answer is held back.
        """
        if self.is_costly and (accepted or refused > MOSTLY):
            self._penalties.trust(self.connection, refused <= MOSTLY)
        free = FREE_SECONDS if self.is_costly else FREE_SMALL_SECONDS
        if cost * refused <= free:
            return 0.0
        return self._penalties.charge(self.account, cost * refused - FREE_SECONDS, monotonic())


class Metered(Generic[T]):
    """Await a coroutine, and measure the time that it takes of the loop, in `seconds`.

    That is the time of its own steps and of what it does `in_thread`, not that of others while it
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
            except BaseException as error:  # a cancellation goes to what waits
                send, given = steps.throw, error


_metered: ContextVar[Metered[Any] | None] = ContextVar("metered", default=None)


async def in_thread(function: Callable[P, T], *args: P.args, **given: P.kwargs) -> T:
    """`asyncio.to_thread`, whose processor time counts as the request's (see `Metered`)."""

    def run() -> T:
        began = thread_time()
        try:
            return function(*args, **given)
        finally:
            metered = _metered.get()
            if metered is not None:  # it waits for us, so that nobody else adds to it
                metered.seconds += thread_time() - began

    return await asyncio.to_thread(run)
