"""Learning on several processes at once."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import safetensors.numpy

from policy.algorithms.data_parallel import find_free_port
from tests.policy.data_parallel_rank import batches, make

MODULE = "tests.policy.data_parallel_rank"


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Results of two ranks: 20 joint updates, then one with different counts, one of two policies,
    and one with other policies trained."""
    folder = tmp_path_factory.mktemp("ranks")
    urls = [f"tcp://127.0.0.1:{find_free_port()}" for _ in range(3)]
    outs = [folder / f"rank{rank}" for rank in (0, 1)]
    subprocess.run([sys.executable, "-m", MODULE, *map(str, outs), *urls], check=True, timeout=240)
    return outs


def test_two_ranks_equal_one_process_on_the_joined_batch(ranks):
    """The ranks begin with different weights. After 20 updates both have the weights of a single
    process that began as rank 0 and learned from the joined batches, to 1e-6.

    Row: setup_torch_data_parallel(url, world_rank, world_size, backend)
    """
    alone = make(seed=0)
    begin = {name: array.copy() for name, array in alone.get_weights()["default"].items()}
    expected = alone.compute_gradients(next(batches()))[0]
    for out in ranks:
        found = safetensors.numpy.load_file(out.with_name(f"{out.name}.gradients"))
        for number, gradient in enumerate(expected):
            np.testing.assert_allclose(found[str(number)], gradient, atol=1e-6, rtol=1e-5)
    for batch in batches():
        alone.learn_on_batch(batch)
    expected = alone.get_weights()["default"]
    assert any(not np.allclose(begin[name], expected[name], atol=1e-3) for name in begin)
    for out in ranks:
        found = safetensors.numpy.load_file(out)
        for name, array in expected.items():
            np.testing.assert_allclose(found[name], array, atol=1e-6, rtol=0)


def test_unequal_counts_are_refused_on_every_rank(ranks):
    """No rank waits for ever, and both errors name the counts.

    Row: setup_torch_data_parallel(url, world_rank, world_size, backend)
    """
    for out in ranks:
        text = out.with_name(f"{out.name}.refused").read_text()
        assert "expected the same count on every rank, got [16, 17]" in text


def texts_of(ranks, name):
    return [out.with_name(f"{out.name}.{name}").read_text() for out in ranks]


def test_ranks_with_other_policies_are_refused_on_every_rank(ranks):
    """One rank's gradients of a policy are never taken for another's. Ranks whose batches hold
    other policies, or one more, all raise with the counts.

    Row: setup_torch_data_parallel(url, world_rank, world_size, backend)
    """
    for text in texts_of(ranks, "others"):
        assert "got [8, 0] of policy 'a', [0, 8] of policy 'b'" in text
    for text in texts_of(ranks, "more"):
        assert text.endswith("expected the same count on every rank, got [8, 0] of policy 'a'")


def test_what_one_rank_refuses_no_rank_learns(ranks):
    """An unknown policy or a non-finite loss is reported on its rank; the other rank does not wait
    for it.

    Row: setup_torch_data_parallel(url, world_rank, world_size, backend)
    """
    other = "ValueError: data parallel: expected all ranks to learn, but [0] refused"
    for name, words in (("unknown", "no policy 'c'"), ("infinite", "the loss became")):
        mine, theirs = texts_of(ranks, name)
        assert words in mine
        assert theirs == other
    for out in ranks:
        assert safetensors.numpy.load_file(out.with_name(f"{out.name}.two"))["same"].all()


def test_ranks_of_several_policies_stay_alike(ranks):
    """After refused batches, and in whatever order a batch names its policies.

    Row: setup_torch_data_parallel(url, world_rank, world_size, backend)
    """
    first, second = (safetensors.numpy.load_file(out.with_name(f"{out.name}.two")) for out in ranks)
    for name, array in first.items():
        np.testing.assert_array_equal(array, second[name])


def test_ranks_that_train_other_policies_are_refused(ranks):
    """Ranks that train other policies are refused when they join, on every rank.

    Row: setup_torch_data_parallel(url, world_rank, world_size, backend)
    """
    for text in texts_of(ranks, "unlike"):
        assert "expected the same policies, trained ones and shapes on every rank" in text


def test_a_rank_outside_the_world_is_refused():
    """A rank outside the world is refused before any rank waits for it.

    Row: setup_torch_data_parallel(url, world_rank, world_size, backend)
    """
    with pytest.raises(ValueError, match="world_rank: expected 0 to 1, got 2"):
        make(seed=0).setup_torch_data_parallel("tcp://127.0.0.1:1", 2, 2)
    made = make(seed=0)
    made.policies["default"] = object()
    with pytest.raises(ValueError, match="expected a torch policy"):
        made.setup_torch_data_parallel("tcp://127.0.0.1:1", 0, 1)
    made.policies = {}
