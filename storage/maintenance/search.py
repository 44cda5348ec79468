"""Where texts are under a root: the proof of an erasure.

    proof = search(root, {"alice@example.com"})
    proof.found       # place -> what was found there, and how
    proof.unread      # place -> why it cannot be said
    proof.looked      # what was looked at -> how often

Each file is searched as bytes, for a text in both normal forms of Unicode, as UTF-8 and UTF-16,
percent-encoded and as JSON escapes it; statistics of Parquet are plain bytes. What bytes do not
show is decoded: pages and dictionaries of Parquet, rows of SQLite, texts on two of its pages, JSON,
gzip, names of files and links. A text within a longer one is found, too. The result has numbers for
texts, no text.
"""

from __future__ import annotations

import contextlib
import gzip
import html
import json
import mmap
import os
import re
import shutil
import sqlite3
import tempfile
import unicodedata
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import pyarrow as pa
import pyarrow.parquet as pq

SHORTEST = 3
"""Bytes; shorter texts are in every file."""
PARQUET, SQLITE, GZIP = b"PAR1", b"SQLite format 3\0", b"\x1f\x8b"
_FREE = 4
"""The bytes of an overflow page's header: the number of the next one."""


@dataclass
class Proof:
    """What was looked at, and what was found there; see the module."""

    found: dict[str, list[str]] = field(default_factory=dict)
    unread: dict[str, str] = field(default_factory=dict)
    looked: Counter[str] = field(default_factory=Counter)
    texts: int = 0

    @property
    def is_clear(self) -> bool:
        return not self.found and not self.unread

    def to_dict(self) -> dict[str, Any]:
        """Plain types for strict JSON."""
        return {
            "clear": self.is_clear,
            "texts": self.texts,
            "looked": dict(self.looked),
            "found": self.found,
            "unread": self.unread,
        }


def forms_of(text: str) -> set[bytes]:
    """The bytes that a text may be."""
    found: set[bytes] = set()
    for form in ("NFC", "NFD"):
        plain = unicodedata.normalize(form, text)
        escaped = json.dumps(plain)[1:-1]
        percent = quote(plain, safe="")
        lower = re.sub("%..", lambda code: code[0].lower(), percent)
        upper = "".join(c if c.isascii() else json.dumps(c)[1:-1].upper() for c in plain)
        texts = {plain, escaped, upper.replace("\\U", "\\u"), percent, lower, quote(plain)}
        texts |= {percent.lower() if percent != plain else plain, html.escape(plain)}
        texts |= {json.dumps(plain, ensure_ascii=False)[1:-1]}
        found |= {one.encode() for one in texts}
        found |= {plain.encode("utf-16-le"), plain.encode("utf-16-be")}
    return found


def search(
    folders: Path | Sequence[Path],
    texts: Iterable[str],
    *,
    on_progress: Callable[[str, int, int | None], None] = lambda what, done, total: None,
) -> Proof:
    """Look for texts in everything under some folders."""
    known = list(texts)
    long = [(n, text) for n, text in enumerate(known, 1) if len(text.encode()) >= SHORTEST]
    work = _Search([(n, forms_of(text)) for n, text in long])
    for number in {*range(1, len(known) + 1)}.difference(n for n, _ in long):
        work.proof.unread[f"text {number}"] = f"fewer than {SHORTEST} bytes, which are anywhere"
    roots = [folders] if isinstance(folders, Path) else list(folders)
    files = [(root, path) for root in roots for path in _files(root, work.proof.unread)]
    for done, (root, path) in enumerate(files, 1):
        work.look_at(root, path)
        on_progress("searching", done, len(files))
    work.proof.texts = len(known)
    return work.proof


def _files(root: Path, unread: dict[str, str]) -> Iterator[Path]:
    """Everything below a folder, folders and links to folders too; each folder once."""
    seen = set[str]()

    def unlisted(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):  # it was removed
            unread[os.path.relpath(error.filename, root)] = str(error)

    for folder, folders, names in os.walk(root, onerror=unlisted, followlinks=True):
        real = os.path.realpath(folder)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        yield from (Path(folder) / name for name in sorted([*folders, *names]))


