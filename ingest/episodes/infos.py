"""The info of one step that came in several pieces, merged as they arrive.

Each piece is parsed once, when it arrives; known keys are never encoded or parsed again. So the
work is linear in the bytes sent, and the size is always known.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

import msgspec

MAX_MERGED = 1_000_000
"""The most characters of a merged info. A single piece is limited by its message's size only."""

KEY_BYTES = 200
"""Bytes that a key uses in memory in addition to its characters: two strings and a dict entry."""

_read = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_write = json.JSONEncoder(ensure_ascii=False).encode


@dataclass(slots=True)
class MergedInfo:
    """A JSON object by its keys; values are JSON text as sent. `len()` is its text's length."""

    values: dict[str, str]
    size: int  # characters of all keys and values as JSON

    @classmethod
    def of(cls, text: str) -> MergedInfo:
        """Create it from the first piece, a JSON object."""
        info = cls({}, 0)
        info.add(text)
        return info

    def add(self, text: str, *, first: bool = False) -> None:
        """Merge a piece, a JSON object: the later value of a key wins.

        `first`: the piece is earlier than the known ones, and only adds keys that they lack.
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
        """The number of keys."""
        return len(self.values)

    def __len__(self) -> int:
        return 2 + self.size + 4 * len(self.values) - 2 * bool(self.values)

    def __str__(self) -> str:
        return "{" + ", ".join(f"{key}: {value}" for key, value in self.values.items()) + "}"
