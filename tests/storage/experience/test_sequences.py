"""The laws of sequences: fragments, right-zero padding, n-step returns."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.experience.sample_batch import BatchError, SampleBatch, concat_samples
from storage.experience.sequences import fragment_ends, sequence_lengths


def test_a_row_that_was_left_out_ends_the_fragment_before_it():
    """Runs are of consecutive t within one episode."""
    t = np.array([0, 1, 3, 4, 5, 0])
    episode = np.array([7, 7, 7, 7, 8, 8])
    assert fragment_ends(t, episode).tolist() == [False, True, False, True, True, True]
    assert fragment_ends([]).tolist() == []


@st.composite
def batches(draw) -> SampleBatch:
    """Episodes with a gap here and there, the last row of some terminal, that of others without a
    next observation; rows in any order."""
    rows = []
    for episode in range(draw(st.integers(0, 4))):
        times = sorted(draw(st.sets(st.integers(0, 12), min_size=1, max_size=10)))
        ends = draw(st.sampled_from(["terminated", "truncated", "open"]))
        for t in times:
            ended = ends if t == times[-1] else ""
            rows.append((episode, t, ended == "terminated", ended == "truncated", ended != "open"))
    rows = draw(st.permutations(rows))
    columns = list(zip(*rows, strict=True)) or [[], [], [], [], []]
    episode, t = (np.array(c, np.int64) for c in columns[:2])
    return SampleBatch(
        eps_id=np.array([f"e{e}" for e in episode], object),
        t=t,
        terminateds=np.array(columns[2], np.bool_),
        truncateds=np.array(columns[3], np.bool_),
        has_new_obs=np.array(columns[4], np.bool_),
        rewards=(episode * 100 + t).astype(np.float64) / 7,
        obs=np.stack([episode, t], axis=1).astype(np.float32),
        new_obs=np.stack([episode, t + 1], axis=1).astype(np.float32),
    )


@given(st.lists(st.booleans(), max_size=30), st.integers(1, 9))
def test_sequence_lengths_cut_at_every_end_and_at_the_longest(ends, longest):
    """The lengths sum to N, and none is 0 or above the longest; the last one of each fragment is
    what remains of it."""
    marks = np.array([*ends, True])
    lengths = sequence_lengths(marks, longest)
    expected, run = [], 0
    for over in marks:
        run += 1
        if over or run == longest:
            expected.append(run)
            run = 0
    assert lengths.tolist() == expected


@given(batches(), st.integers(1, 5))
def test_right_zero_padding_can_be_undone_and_pads_with_zeros(batch, longest):
    """unpad gives the rows in the order of split_by_episode; behind a sequence all is zero."""
    padded = batch.right_zero_pad(longest)
    assert padded["obs"].shape == (padded.count, longest, 2)
    assert padded["obs"].dtype == np.float32
    assert padded.env_steps() == padded.agent_steps() == batch.count
    rows = padded.unpad()
    assert rows == concat_samples(batch.split_by_episode() or [batch])
    for row in padded.rows():
        steps = row["seq_lens"]
        assert 1 <= steps <= longest
        assert (np.diff(row["t"][:steps]) == 1).all()
        assert len(set(row["eps_id"][:steps])) == 1
        assert not row["obs"][steps:].any()
        assert not row["rewards"][steps:].any()
        assert (row["eps_id"][steps:] == "").all()


def test_padded_sequences_move_together():
    """Shuffling a padded batch moves whole sequences, with their lengths."""
    batch = SampleBatch(eps_id=np.repeat(np.array(["a", "b"], object), [3, 2]), t=[0, 1, 2, 0, 1])
    padded = batch.right_zero_pad(4)
    assert padded["seq_lens"].tolist() == [3, 2]
    assert padded["t"].tolist() == [[0, 1, 2, 0], [0, 1, 0, 0]]
    back = padded.take([1, 0])
    assert back["eps_id"][:, 0].tolist() == ["b", "a"]
    assert back["seq_lens"].tolist() == [2, 3]


@given(batches(), st.integers(1, 5), st.sampled_from([0.0, 0.5, 1.0]))
def test_n_step_returns_are_the_sum_of_their_definition(batch, n, gamma):
    """Each row sums the rewards that follow it without a gap, up to n and not past an end."""
    found = batch.n_step(n, gamma)
    rows = {(r["eps_id"], r["t"]): r for r in batch.rows()}
    assert found.count == batch.count
    for row in found.rows():
        steps, total, at = 0, 0.0, row["t"]
        while steps < n and (row["eps_id"], at) in rows:
            last = rows[row["eps_id"], at]
            total += gamma**steps * last["rewards"]
            steps, at = steps + 1, at + 1
            if last["terminateds"] or last["truncateds"]:
                break
        assert row["n_steps"] == steps
        assert row["rewards"] == pytest.approx(total)
        assert row["new_obs"].tolist() == last["new_obs"].tolist()
        for name in ("has_new_obs", "terminateds", "truncateds"):
            assert row[name] == last[name]
        assert row["obs"].tolist() == rows[row["eps_id"], row["t"]]["obs"].tolist()


@given(batches())
def test_one_step_returns_are_the_rewards(batch):
    """n = 1 changes nothing but the order of the rows."""
    found = batch.n_step(1, 0.9)
    assert (found["n_steps"] == 1).all()
    del found["n_steps"]
    assert found == concat_samples(batch.split_by_episode() or [batch])


def test_what_has_no_time_is_refused():
    """Sequences need t and an identity; arguments out of range are named."""
    rows = SampleBatch(eps_id=np.array(["a"], object), t=[0], rewards=[1.0])
    with pytest.raises(BatchError, match="right_zero_pad: expected steps with a column 't'"):
        rows.select(["eps_id"]).right_zero_pad(3)
    padded = rows.right_zero_pad(3)
    for what, call in (
        ("right_zero_pad", lambda: padded.right_zero_pad(3)),
        ("n_step", lambda: padded.n_step(1, 0.9)),
        ("split_by_episode", padded.split_by_episode),
    ):
        with pytest.raises(BatchError, match=f"{what}: expected rows that are steps.*`unpad`"):
            call()
    with pytest.raises(BatchError, match="max_seq_len: expected 1 or more, got 0"):
        rows.right_zero_pad(0)
    with pytest.raises(BatchError, match=r"n >= 1 and gamma in \[0, 1\], got 0 and 0.9"):
        rows.n_step(0, 0.9)
    rows["obs"] = [[1.0]]
    rows.compress(codec="zlib")
    with pytest.raises(BatchError, match=r"compressed: \['obs'\]"):
        rows.n_step(1, 0.9)