class _Search:
    def __init__(self, needles: list[tuple[int, set[bytes]]]) -> None:
        self.proof = Proof()
        self._needles = needles

    def look_at(self, root: Path, path: Path) -> None:
        place = str(path.relative_to(root))
        try:
            self._name(place, path)
            if not path.is_file():
                self.proof.looked["folders"] += path.is_dir()
                return
            with path.open("rb") as file:
                if os.fstat(file.fileno()).st_size:
                    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                        self._file(place, path, content)
            self.proof.looked["files"] += 1
        except FileNotFoundError:  # a collector or maintenance removed it
            return
        except (OSError, ValueError) as error:
            self.proof.unread[place] = str(error)

    def _name(self, place: str, path: Path) -> None:
        name = os.fsencode(path.name) + (
            b"\0" + os.fsencode(os.readlink(path)) if path.is_symlink() else b""
        )
        decoded = unquote(path.name).encode("utf-8", "surrogateescape")
        self._in(place, "name", name + b"\0" + decoded)

    def _file(self, place: str, path: Path, content: mmap.mmap) -> None:
        self.proof.looked["bytes"] += len(content)
        self._in(place, "bytes", content)
        head = content[:16]
        if head.startswith(PARQUET):
            self._decode(place, "Parquet files", lambda: self._parquet(place, path))
        elif head == SQLITE:
            self._split(place, content)
            self._decode(place, "SQLite databases", lambda: self._sqlite(place, path))
        elif head.startswith(GZIP):
            self._decode(place, "gzip files", lambda: self._gzip(place, path))
        elif path.suffix in (".json", ".jsonl"):
            self._json(place, content[:])

    def _decode(self, place: str, what: str, decode: Callable[[], None]) -> None:
        try:
            decode()
            self.proof.looked[what] += 1
        except FileNotFoundError:
            return
        except (pa.ArrowException, sqlite3.Error, OSError, ValueError, EOFError, zlib.error) as e:
            self.proof.unread[place] = f"it cannot be decoded: {e!s:.200}"

    def _in(self, place: str, how: str, content: bytes | mmap.mmap) -> None:
        for number, forms in self._needles:
            if any(content.find(form) >= 0 for form in forms):
                self._found(place, f"text {number}: {how}")

    def _found(self, place: str, text: str) -> None:
        known = self.proof.found.setdefault(place, [])
        if text not in known:
            known.append(text)

    # --- what bytes do not show ---------------------------------------------------------------

    def _parquet(self, place: str, path: Path) -> None:
        """Every value of every page, also those of a dictionary that no row uses."""
        with pq.ParquetFile(path) as plain:
            schema = plain.schema
            coded = [
                schema.column(at).path
                for at in range(len(schema))
                if schema.column(at).physical_type == "BYTE_ARRAY"
            ]
        with pq.ParquetFile(path, read_dictionary=coded) as file:
            for group in range(file.num_row_groups):
                table = file.read_row_group(group, use_threads=False)
                self.proof.looked["column chunks"] += table.num_columns
                for name, column in zip(table.column_names, table.columns, strict=True):
                    for piece in column.chunks:
                        for data in _buffers(piece):
                            how = f"decoded column {name}, row group {group}"
                            self._in(place, how, data.to_pybytes())

    def _split(self, place: str, content: mmap.mmap) -> None:
        """Texts that begin on one page and end on an overflow page, free ones too.

        Which page follows which is not known of free ones, so any two count.
        """
        size = int.from_bytes(content[16:18], "big")
        size = 65_536 if size == 1 else size
        if size < 512:
            return
        starts = range(0, len(content) - size + 1, size)
        self.proof.looked["SQLite pages"] += len(starts)
        longest = max((len(form) for _, forms in self._needles for form in forms), default=0)
        heads = {content[at + _FREE : at + _FREE + longest] for at in starts}
        begins = [{head[:length] for head in heads} for length in range(longest)]
        for number, forms in self._needles:
            pieces = ((one[:cut], one[cut:]) for one in forms for cut in range(1, len(one)))
            if any(end in begins[len(end)] and content.find(begin) >= 0 for begin, end in pieces):
                self._found(place, f"text {number}: across two pages")

    def _sqlite(self, place: str, path: Path) -> None:
        """Every value of a copy, with the log: a collector may have the database open."""
        with tempfile.TemporaryDirectory(prefix="headrace-") as folder:
            copy = Path(folder) / path.name
            for name in (path.name, f"{path.name}-wal"):
                with contextlib.suppress(FileNotFoundError):
                    shutil.copyfile(path.with_name(name), copy.with_name(name))
            with contextlib.closing(sqlite3.connect(copy)) as database:
                database.text_factory = bytes
                tables = database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
                for (name,) in tables.fetchall():
                    quoted = name.decode().replace('"', '""')
                    for row in database.execute(f'SELECT * FROM "{quoted}"'):
                        self.proof.looked["SQLite rows"] += 1
                        for value in row:
                            if isinstance(value, bytes):
                                self._in(place, f"a row of table {name.decode()}", value)

    def _gzip(self, place: str, path: Path) -> None:
        with gzip.open(path) as file:
            before = b""
            while piece := file.read(1 << 20):
                self._in(place, "decompressed", before + piece)
                before = piece[-4096:]

    def _json(self, place: str, content: bytes) -> None:
        """The texts of a document as they are meant, however they are escaped."""
        for line in [content] if place.endswith(".json") else content.splitlines():
            try:
                document = json.loads(line)
            except (ValueError, RecursionError):  # its bytes were looked at
                continue
            self.proof.looked["JSON documents"] += 1
            for text in _texts(document):
                self._in(place, "decoded JSON", text.encode("utf-8", "surrogatepass"))


def _buffers(array: Any) -> Iterator[pa.Buffer]:
    if pa.types.is_dictionary(array.type):
        yield from _buffers(array.dictionary)
        return
    if pa.types.is_nested(array.type):
        for one in array.flatten() if pa.types.is_struct(array.type) else [array.values]:
            yield from _buffers(one)
        return
    yield from (one for one in array.buffers()[1:] if one is not None)


def _texts(document: Any) -> Iterator[str]:
    waiting = [document]
    while waiting:
        one = waiting.pop()
        if isinstance(one, str):
            yield one
        elif isinstance(one, dict):
            waiting += [*one.keys(), *one.values()]
        elif isinstance(one, list):
            waiting += one
