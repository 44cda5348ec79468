"""The info of one step that came in several pieces, merged as they come.

Each piece is read once, in the turn that brought it: what a step knows already is never written or
read again. So the work is linear in what was sent, and the size is known at any time.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import msgspec

MAX_MERGED = 1_000_000
"""Characters that an info in several pieces may have. One piece alone may fill its message."""

KEY_BYTES = 200
"""What a key of a merged info takes in memory beside its characters: two strings, their place."""

_read = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_write = json.JSONEncoder(ensure_ascii=False).encode


@dataclass(slots=True)
class MergedInfo:
    """A JSON object by its keys; a value is JSON as it came. `len()` is that of its text."""

    values: dict[str, str]
    size: int  # characters of all keys and values as JSON

    @classmethod
    def of(cls, text: str) -> MergedInfo:
        """The first piece, a JSON object."""
        info = cls({}, 0)
        info.add(text)
        return info

    def add(self, text: str, *, first: bool = False) -> None:
        """Merge a piece, a JSON object: the later value of a key wins.

        `first`: the piece came before all that is known, and fills in what that leaves out.
        """
        for name, raw in _read(text).items():
            key, value = _write(name), str(raw, "utf-8")
            known = self.values.get(key)
            if known is None:
                self.size += len(key) + len(value)
            elif first:
                continue
            else:
                self.size += len(value) - len(known)
            self.values[key] = value

    @property
    def keys(self) -> int:
        """How many keys there are."""
        return len(self.values)

    def __len__(self) -> int:
        return 2 + self.size + 4 * len(self.values) - 2 * bool(self.values)

    def __str__(self) -> str:
        return "{" + ", ".join(f"{key}: {value}" for key, value in self.values.items()) + "}"
