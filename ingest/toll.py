"""What a refused request has cost is waited off, so that it cannot slow down everybody else.

The event loop looks at one body at a time, and a body of megabytes takes it milliseconds. That is
fair for one that is accepted. For what is refused for its content there is a rule: *such work has a
hundredth of the loop's time*. Its cost, beyond a millisecond that each request has free, is owed a
hundred times over, and while something is owed

- the answer that says no waits, so that its connection, which sends one request after the other,
  pays for it;
- a long body of a stranger waits for its turn before it is looked at, one after the other.

A stranger is whoever has not sent a long body that was accepted since the last one that was not: a
token, or where there are none a connection. A short body never waits, nor does a long one of who
is no stranger.

Time is an argument, in seconds.
"""

from __future__ import annotations

from collections.abc import Coroutine, Generator
from time import perf_counter
from typing import Any, Generic, TypeVar

T = TypeVar("T")

SHARE = 0.01
"""Of the loop's time, what may go to long bodies that are refused."""

FREE_SECONDS = 0.001
"""Of a request's cost, what is not owed: about what a request costs that is fine."""

LONGEST_SECONDS = 4.0
"""Nobody waits for longer: a stranger hears 429, a refused one its answer."""

MAX_KNOWN = 4_096
"""Payers that are remembered as no strangers; the one that was heard of longest ago goes."""


class Toll:
    """Who has to wait, and for how long. `share` of 1 or more asks nothing of anybody."""

    def __init__(self, share: float = SHARE, free: float = FREE_SECONDS) -> None:
        self._share, self._free = share, free
        self._paid_at = float("-inf")  # when nothing is owed any more
        self._known: dict[str, None] = {}
        self.charged = 0.0  # seconds of the loop that were owed for, so far

    def wait(self, payer: str, now: float) -> float:
        """Seconds until a long body of that payer may be looked at; 0 for now."""
        return 0.0 if payer in self._known else max(0.0, self._paid_at - now)

    def accepted(self, payer: str) -> None:
        """A long body of that payer was fine."""
        self._known.pop(payer, None)
        self._known[payer] = None
        if len(self._known) > MAX_KNOWN:
            del self._known[next(iter(self._known))]

    def refused(self, payer: str, cost: float, now: float) -> float:
        """A long body was refused for its content; answers how long its answer has to wait."""
        self._known.pop(payer, None)
        owed = max(0.0, cost - self._free)
        if owed == 0.0 or self._share >= 1.0:
            return 0.0
        self.charged += owed
        self._paid_at = max(self._paid_at, now) + owed / self._share
        return min(self._paid_at - now, LONGEST_SECONDS)


class Metered(Generic[T]):
    """A coroutine to await in its place, and the time that its own steps took of the loop."""

    def __init__(self, inner: Coroutine[Any, Any, T]) -> None:
        self._inner = inner
        self.seconds = 0.0

    def __await__(self) -> Generator[Any, Any, T]:
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
