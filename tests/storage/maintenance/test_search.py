"""The proof finds a name wherever it is, and says where it looked."""

from __future__ import annotations

import gzip
import json
import os
import random
import resource
import sqlite3
import unicodedata
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from storage.maintenance.search import search

NAME = "Zoë Grünwald-Ångström"
NFD = unicodedata.normalize("NFD", NAME)


def parquet(path: Path, names: list[str], table: pa.Table | None = None, **options: object) -> None:
    table = pa.table({"user": names, "n": range(len(names))}) if table is None else table
    pq.write_table(table, path, compression="zstd", write_statistics=False, **options)


def others() -> list[str]:
    """Names of few letters, which compress by their letters: short texts are stored as they are."""
    chance = random.Random(1)
    return ["".join(chance.choices("etaoinshr", k=30)) for _ in range(300)]


def data_page(path: Path) -> None:
    """In a compressed page, not in a dictionary."""
    parquet(path, [*others(), NAME], use_dictionary=False)
    assert NAME.encode() not in path.read_bytes()


def dictionary_page(path: Path) -> None:
    """In a compressed dictionary, as a value that no row has."""
    codes = pa.array([0] * 100, pa.int32())
    column = pa.DictionaryArray.from_arrays(codes, pa.array([*others(), NAME]))
    parquet(path, [], pa.table({"user": column}))
    assert NAME not in pq.read_table(path)["user"].to_pylist()
    assert NAME.encode() not in path.read_bytes()


def statistic(path: Path) -> None:
    """In the footer alone: the pages were written before."""
    parquet(path, ["a" * len(NAME.encode())] * 9)
    table = pa.table({"user": ["a" * len(NAME.encode())] * 9})
    pq.write_table(table, path, compression="zstd", use_dictionary=False)
    data = path.read_bytes()
    footer = data.rindex(b"a" * len(NAME.encode()))
    data = data[:footer] + NAME.encode() + data[footer + len(NAME.encode()) :]
    path.write_bytes(data)
    assert NAME not in pq.read_table(path)["user"].to_pylist()


def free_page(path: Path) -> None:
    """In a deleted row of a database."""
    database = sqlite3.connect(path)
    database.execute("PRAGMA secure_delete = OFF")
    database.execute("CREATE TABLE t (x)")
    database.executemany("INSERT INTO t VALUES (?)", [(NAME * 9,)] * 100)
    database.commit()
    database.execute("DELETE FROM t")
    database.commit()
    database.close()


def across_pages(path: Path) -> None:
    """Half at the end of a page, half on a free overflow page."""
    database = sqlite3.connect(path)
    database.execute("PRAGMA page_size = 4096")
    database.execute("PRAGMA secure_delete = OFF")
    database.execute("CREATE TABLE t (x)")
    for before in range(450, 520):
        database.execute("INSERT INTO t VALUES (?)", (b"-" * before + NAME.encode() + b"-" * 4000,))
    database.commit()
    database.execute("DELETE FROM t")
    database.commit()
    database.close()
    data = bytearray(path.read_bytes())
    while (at := data.find(NAME.encode())) >= 0:  # those that are on one page
        data[at : at + len(NAME.encode())] = bytes(len(NAME.encode()))
    path.write_bytes(data)


def in_json(escape: Callable[[str], str]) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.with_suffix(".json").write_text(json.dumps({"why": "x"}).replace("x", escape(NAME)))

    return write


def file_name(path: Path) -> None:
    path.with_name(quote(NAME)).touch()


def link(path: Path) -> None:
    path.symlink_to(NFD)


def compressed(path: Path) -> None:
    path.write_bytes(gzip.compress(NAME.encode() * 50))


def other_bytes(data: bytes) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(b"...." + data + b"....") and None


PLACES = {
    "data page": data_page,
    "dictionary page": dictionary_page,
    "statistic": statistic,
    "free page": free_page,
    "across pages": across_pages,
    "json": in_json(lambda text: text),
    "escaped json": in_json(lambda text: json.dumps(text)[1:-1]),
    "every letter escaped": in_json(lambda text: "".join(f"\\u{ord(c):04X}" for c in text)),
    "file name": file_name,
    "link": link,
    "gzip": compressed,
    "utf-8": other_bytes(NAME.encode()),
    "nfd": other_bytes(NFD.encode()),
    "utf-16": other_bytes(NAME.encode("utf-16-le")),
    "utf-16, big-endian": other_bytes(NAME.encode("utf-16-be")),
    "percent": other_bytes(quote(NAME).encode()),
    "percent, digits in lower case": other_bytes(b"Zo%c3%ab%20Gr%c3%bcnwald-%c3%85ngstr%c3%b6m"),
    "lower percent": other_bytes(quote(NAME, safe="").lower().encode()),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_name_is_found(place: str, tmp_path: Path) -> None:
    """Raw or decoded, in every place and encoding; another name is not."""
    (tmp_path / "f").mkdir()
    PLACES[place](tmp_path / "f" / "file")
    proof = search(tmp_path, ["somebody else", NAME])
    assert [texts[0].partition(":")[0] for texts in proof.found.values()] == ["text 2"]
    assert not proof.is_clear
    assert search(tmp_path, ["somebody else", "Zo\u00eb Gr\u00fcnwald-Angstrom"]).is_clear


def test_what_cannot_be_read_is_said(tmp_path: Path) -> None:
    """No proof without a look: damaged files, unreadable files, and texts that are everywhere."""
    parquet(tmp_path / "a", ["bob"] * 9)
    (tmp_path / "a").write_bytes((tmp_path / "a").read_bytes()[:-20])
    (tmp_path / "b").write_bytes(b"SQLite format 3\0" + os.urandom(5000))
    proof = search(tmp_path, [NAME])
    assert {*proof.unread} == {"a", "b"}
    assert not proof.is_clear
    assert {*search(tmp_path, ["ab", NAME]).unread} == {"a", "b", "text 1"}


def test_a_folder_that_cannot_be_listed_is_said(tmp_path: Path) -> None:
    """No descriptor is left, as with a folder of another account."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
    try:
        proof = search(tmp_path, [NAME])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert {*proof.unread} == {"."}
    assert not proof.is_clear


def test_what_has_too_long_a_path_is_said(tmp_path: Path) -> None:
    """Beyond 4 KB the system opens no path."""
    place = os.open(tmp_path, os.O_DIRECTORY)
    for _ in range(25):
        os.mkdir("d" * 200, dir_fd=place)
        inner = os.open("d" * 200, os.O_DIRECTORY, dir_fd=place)
        os.close(place)
        place = inner
    os.close(place)
    assert not search(tmp_path, [NAME]).is_clear
