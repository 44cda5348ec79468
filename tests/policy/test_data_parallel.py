"""Laws of learning on several processes at once."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import safetensors.numpy

from policy.data_parallel import find_free_port
from tests.policy.data_parallel_rank import batches, make

MODULE = "tests.policy.data_parallel_rank"


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What two ranks wrote: 100 updates together, then one with different counts."""
    folder = tmp_path_factory.mktemp("ranks")
    url = f"tcp://127.0.0.1:{find_free_port()}"
    outs = [folder / f"rank{rank}" for rank in (0, 1)]
    started = [
        subprocess.Popen([sys.executable, "-m", MODULE, url, str(rank), str(out)])
        for rank, out in enumerate(outs)
    ]
    try:
        codes = [one.wait(timeout=120) for one in started]
    finally:
        for one in started:
            one.kill()
    assert codes == [0, 0]
    return outs


def test_two_ranks_equal_one_process_on_the_joined_batch(ranks):
    """Whatever weights the ranks began with: after 100 updates both have those of a single process
    that began as rank 0 and learned from the joined batches, to 1e-6.

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
    """Nobody waits for ever, and both say which counts came.

    Row: setup_torch_data_parallel(url, world_rank, world_size, backend)
    """
    for out in ranks:
        text = out.with_name(f"{out.name}.refused").read_text()
        assert "expected the same count on every rank, got [16, 17]" in text


def test_a_rank_outside_the_world_is_refused():
    """Before anything waits for it.

    Row: setup_torch_data_parallel(url, world_rank, world_size, backend)
    """
    with pytest.raises(ValueError, match="world_rank: expected 0 to 1, got 2"):
        make(seed=0).setup_torch_data_parallel("tcp://127.0.0.1:1", 2, 2)
    made = make(seed=0)
    made.policies["default"] = object()
    with pytest.raises(ValueError, match="expected a torch policy"):
        made.setup_torch_data_parallel("tcp://127.0.0.1:1", 0, 1)
    made.policies = {}
