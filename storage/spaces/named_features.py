"""Features of candidates by name: `{"price": 0.3, "color": "red"}` as a row of numbers.

A number or truth value belongs to the column with its name, a text to the column `name=text`, which
is 1, or else to `name=*`. The keys of inner objects are joined with dots; a list of objects is one
object. A column without a value is 0; a value without a column is an error.

    features = NamedFeatures(("price", "color=blue", "color=red"))
    features.row({"price": 0.3, "color": "red"})    # [0.3, 0.0, 1.0]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from storage.spaces.descriptors import SpaceError

_DEPTH = 8
_LARGEST = 1.7976931348623157e308
"""The largest float: a larger integer is none."""


def flat_features(features: Any, where: str = "features") -> Iterator[tuple[str, float]]:
    """(column, value) of each value; a text is 1 in `name=text`. Raises SpaceError."""
    waiting = [("", features, 0)]
    while waiting:
        name, value, depth = waiting.pop()
        place = f"{where}.{name}" if name else where
        if isinstance(value, list) and all(isinstance(inner, dict) for inner in value):
            value = {key: item for inner in value for key, item in inner.items()}
        if isinstance(value, dict):
            if depth == _DEPTH:
                raise SpaceError(f"{place:.80}: expected objects at most {_DEPTH} deep, got more")
            inner = [(f"{name}.{key}" if name else str(key), value[key]) for key in value]
            waiting += [(*pair, depth + 1) for pair in reversed(inner)]
        elif isinstance(value, str) and name:
            yield f"{name}={value}", 1.0
        elif isinstance(value, (int, float)) and name and abs(value) <= _LARGEST:
            yield name, float(value)
        else:
            raise SpaceError(f"{place:.80}: expected finite numbers or texts, got {value!r:.80}")


class NamedFeatures:
    """The names of the columns of a candidate. Raises SpaceError for equal or empty ones."""

    def __init__(self, names: Sequence[str]) -> None:
        self._columns = {name: at for at, name in enumerate(names)}
        if not all(isinstance(name, str) and name for name in names):
            raise SpaceError(f"expected names of features, got {names!r:.80}")
        if len(self._columns) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise SpaceError(f"expected different names of features, got {twice!r:.80} twice")

    def row(self, features: Any, where: str = "features") -> list[float]:
        """The numbers of one candidate, in the order of the columns. Raises SpaceError."""
        row = [0.0] * len(self._columns)
        for name, value in flat_features(features, where):
            column = self._columns.get(name)
            if column is None and "=" in name:
                column = self._columns.get(name.partition("=")[0] + "=*")
            if column is None:
                known = ", ".join(self._columns)
                raise SpaceError(
                    f"{where}: expected the declared features ({known:.300}), got {name!r:.80}"
                )
            row[column] = value
        return row
