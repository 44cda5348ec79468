"""What conformance suites check with: an error of its own, because shipped code has no `assert`.

A suite is a class of methods `test_...` that a person's own implementation of one of our protocols
inherits. It needs no test framework; pytest and unittest find the methods by their names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class ConformanceError(AssertionError):
    """An implementation does not keep a promise of its protocol; the text says which."""


def expect(promise: str, got: object, wanted: object = True) -> None:
    """Raise ConformanceError unless both are equal."""
    if got != wanted:
        raise ConformanceError(f"{promise}: expected {wanted!r:.200}, got {got!r:.200}")


def expect_error(promise: str, kind: type[Exception], call: Callable[[], Any]) -> None:
    """Raise ConformanceError unless the call raises an error of this kind."""
    try:
        got = call()
    except kind:
        return
    except Exception as error:
        raise ConformanceError(f"{promise}: expected {kind.__name__}, got {error!r}") from error
    raise ConformanceError(f"{promise}: expected {kind.__name__}, got {got!r:.200}")
