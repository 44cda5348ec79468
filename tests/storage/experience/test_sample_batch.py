"""The laws of sample batches."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.experience.sample_batch import (
    BatchError,
    SampleBatch,
    concat_samples,
)


def batch_of(n: int, start: int = 0) -> SampleBatch:
    numbers = np.arange(start, start + n)
    return SampleBatch(
        obs=np.stack([numbers, -numbers], axis=1).astype(np.float32),
        rewards=numbers.astype(np.float64),
        t=numbers,
        eps_id=np.array([f"e{i // 3}" for i in numbers], object),
    )


def test_a_slice_is_a_view_and_shares_its_memory():
    """Slicing copies nothing: a write through the slice is seen in the batch."""
    batch = batch_of(10)
    batch[2:5]["rewards"][0] = 99.0
    assert batch["rewards"][2] == 99.0
    assert batch[2:5].count == len(batch[2:5]) == 3


@given(
    n=st.integers(0, 12),
    start=st.none() | st.integers(-15, 15),
    stop=st.none() | st.integers(-15, 15),
    step=st.sampled_from([None, 1, 2, -1, -3]),
)
def test_a_slice_takes_the_rows_that_python_takes(n, start, stop, step):
    """batch[i:j:k] has the rows of list[i:j:k], and says so in count."""
    part = batch_of(n)[start:stop:step]
    assert part["t"].tolist() == list(range(n))[start:stop:step]
    assert part.count == len(part["t"])


def test_columns_of_another_length_are_refused_by_name():
    """A batch never holds columns of two lengths."""
    batch = batch_of(3)
    with pytest.raises(BatchError, match=r"'late': expected 3 rows, got 4"):
        batch["late"] = np.zeros(4)
    with pytest.raises(BatchError, match="expected one value per row"):
        batch["scalar"] = np.float64(3)
    assert "late" not in batch


def test_the_last_column_may_be_replaced_by_one_of_another_length():
    """Only columns of the same batch have to agree."""
    batch = SampleBatch(a=[1, 2])
    batch["a"] = [1, 2, 3]
    assert batch.count == 3
    del batch["a"]
    assert batch.count == 0
    batch["b"] = [1]
    assert batch.count == 1


def test_a_missing_column_is_named_with_those_that_exist():
    """The message for a misspelt column shows the right name."""
    with pytest.raises(KeyError, match=r"no column 'reward'; the columns are .*'rewards'"):
        batch_of(1)["reward"]


def test_it_is_a_mapping_of_columns_and_rows_read_as_dicts():
    """Iterating a batch gives its columns; rows() gives one dict per row."""
    batch = SampleBatch({"a": [1, 2], "b": ["x", "y"]})
    assert list(batch) == ["a", "b"]
    assert dict(batch.items())["b"].dtype == object
    assert list(batch.rows()) == [{"a": 1, "b": "x"}, {"a": 2, "b": "y"}]


@given(st.lists(st.integers(0, 9), max_size=6))
def test_concat_then_slice_gives_the_pieces_back(sizes):
    """concat_samples keeps rows, order and dtypes."""
    pieces = [batch_of(n, 10 * i) for i, n in enumerate(sizes)]
    whole = concat_samples(pieces)
    assert whole.count == sum(sizes)
    at = 0
    for piece in pieces:
        if piece.count:
            assert whole[at : at + piece.count] == piece
        at += piece.count
    if whole.count:
        assert whole["rewards"].dtype == np.float64
        assert whole["obs"].dtype == np.float32


def test_batches_without_rows_keep_their_columns():
    """Joined, also with one without columns, and taken from a batch, whose memory they release."""
    empty = batch_of(3).without_rows()
    assert (empty.count, sorted(empty)) == (0, sorted(batch_of(3)))
    assert all(column.base is None for column in empty.values())
    assert empty["obs"].shape == (0, 2)
    for joined in ([empty], [SampleBatch(), empty], [empty, SampleBatch(), empty]):
        assert concat_samples(joined) == empty
    assert concat_samples([empty, batch_of(2), SampleBatch()]) == batch_of(2)
    assert concat_samples([SampleBatch()]) == concat_samples([]) == SampleBatch()


def test_concat_names_what_does_not_fit():
    """Batches with other columns, or other shapes, are not joined."""
    with pytest.raises(BatchError, match=r"\['b'\]"):
        concat_samples([SampleBatch(a=[1]), SampleBatch(a=[1], b=[2])])
    with pytest.raises(BatchError, match="column 'a': expected one shape"):
        concat_samples([SampleBatch(a=[[1, 2]]), SampleBatch(a=[[1, 2, 3]])])


@given(n=st.integers(0, 40), size=st.integers(0, 45), seed=st.integers(0, 5))
def test_minibatches_hold_each_row_once(n, size, seed):
    """Full minibatches but the last, whether shuffled or not; size 0 is the whole batch."""
    batch = batch_of(n)
    pieces = list(batch.minibatches(size, np.random.default_rng(seed)))
    assert Counter(t for p in pieces for t in p["t"].tolist()) == Counter(range(n))
    assert all(p.count == (size or n) for p in pieces[:-1])
    in_order = [t for p in batch.minibatches(size or None) for t in p["t"].tolist()]
    assert in_order == list(range(n))


def test_shuffle_keeps_rows_together_and_the_batch_unchanged():
    """Columns move together, by the generator that was given."""
    batch = batch_of(50)
    mixed = batch.shuffle(np.random.default_rng(3))
    assert batch == batch_of(50)
    assert mixed["t"].tolist() != batch["t"].tolist()
    assert (mixed["obs"][:, 0] == mixed["t"]).all()
    assert mixed == batch.shuffle(np.random.default_rng(3))


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=10, unique=True),
    st.randoms(),
)
def test_split_by_episode_groups_by_identity_and_orders_by_t(keys, random):
    """Interleaved fragments of one (stream, episode) come together, in the order of t."""
    rows = [(s, e, t) for s, e in keys for t in range(3)]
    random.shuffle(rows)
    batch = SampleBatch(
        stream=np.array([f"s{s}" for s, _, _ in rows], object),
        episode_ordinal=np.array([e for _, e, _ in rows], np.int64),
        eps_id=np.array(["same"] * len(rows), object),
        t=np.array([t for _, _, t in rows], np.int64),
    )
    episodes = batch.split_by_episode()
    found = [(e["stream"][0], e["episode_ordinal"][0]) for e in episodes]
    firsts = dict.fromkeys((f"s{s}", e) for s, e, _ in rows)
    assert found == list(firsts)
    assert all(e["t"].tolist() == [0, 1, 2] for e in episodes)
    assert all(len(set(e["episode_ordinal"].tolist())) == 1 for e in episodes)


def test_split_by_episode_falls_back_to_the_id_and_keeps_views():
    """Without ordinals the id counts; an episode that lies together is not copied."""
    batch = batch_of(6)
    first, second = batch.split_by_episode()
    assert (first["eps_id"][0], second["eps_id"][0]) == ("e0", "e1")
    assert np.shares_memory(second["obs"], batch["obs"])
    with pytest.raises(BatchError, match="split_by_episode: expected"):
        SampleBatch(t=[0]).split_by_episode()


def test_a_copy_is_writable_and_its_own():
    """copy() lets a learner change a batch that is a read-only view."""
    batch = batch_of(3)
    batch["rewards"].flags.writeable = False
    copy = batch.copy()
    copy["rewards"][0] = 7
    assert batch["rewards"][0] == 0


def test_a_mask_takes_rows_and_a_wrong_one_is_refused():
    """A boolean index has one entry a row."""
    batch = batch_of(4)
    assert batch.take(batch["rewards"] > 1)["t"].tolist() == [2, 3]
    with pytest.raises(BatchError, match=r"mask: expected shape \(4,\), got \(3,\)"):
        batch.take([True, False, True])


def test_leaves_names_the_columns_of_a_space_by_path():
    """A space of one leaf has the path "", one of several has theirs."""
    batch = SampleBatch({"obs.a": [1], "obs.b.0": [2], "obsolete": [3], "actions": [4]})
    assert sorted(batch.leaves("obs")) == ["a", "b.0"]
    assert list(batch.leaves("actions")) == [""]


def test_equality_sees_values_dtypes_and_nan():
    """Two batches are equal when their columns are, bit for bit; NaN equals NaN."""
    one = SampleBatch(a=[np.nan, 1.0])
    assert one == SampleBatch(a=[np.nan, 1.0])
    assert one != SampleBatch(a=np.array([np.nan, 1.0], np.float32))
    assert one != SampleBatch(a=[np.nan, 2.0])
    assert one != SampleBatch(b=[np.nan, 1.0])


def test_to_torch_copies_read_only_columns_and_leaves_strings_out():
    """Tensors never alias a read-only view; only floating columns take the asked dtype."""
    batch = batch_of(3)
    batch["rewards"].flags.writeable = False
    batch["small"] = np.array([1, 2, 3], np.uint16)
    tensors = batch.to_torch(dtype=torch.float32)
    assert sorted(tensors) == ["obs", "rewards", "small", "t"]
    assert tensors["rewards"].dtype == torch.float32
    assert tensors["t"].dtype == torch.int64
    assert tensors["small"].tolist() == [1, 2, 3]
    tensors["rewards"][0] = 5
    assert batch["rewards"][0] == 0


def test_no_operation_changes_a_dtype_and_floats_are_converted_on_request():
    """float64 stays float64 through concat, which joins it with nothing else; with_floats asks."""
    wide = SampleBatch(rewards=np.array([0.1]), t=[1])
    narrow = SampleBatch(rewards=np.array([0.1], np.float32), t=[2])
    assert concat_samples([wide, wide])["rewards"].dtype == np.float64
    with pytest.raises(
        BatchError, match=r"'rewards': expected one dtype, got \['float32', 'float64"
    ):
        concat_samples([wide, narrow])
    joined = concat_samples([wide.with_floats(np.float32), narrow])
    assert joined["rewards"].dtype == np.float32
    assert joined["t"].dtype == np.int64
    assert wide["rewards"].dtype == np.float64


def test_a_shallow_copy_shares_arrays_but_not_columns():
    """A column that is added or replaced stays the copy's own."""
    batch = batch_of(3)
    copy = batch.copy(shallow=True)
    copy["more"] = [1, 2, 3]
    copy["t"] = [7, 8, 9]
    assert batch == batch_of(3)
    assert np.shares_memory(copy["rewards"], batch["rewards"])


