"""What a refused request has cost is waited off, so that it cannot slow down everybody else.

The event loop looks at one body at a time, and a dear one takes it milliseconds: one of megabytes,
or an import of many rows. That is fair for one that is accepted. For
what is refused for its content there is a rule: *such work of one payer has a hundredth of the
loop's time*. Its cost, beyond a millisecond that each request has free, is owed a hundred times
over, and while a payer owes something

- the answer that says no waits, so that its connection, which sends one request after the other,
  pays for it;
- a dear body of a stranger who shares the payer waits for its turn before it is looked at.

A payer is a token; without tokens everybody is the same one, for a new connection costs nothing. A
stranger is a connection that has not sent a dear body that was accepted since the last one that was
not. No other body waits, nor does a dear one of who is no stranger, or whose payer owes nothing.
One refusal adds a few seconds at most, and a debt has an upper bound.

Time is an argument, in seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Generator
from contextvars import ContextVar
from time import monotonic, perf_counter, thread_time
from typing import Any, Generic, ParamSpec, TypeVar

from ingest.protocol.errors import Refusal

P = ParamSpec("P")
T = TypeVar("T")

SHARE = 0.01
"""Of the loop's time, what may go to bodies that are refused."""

FREE_SECONDS = 0.001
"""Of a request's cost, what is not owed: about what a request costs that is fine."""

LONGEST_SECONDS = 4.0
"""What one refusal adds to a debt, and how long its answer waits, at most."""

PATIENCE_SECONDS = LONGEST_SECONDS + 1.0
"""So long a stranger waits for its turn before it hears 429: one refusal keeps nobody out."""

MOST_OWED_SECONDS = 60.0
"""However much was refused, its payer's strangers are looked at again after so long."""

MAX_KNOWN = 4_096
"""Connections that are remembered as no strangers; the one that was heard of longest ago goes."""


class Toll:
    """Who has to wait, and for how long. `share` of 1 or more asks nothing of anybody."""

    def __init__(self, share: float = SHARE, free: float = FREE_SECONDS) -> None:
        self._share, self._free = share, free
        self._paid_at: dict[str, float] = {}  # payer -> when nothing is owed any more
        self._known: dict[str, None] = {}
        self.charged = 0.0  # seconds of the loop that were owed for, so far

    def wait(self, payer: str, sender: str, now: float) -> float:
        """Seconds until a dear body of that sender may be looked at; 0 for now."""
        return 0.0 if sender in self._known else max(0.0, self._paid_at.get(payer, now) - now)

    def accepted(self, sender: str) -> None:
        """A dear body of that sender was fine, or most of it."""
        self._known.pop(sender, None)
        self._known[sender] = None
        if len(self._known) > MAX_KNOWN:
            del self._known[next(iter(self._known))]

    def estrange(self, sender: str) -> None:
        """A dear body of that sender was refused, or most of it."""
        self._known.pop(sender, None)

    def refused(self, payer: str, cost: float, now: float) -> float:
        """Charge what was refused for its content; answers how long the answer has to wait."""
        owed = max(0.0, cost - self._free)
        if owed == 0.0 or self._share >= 1.0:
            return 0.0
        self.charged += owed
        debt = max(0.0, self._paid_at.get(payer, now) - now)
        debt = min(debt + min(owed / self._share, LONGEST_SECONDS), MOST_OWED_SECONDS)
        self._paid_at[payer] = now + debt
        return min(debt, LONGEST_SECONDS)


class Line:
    """The strangers of each payer, who are looked at one after the other while a toll is owed."""

    def __init__(self, toll: Toll) -> None:
        self._toll = toll
        self._locks: dict[str, asyncio.Lock] = {}  # as many as tokens

    def holds(self, payer: str, sender: str) -> bool:
        """Whether that sender has to wait."""
        return self._toll.wait(payer, sender, monotonic()) > 0.0

    async def turn(self, payer: str, sender: str) -> None:
        """Wait until a dear body of that sender may be looked at. Raises Refusal (busy)."""
        if not self.holds(payer, sender):
            return
        try:
            async with (
                asyncio.timeout(PATIENCE_SECONDS),
                self._locks.setdefault(payer, asyncio.Lock()),
            ):
                while (wait := self._toll.wait(payer, sender, monotonic())) > 0.0:
                    await asyncio.sleep(wait)
        except TimeoutError as error:
            text = "bodies that were refused take their share of the time: try again later"
            raise Refusal("busy", text, retry_after=LONGEST_SECONDS) from error


class Turn:
    """The place of one request in the line, for a handler that finds its work to be dear.

    `dear` says whether it is, by its length or because the handler has asked for a turn.
    """

    def __init__(self, line: Line, payer: str, sender: str, *, dear: bool) -> None:
        self._line, self.payer, self.sender, self.dear = line, payer, sender, dear

    async def __call__(self) -> None:
        """Wait until it may be looked at. Raises Refusal (busy)."""
        self.dear = True
        await self._line.turn(self.payer, self.sender)

    @property
    def is_owed(self) -> bool:
        """Whether it would have to wait."""
        return self._line.holds(self.payer, self.sender)


class AtOnce:
    """The turn of a request that has come by no line."""

    is_owed = False

    async def __call__(self) -> None: ...


class Lane:
    """What is taken one after the other, and not by who owes something."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def entered(self, turn: Turn | AtOnce) -> AsyncIterator[None]:
        """Have the lane alone. Raises Refusal (busy)."""
        while True:
            await turn()
            async with self._lock:
                if turn.is_owed:  # by what was refused while others were ahead
                    continue
                yield
                return


class Metered(Generic[T]):
    """A coroutine to await in its place, and the time that its own steps took of the loop.

    What it does `in_thread` counts, too.
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
    """As `asyncio.to_thread`, for what keeps the interpreter busy: its time is its request's."""

    def run() -> T:
        began = thread_time()
        try:
            return function(*args, **given)
        finally:
            metered = _metered.get()
            if metered is not None:  # it waits for us, so that nobody else adds to it
                metered.seconds += thread_time() - began

    return await asyncio.to_thread(run)
