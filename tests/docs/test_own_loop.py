"""The programs of docs/own_loop.md run; `make d3rlpy` runs the one for another environment."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import pytest

from policy.inference.weight_store import WeightStore
from tests.docs.own_loop import EPISODES, fill, programs, run

HERE = [one for one in programs() if "import d3rlpy" not in one]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("own")
    fill(found)
    return found


@pytest.mark.parametrize("program", HERE, ids=["loss", "torch", "loader", "torchrl"])
def test_a_loop_of_ones_own_ends_with_a_candidate(program: str, home: Path) -> None:
    """Of all parts that it read; the loader brings each row once."""
    store, printed = WeightStore(home / "run", "default"), io.StringIO()
    with contextlib.chdir(home), contextlib.redirect_stdout(printed):
        run(program)
    last = printed.getvalue().split()[-1]
    if "DataLoader" in program:
        assert last == str(10 * EPISODES)
        return
    assert store.latest() == last
    (ranges,) = store.candidate_lineage(last).values()
    assert ranges.ranges() == [(0, EPISODES - 1)]


def test_one_program_is_for_another_environment() -> None:
    """It is the only one, and `make d3rlpy` finds it by its import."""
    assert len(HERE) == len(programs()) - 1 == 4
