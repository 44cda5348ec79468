"""The laws of compressed columns: rows behave as before, and are restored bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from storage.experience.sample_batch import BatchError, SampleBatch, concat_samples

CODECS = st.sampled_from(["zstd", "lz4", "zlib"])
COLUMNS = hnp.arrays(
    dtype=st.sampled_from(["bool", "uint8", "int64", "float16", "float32", "float64"]),
    shape=hnp.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=5),
)


@given(COLUMNS, CODECS, st.booleans())
def test_what_was_compressed_comes_back_bit_for_bit(column, codec, bulk):
    """dtype, shape and every bit, NaN payloads included; and the array is writable."""
    batch = SampleBatch({"obs": column, "rewards": np.zeros(len(column))})
    batch.compress(bulk=bulk, codec=codec)
    assert batch["rewards"].dtype == np.float64
    again = batch.decompress_if_needed()["obs"]
    assert (again.dtype, again.shape) == (column.dtype, column.shape)
    assert again.tobytes() == column.tobytes()
    assert again.flags.writeable


@given(st.integers(1, 8), st.booleans(), st.randoms())
def test_packed_rows_are_sliced_shuffled_and_joined_like_others(n, bulk, random):
    """The same operations before and after compressing give the same rows."""
    plain = SampleBatch(obs=np.arange(3 * n, dtype=np.int16).reshape(n, 3), t=np.arange(n))
    packed = plain.copy()
    packed.compress(bulk=bulk, codec="zlib")
    order = random.sample(range(n), n)

    def changed(batch: SampleBatch) -> SampleBatch:
        return concat_samples([batch.take(order)[: n // 2], batch[::-1], batch.copy()])

    assert changed(packed)["obs"].dtype == object
    assert changed(packed).decompress_if_needed() == changed(plain)


def test_bulk_is_smaller_and_counted_so():
    """One block a column compresses across rows; nbytes counts the compressed bytes."""
    plain = SampleBatch(obs=np.zeros((100, 84, 84), np.uint8))
    rows, whole = plain.copy(), plain.copy()
    rows.compress()
    whole.compress(bulk=True)
    assert whole.nbytes < rows.nbytes < plain.nbytes / 50


def test_default_columns_are_the_leaves_of_obs_and_new_obs_that_are_numbers():
    """Strings and other columns stay; named columns are taken at their word."""
    text = np.array(["x"], object)
    batch = SampleBatch({"obs.a": [1], "obs.b": text, "new_obs.a": [1], "obsolete": [1], "t": [0]})
    batch.compress(codec="zlib")
    assert [name for name in batch if batch[name].dtype == object] == [
        "obs.a",
        "obs.b",
        "new_obs.a",
    ]
    batch.decompress_if_needed(["obs.a"])
    assert batch["obs.a"].tolist() == [1]
    assert batch["new_obs.a"].dtype == object
    with pytest.raises(
        BatchError, match=r"compress: column .obs\.b.: expected numbers, got object"
    ):
        batch.compress(columns=["obs.b"])
    with pytest.raises(KeyError, match="no column 'nope'"):
        batch.compress(columns=["nope"])


def test_packed_columns_of_different_kinds_are_not_joined():
    """Compression hides no dtype and no shape from concat_samples."""
    one, other = SampleBatch(obs=[[1.0]]), SampleBatch(obs=np.array([[1.0]], np.float32))
    one.compress()
    with pytest.raises(BatchError, match="expected one dtype"):
        concat_samples([one, SampleBatch(obs=[[1.0]])])
    other.compress()
    with pytest.raises(BatchError, match="compressed float32"):
        concat_samples([one, other])


def test_to_torch_names_a_compressed_column():
    """No column is silently left out of tensors."""
    batch = SampleBatch(obs=[[1.0]])
    batch.compress()
    with pytest.raises(BatchError, match="'obs': compressed; decompress_if_needed comes first"):
        batch.to_torch()
    assert batch.decompress_if_needed().to_torch()["obs"].tolist() == [[1.0]]
