"""No byte of a footer raises anything but damage, and no false number of rows is believed."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from storage.objects.folder import FolderObjects
from storage.reading.listing import ShardFile
from storage.reading.loading import stated_rows
from storage.shards.footers import footer_bytes, own_footer
from storage.shards.names import ShardDamaged, ShardName
from storage.shards.shard import read_shard, rows_of_policy, shard_metadata
from storage.verify import inventory
from storage.verify.shard_check import check_shard
from tests.storage.reading.test_shard_reader import part, write

Damage = tuple[int, int]
"""(offset in the file, the byte's new value)"""
VALUES = (0x00, 0x80, 0xFF)
ROWS = 5


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path, [part(0, 3), part(1, 2)]).path


def changed(content: bytes, *damage: Damage) -> bytes:
    data = bytearray(content)
    for at, value in damage:
        data[at] = value
    return bytes(data)


def every(content: bytes) -> list[Damage]:
    """Each byte of the footer with each value."""
    start = len(content) - footer_bytes(content)
    return [(at, v) for at in range(start, len(content)) for v in VALUES if content[at] != v]


def in_name(content: bytes, column: str, value: int = 0x80) -> Damage:
    """A byte in a column's name in the footer's schema; Arrow decodes it as UTF-8."""
    start = len(content) - footer_bytes(content)
    return content.index(b"\x18" + bytes([len(column)]) + column.encode(), start) + 3, value


def summary(path: Path) -> object:
    return inventory.summary(FolderObjects(path.parent), path.name)


READERS: dict[str, Callable[[Path], object]] = {
    "read_shard": read_shard,
    "rows_of_policy": lambda path: rows_of_policy(path, "default"),
    "shard_metadata": shard_metadata,
    "ls": summary,
}


def _read_all(path: Path, content: bytes, damages: Iterable[Damage]) -> set[str]:
    """Read a damaged shard with each reader; which of them ever called it damaged."""
    refused = set()
    for damage in damages:
        path.write_bytes(changed(content, damage))
        for name, read in READERS.items():
            with contextlib.suppress(ShardDamaged):  # any other error fails the test
                read(path)
                continue
            refused.add(name)
    return refused


def test_the_stated_rows_are_those_of_the_writer_or_unknown(path: Path) -> None:
    """Each byte x 0x00, 0x80, 0xff: the right number of rows or None, and no exception."""
    content = path.read_bytes()
    shard = ShardFile.at(str(path.parent), path.parent.name, path.name)
    assert shard is not None
    assert stated_rows(shard, content) == ROWS
    found = {stated_rows(shard, changed(content, damage)) for damage in every(content)}
    assert found == {ROWS, None}
    other = ShardFile(shard.stream, shard.first, shard.last + 1, shard.digest16, shard.place)
    assert stated_rows(other, content) is None


def test_what_is_no_footer_is_none(path: Path) -> None:
    """A cut file, a length beyond the file, and rows that do not add up."""
    content = path.read_bytes()
    at = content.index(b"headrace.rows") + len(b"headrace.rows") + 2
    assert content[at : at + 1] == str(ROWS).encode()
    for data in (b"", b"PAR1", content[:-1], content[-300:], changed(content, (at, ord("4")))):
        assert own_footer(data, "x") is None
    assert own_footer(changed(content, (len(content) - 5, 0x7F)), "x") is None


def test_readers_of_unproven_footers_raise_damage_alone(path: Path) -> None:
    """A name that is no UTF-8, a column without its name, and every 41st case of the product."""
    content = path.read_bytes()
    kinds = [in_name(content, name, value) for name in ("obs", "policy_id") for value in VALUES]
    assert _read_all(path, content, kinds) == READERS.keys() - {"ls"}  # it needs no names
    assert _read_all(path, content, every(content)[::41]) == set(READERS)


def test_arrow_lists_a_footer_only_if_its_digest_is_right(path: Path) -> None:
    """The pairs are damaged, so that `ls` would need Arrow, for which no column is named `ts`."""
    content = path.read_bytes()
    pair = re.search(rb"headrace\.parts", content)
    assert pair is not None
    path.write_bytes(changed(content, in_name(content, "ts", ord("x")), (pair.start(), 0)))
    with pytest.raises(ShardDamaged, match="expected digest"):
        summary(path)


@pytest.mark.long
def test_every_byte_of_a_footer_in_every_reader(path: Path) -> None:
    """The whole product, also through `verify`'s check of a shard."""
    content = path.read_bytes()
    assert _read_all(path, content, every(content)) == set(READERS)
    name = ShardName.parse(path.name)
    assert name is not None
    for damage in every(content):
        path.write_bytes(changed(content, damage))
        with pytest.raises(ShardDamaged, match="expected digest"):
            check_shard(path, name)
