"""Tombstones: what was erased, as keyed hashes, so that it is recognized when it comes again.

A mark is an HMAC under the root's redaction key. It stands for an episode's id or a tag, and nobody
without the key can tell which. Texts are compared in one normal form of Unicode (NFC).
"""

from __future__ import annotations

import hashlib
import hmac
import json
import unicodedata
from collections.abc import Iterable

DIGITS = 32


def episode_mark(key: bytes, episode_id: str) -> str:
    """The mark of an episode's id."""
    return _mark(key, "episode", episode_id)


def tag_mark(key: bytes, name: str, value: str) -> str:
    """The mark of a tag."""
    return _mark(key, "tag", name, value)


def _mark(key: bytes, *texts: str) -> str:
    plain = [unicodedata.normalize("NFC", text) for text in texts]
    data = json.dumps(["headrace erasure", *plain]).encode()
    return hmac.digest(key, data, hashlib.sha256).hex()[:DIGITS]


class Tombstones:
    """The marks that a root knows, and whether an episode or its tags have one."""

    def __init__(self, key: bytes, marks: Iterable[str] = ()) -> None:
        self._key, self._marks = key, {*marks}
        self.seen: set[str] = set()
        """The marks that something had."""

    def __bool__(self) -> bool:
        return bool(self._marks)

    def add(self, marks: Iterable[str]) -> None:
        self._marks.update(marks)

    def new(self, marks: Iterable[str]) -> list[str]:
        """Those of the marks that are not known yet, sorted."""
        return sorted({*marks} - self._marks)

    def mark(self, episode_id: str) -> str:
        """The mark of an episode's id."""
        return episode_mark(self._key, episode_id)

    def hide(self, episode_id: str) -> bool:
        """Whether an episode of this id was erased."""
        return bool(self) and self._has(self.mark(episode_id))

    def hide_tags(self, tags: str) -> bool:
        """Whether one of an episode's tags (a JSON object) was erased."""
        if not self or tags == "{}":
            return False
        pairs = json.loads(tags).items()
        found = [self._has(tag_mark(self._key, name, str(value))) for name, value in pairs]
        return any(found)

    def _has(self, mark: str) -> bool:
        if mark in self._marks:
            self.seen.add(mark)
        return mark in self._marks
