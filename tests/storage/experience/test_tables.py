"""Batches as tables of Arrow and pandas keep every value."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from storage.experience.multi_agent_batch import MultiAgentBatch
from storage.experience.sample_batch import BatchError, SampleBatch

NUMBERS = st.one_of(
    arrays.boolean_dtypes(),
    arrays.integer_dtypes(endianness="?"),
    arrays.unsigned_integer_dtypes(endianness="?"),
    arrays.floating_dtypes(endianness="?", sizes=(16, 32, 64)),
)


@st.composite
def batches(draw: st.DrawFn) -> SampleBatch:
    """Columns of every kind of number, of up to four dimensions, some of them not contiguous, and
    one of texts."""
    rows = draw(st.integers(0, 4))
    columns: dict[str, Any] = {}
    for number in range(draw(st.integers(1, 3))):
        shape = (rows, *draw(st.lists(st.integers(0, 3), max_size=3)))
        column = draw(arrays.arrays(draw(NUMBERS), shape))
        columns[f"c{number}"] = np.asfortranarray(column) if draw(st.booleans()) else column
    texts = draw(st.lists(st.none() | st.text(), min_size=rows, max_size=rows))
    return SampleBatch(columns, eps_id=np.array([*texts, ""], object)[:-1])


def values(column: pa.ChunkedArray, shape: tuple[int, ...]) -> Any:
    """The numbers of a column of a table, back in the shape of the batch's."""
    whole = column.combine_chunks()
    storage = whole.storage if isinstance(whole, pa.ExtensionArray) else whole
    while pa.types.is_fixed_size_list(storage.type):
        storage = storage.flatten()
    return storage.to_numpy(zero_copy_only=False).reshape(shape)


@given(batches())
def test_arrow_keeps_every_value(batch: SampleBatch) -> None:
    """The table has each column by name and in order, with dtype and shape, NaN and null
    included."""
    table = batch.to_arrow()
    table.validate(full=True)
    assert table.column_names == list(batch)
    assert table.num_rows == batch.count
    for name, column in batch.items():
        if name == "eps_id":
            assert table[name].type == pa.string()
            assert table[name].to_pylist() == column.tolist()
        else:
            assert table[name].null_count == 0
            back = values(table[name], column.shape)
            assert back.dtype == column.dtype.newbyteorder("=")
            np.testing.assert_array_equal(back, column)


@given(batches())
def test_pandas_keeps_every_value(batch: SampleBatch) -> None:
    """A cell of a column of several dimensions is the row's array."""
    frame = batch.to_pandas()
    assert list(frame.columns) == list(batch)
    assert frame.index.tolist() == list(range(batch.count))
    for name, column in batch.items():
        assert frame[name].dtype == (column.dtype if column.ndim == 1 else object)
        for cell, row in zip(frame[name], column, strict=True):
            np.testing.assert_array_equal(cell, row)


def test_an_image_is_a_tensor() -> None:
    """Readers of Arrow that know tensors get the shape."""
    batch = SampleBatch(obs=np.zeros((2, 84, 84, 4), np.uint8), t=[0, 1])
    schema = batch.to_arrow().schema
    assert schema.field("obs").type == pa.fixed_shape_tensor(pa.uint8(), (84, 84, 4))
    assert schema.field("t").type == pa.int64()


def test_a_compressed_column_is_refused_by_name() -> None:
    batch = SampleBatch(obs=np.zeros((2, 3)), t=[0, 1])
    batch.compress()
    for made in (batch.to_arrow, batch.to_pandas):
        with pytest.raises(BatchError, match="'obs': compressed"):
            made()
    assert batch.decompress_if_needed().to_arrow().num_rows == 2


def test_several_policies_are_several_tables() -> None:
    seller = SampleBatch(obs=np.zeros((2, 3)), t=[0, 1])
    both = MultiAgentBatch({"seller": seller, "buyer": seller[:1].select(["t"])}, 2)
    assert {k: t.num_rows for k, t in both.to_arrow().items()} == {"seller": 2, "buyer": 1}
    assert {k: list(f) for k, f in both.to_pandas().items()} == {
        "seller": ["obs", "t"],
        "buyer": ["t"],
    }
