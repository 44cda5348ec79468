"""Features of candidates by name: `{"price": 0.3, "color": "red"}` as a row of numbers.

A number or truth value belongs to the column with its name, a text to the column `name=text`, which
is 1, or else to `name=*`. The keys of inner objects are joined with dots; a list of objects is one
object. A column without a value is 0; a value without a column is an error, and so is a second
value of one name.

    features = NamedFeatures(("price", "color=blue", "color=red"))
    features.row({"price": 0.3, "color": "red"})    # [0.3, 0.0, 1.0]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from storage.spaces.descriptors import SpaceError

LARGEST = 1.7976931348623157e308
"""The largest float: a larger integer is none."""
_DEPTH = 8


class NamedFeatures:
    """The names of the columns of a candidate. Raises SpaceError for equal or empty ones."""

    def __init__(self, names: Sequence[str]) -> None:
        self._columns = {name: at for at, name in enumerate(names)}
        if not all(isinstance(name, str) and name for name in names):
            raise SpaceError(f"expected names of features, got {names!r:.80}")
        if len(self._columns) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise SpaceError(f"expected different names of features, got {twice!r:.80} twice")

    def row(self, features: Any) -> list[float]:
        """The numbers of one candidate, in the order of the columns. Raises SpaceError."""
        row, seen = [0.0] * len(self._columns), set[str]()
        for name, value in _values(features):
            if name in seen:
                raise SpaceError(f"features: expected one value of {name!r:.80}, got two")
            seen.add(name)
            is_text = isinstance(value, str)
            column = f"{name}={value}" if is_text else name
            at = self._columns.get(column)
            if at is None and is_text:
                at = self._columns.get(f"{name}=*")
            if at is None:
                known = ", ".join(self._columns)
                raise SpaceError(
                    f"features: expected the declared features ({known:.300}), got {column!r:.80}"
                )
            row[at] = 1.0 if is_text else float(value)
        return row


def _values(features: Any) -> Iterator[tuple[str, str | float]]:
    """Each number and text, by its keys joined with dots. Raises SpaceError."""
    waiting = [("", features, 0)]
    while waiting:
        name, value, depth = waiting.pop()
        place = f"features.{name}" if name else "features"
        if isinstance(value, list) and all(isinstance(inner, dict) for inner in value):
            waiting += [(name, inner, depth) for inner in reversed(value)]
        elif isinstance(value, dict):
            if depth == _DEPTH:
                raise SpaceError(f"{place:.80}: expected objects at most {_DEPTH} deep, got more")
            inner = [(f"{name}.{key}" if name else str(key), value[key]) for key in value]
            waiting += [(*pair, depth + 1) for pair in reversed(inner)]
        elif name and (
            isinstance(value, str) or (isinstance(value, (int, float)) and abs(value) <= LARGEST)
        ):
            yield name, value
        else:
            raise SpaceError(f"{place:.80}: expected finite numbers or texts, got {value!r:.80}")