def test_columns_and_select_give_the_named_ones_in_that_order():
    """columns gives arrays, and select a batch that shares them; the error for a missing column
    names it."""
    batch = batch_of(3)
    rewards, t = batch.columns(["rewards", "t"])
    assert rewards is batch["rewards"]
    assert t is batch["t"]
    part = batch.select(["t", "obs"])
    assert list(part) == ["t", "obs"]
    assert part["obs"] is batch["obs"]
    assert part.count == 3
    with pytest.raises(KeyError, match="no column 'nope'"):
        batch.select(["nope"])


def test_it_takes_what_mappings_take():
    """get, update, pop and in, as on a dict; update checks the rows like an assignment."""
    batch = SampleBatch(a=[1, 2])
    batch.update(b=[3, 4])
    assert batch.get("b").tolist() == [3, 4]
    assert batch.get("c") is None
    assert batch.pop("b").tolist() == [3, 4]
    assert "b" not in batch
    with pytest.raises(BatchError, match="expected 2 rows, got 1"):
        batch.update(b=[3])


def test_to_torch_goes_to_the_device_that_was_asked_for():
    """The meta device stands for any other: shapes and dtypes arrive there."""
    tensors = batch_of(3).to_torch("meta", dtype=torch.float32)
    assert {tensor.device.type for tensor in tensors.values()} == {"meta"}
    assert tensors["rewards"].dtype == torch.float32
    assert tensors["obs"].shape == (3, 2)
