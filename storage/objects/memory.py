"""`MemoryObjects`: objects in memory, gone with the process."""

from __future__ import annotations

import copy
import os
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Mapping
from contextlib import AbstractContextManager
from itertools import count
from pathlib import Path

from storage.errors import ObjectChanged, ObjectExists, ObjectNotFound, ObjectUnusable
from storage.objects.interface import MAX_OBJECT, ObjectContent, Objects, Status, check_name


class MemoryObjects(Objects):
    """Objects that nobody outside this process sees."""

    def __init__(self) -> None:
        self._folder = ""
        self._objects: dict[str, tuple[bytes, Status]] = {}
        self._lock = threading.RLock()
        self._stamps = count(1)
        self._locks: dict[str, threading.Lock] = defaultdict(threading.Lock)

    def __repr__(self) -> str:
        return f"MemoryObjects({len(self._objects)} objects)"

    def __str__(self) -> str:
        return f"memory/{self._folder}".rstrip("/")

    def under(self, folder: str) -> MemoryObjects:
        below = copy.copy(self)
        below._folder = f"{self._name(folder)}/"
        return below

    def staging(self, name: str) -> Path:
        check_name(name)
        handle, path = tempfile.mkstemp(prefix="headrace-object-")
        os.close(handle)
        return Path(path)

    def settle(self, name: str) -> None:
        check_name(name)

    def names(self, prefix: str = "", start_after: str = "") -> list[str]:
        if folder := prefix.rpartition("/")[0]:
            check_name(folder)
        whole = self._folder + prefix
        with self._lock:
            below = [name for name in self._objects if name.startswith(whole)]
        cut = len(self._folder)
        rests = ((name[cut:], name.find("/", len(whole)) - cut) for name in below)
        found = {name if at < 0 else name[: at + 1] for name, at in rests}
        return sorted(name for name in found if name > start_after)

    def read(
        self, name: str, *, begin: int = 0, end: int | None = None, limit: int = MAX_OBJECT
    ) -> bytes:
        key = self._name(name)
        with self._lock:
            known = self._objects.get(key)
            if known is None and self._group(key):
                raise ObjectUnusable(f"{self}/{name}: expected an object, found a group")
        if known is None:
            raise ObjectNotFound(f"expected {self}/{name}, which does not exist")
        data = known[0] if (begin, end) == (0, None) else known[0][begin:end]
        if len(data) > limit:
            raise ObjectUnusable(f"{self}/{name}: expected at most {limit} bytes, got {len(data)}")
        return data

    def status(self, name: str) -> Status | None:
        key = self._name(name)
        with self._lock:
            if known := self._objects.get(key):
                return known[1]
            found = max((self._objects[one][1] for one in self._group(key)), default=None)
        return found and found._replace(is_object=False)

    def put_if_absent(self, name: str, content: ObjectContent | Mapping[str, bytes]) -> None:
        key = self._name(name)
        with self._lock:
            if key in self._objects or self._group(key):
                raise ObjectExists(f"{self}/{name}: expected no such name, found one")
            if isinstance(content, Mapping):
                for one, data in content.items():
                    self._put(f"{key}/{check_name(one)}", data)
            else:
                self._put(key, content)

    def replace(self, name: str, content: ObjectContent, *, durable: bool = True) -> None:
        with self._lock:
            self._put(self._name(name), content)

    def replace_if_unchanged(self, name: str, content: bytes, before: bytes | None) -> None:
        key = self._name(name)
        with self._lock:
            known = self._objects.get(key)
            if (None if known is None else known[0]) != before:
                raise ObjectChanged(f"{self}/{name}: expected other content, it was replaced")
            self._put(key, content)

    def append(self, name: str, content: bytes) -> None:
        key = self._name(name)
        with self._lock:
            known = self._objects.get(key)
            self._put(key, content if known is None else known[0] + content)

    def delete(self, name: str) -> None:
        key = self._name(name)
        with self._lock:
            for one in [key, *self._group(key)]:
                self._objects.pop(one, None)

    def exclusive(self, name: str) -> AbstractContextManager[object]:
        with self._lock:
            return self._locks[self._name(name)]

    def _name(self, name: str) -> str:
        return self._folder + check_name(name)

    def _group(self, name: str) -> list[str]:
        return [one for one in self._objects if one.startswith(f"{name}/")]

    def _put(self, name: str, content: ObjectContent) -> None:
        if isinstance(content, Path):
            data = content.read_bytes()
            content.unlink()
        else:
            data = bytes(content)
        status = Status(next(self._stamps), time.time_ns() // 1000, len(data), True)
        self._objects[name] = data, status
