"""A third store, as somebody else might write one: objects as rows of one SQLite file.

Its address is `sqlite://{file}`, and of the objects below a name `sqlite://{file}#{name}`.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from storage.errors import ObjectChanged, ObjectExists, ObjectNotFound, ObjectUnusable
from storage.objects.interface import MAX_OBJECT, ObjectContent, Objects, Status, check_name

SCHEME = "sqlite"
LOCK_SECONDS = 10.0


class SqliteObjects(Objects):
    """The rows of a table (name, data, stamp, written)."""

    def __init__(self, address: str) -> None:
        self._file, _, folder = address.removeprefix(f"{SCHEME}://").partition("#")
        self._folder = f"{folder}/".lstrip("/")
        with self._database() as database:
            database.execute(
                "CREATE TABLE IF NOT EXISTS objects (stamp INTEGER PRIMARY KEY AUTOINCREMENT, "
                "name TEXT UNIQUE, data BLOB, written INTEGER)"
            )

    def __str__(self) -> str:
        return f"{SCHEME}://{self._file}#{self._folder}".rstrip("/#")

    @contextlib.contextmanager
    def _database(self) -> Iterator[sqlite3.Connection]:
        """One transaction, in which nobody else writes."""
        with contextlib.closing(sqlite3.connect(self._file, timeout=60.0)) as database, database:
            database.execute("BEGIN IMMEDIATE")
            yield database

    def names(self, prefix: str = "", start_after: str = "") -> list[str]:
        if folder := prefix.rpartition("/")[0]:
            check_name(folder)
        whole, cut = self._folder + prefix, len(self._folder)
        with self._database() as database:
            rows = database.execute(
                "SELECT name FROM objects WHERE substr(name, 1, ?) = ?", (len(whole), whole)
            )
            below = [(name[cut:], name.find("/", len(whole)) - cut) for (name,) in rows]
        found = {name if at < 0 else name[: at + 1] for name, at in below}
        return sorted(name for name in found if name > start_after)

    def read(
        self, name: str, *, begin: int = 0, end: int | None = None, limit: int = MAX_OBJECT
    ) -> bytes:
        with self._database() as database:
            data = _data(database, key := self._name(name))
            if data is None and _group(database, key):
                raise ObjectUnusable(f"{self}/{name}: expected an object, found a group")
        if data is None:
            raise ObjectNotFound(f"expected {self}/{name}, which does not exist")
        if len(data := data[begin:end]) > limit:
            raise ObjectUnusable(f"{self}/{name}: expected {limit} bytes, got {len(data)}")
        return data

    def status(self, name: str) -> Status | None:
        query = "SELECT stamp, written, length(data) FROM objects WHERE name = ?"
        with self._database() as database:
            row = database.execute(query, (key := self._name(name),)).fetchone()
            if row is not None:
                return Status(*row, True)
            group = _group(database, key)
            found = [database.execute(query, (one,)).fetchone() for one in group]
        return Status(*max(found), False) if found else None

    def under(self, folder: str) -> SqliteObjects:
        return SqliteObjects(f"{SCHEME}://{self._file}#{self._name(folder)}")

    def staging(self, name: str) -> Path:
        check_name(name)
        handle, path = tempfile.mkstemp()
        os.close(handle)
        return Path(path)

    def settle(self, name: str) -> None:
        check_name(name)

    def put_if_absent(self, name: str, content: ObjectContent | Mapping[str, bytes]) -> None:
        key = self._name(name)
        with self._database() as database:
            if _data(database, key) is not None or _group(database, key):
                raise ObjectExists(f"{self}/{name}: expected no such name")
            if isinstance(content, Mapping):
                for one, data in content.items():
                    _put(database, f"{key}/{check_name(one)}", data)
            else:
                _put(database, key, content)

    def replace(self, name: str, content: ObjectContent, *, durable: bool = True) -> None:
        key = self._name(name)
        with self._database() as database:
            _put(database, key, content)

    def replace_if_unchanged(self, name: str, content: bytes, before: bytes | None) -> None:
        key = self._name(name)
        with self._database() as database:
            if _data(database, key) != before:
                raise ObjectChanged(f"{self}/{name}: expected other content")
            _put(database, key, content)

    def append(self, name: str, content: bytes) -> None:
        key = self._name(name)
        with self._database() as database:
            _put(database, key, (_data(database, key) or b"") + content)

    def delete(self, name: str) -> None:
        key = self._name(name)
        with self._database() as database:
            for one in [key, *_group(database, key)]:
                database.execute("DELETE FROM objects WHERE name = ?", (one,))

    @contextlib.contextmanager
    def exclusive(self, name: str) -> Iterator[None]:
        """A lock is an object that only its holder puts."""
        end = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                self.put_if_absent(name, b"held")
                break
            except ObjectExists:
                if time.monotonic() > end:
                    raise BlockingIOError(f"{self}/{name} is held") from None
        try:
            yield
        finally:
            self.delete(name)

    def _name(self, name: str) -> str:
        return self._folder + check_name(name)


def _data(database: sqlite3.Connection, name: str) -> bytes | None:
    row = database.execute("SELECT data FROM objects WHERE name = ?", (name,)).fetchone()
    return None if row is None else bytes(row[0])


def _group(database: sqlite3.Connection, name: str) -> list[str]:
    query = "SELECT name FROM objects WHERE substr(name, 1, ?) = ?"
    return [row[0] for row in database.execute(query, (len(name) + 1, f"{name}/"))]


def _put(database: sqlite3.Connection, name: str, content: ObjectContent) -> None:
    data = content.read_bytes() if isinstance(content, Path) else content
    database.execute("DELETE FROM objects WHERE name = ?", (name,))
    row = name, data, time.time_ns() // 1000
    database.execute("INSERT INTO objects (name, data, written) VALUES (?, ?, ?)", row)
    if isinstance(content, Path):
        content.unlink()
