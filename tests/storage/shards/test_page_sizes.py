"""The memory for reading a shard is known before a page is decoded, despite a false footer."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.shards import page_sizes
from storage.shards.names import ShardDamaged
from storage.shards.page_sizes import check_pages, check_size, read_page_header
from tests.storage.reading.test_shard_reader import part, write


@pytest.fixture
def content(tmp_path: Path) -> bytes:
    return write(tmp_path, [part(0, 300, infos={3: '{"a":1}'}), part(1, 5)]).path.read_bytes()


def chunks(content: bytes) -> list[tuple[str, Any]]:
    group = pq.ParquetFile(pa.BufferReader(content)).metadata.row_group(0)
    return [(group.column(i).path_in_schema, group.column(i)) for i in range(group.num_columns)]


def facts(chunk: Any, **other: Any) -> Any:
    """A column chunk for the checks, with some of its values replaced."""
    names = (
        "dictionary_page_offset",
        "data_page_offset",
        "total_compressed_size",
        "total_uncompressed_size",
        "num_values",
    )
    return SimpleNamespace(**{name: getattr(chunk, name) for name in names} | other)


def test_the_pages_of_a_shard_add_up_to_what_its_footer_says(content: bytes) -> None:
    """The sizes of the pages add up for every column, also with statistics in the page headers."""
    assert len(chunks(content)) > 20
    for name, chunk in chunks(content):
        assert check_pages(content, chunk, name, 8) == chunk.total_uncompressed_size


def test_the_quick_way_through_a_header_gives_what_the_long_one_gives(content: bytes) -> None:
    """Both ways return the same header, with statistics in it and without."""
    for _, chunk in chunks(content):
        at = chunk.dictionary_page_offset or chunk.data_page_offset
        assert read_page_header(content, at) == page_sizes._any_page_header(content, at)
        assert page_sizes._USUAL.match(content, at) is not None


def test_a_footer_that_says_less_than_the_pages_is_found_out(content: bytes) -> None:
    """Arrow goes by the headers of the pages."""
    for name, chunk in chunks(content):
        less = facts(chunk, total_uncompressed_size=chunk.total_uncompressed_size - 1)
        with pytest.raises(ShardDamaged, match="the footer says"):
            check_pages(content, less, name, 8)


def test_a_page_that_claims_more_than_the_footer_is_found_out(content: bytes) -> None:
    """The page's header is changed in place to claim gigabytes, which a decoder would allocate."""
    name, chunk = next((n, c) for n, c in chunks(content) if n == "rewards")
    at = chunk.data_page_offset
    page = read_page_header(content, at)
    claimed = bytearray(content)
    claimed[at + 3 : at + 5] = b"\xfe\x7f"  # its size, the second field, as large as it has room
    assert read_page_header(bytes(claimed), at).size > page.size
    with pytest.raises(ShardDamaged, match="the footer says"):
        check_pages(bytes(claimed), chunk, name, 8)


@given(st.data())
def test_no_bytes_break_the_reading_of_a_header(data: st.DataObject) -> None:
    """Any bytes are a header or ShardDamaged, after a bounded look at them."""
    raw = data.draw(st.binary(max_size=60))
    try:
        page = read_page_header(raw, 0)
    except ShardDamaged:
        return
    assert 0 < page.header <= len(raw) + max(raw)
    assert min(page.size, page.stored, page.values) >= 0


def test_only_what_is_asked_for_counts(content: bytes) -> None:
    """The bound is on the columns that are read."""
    with pq.ParquetFile(pa.BufferReader(content)) as file:
        check_size(content, file.metadata, file.schema_arrow, ["rewards"])
        most, page_sizes.MOST_GROUP_BYTES = page_sizes.MOST_GROUP_BYTES, 8 * 305
        try:
            check_size(content, file.metadata, file.schema_arrow, [])
            with pytest.raises(ShardDamaged, match="row group 0: expected at most 2440 bytes"):
                check_size(content, file.metadata, file.schema_arrow, ["rewards"])
        finally:
            page_sizes.MOST_GROUP_BYTES = most
