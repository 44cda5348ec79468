"""The loop of updates: how many, at which rate, and which weights stay."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from policy.algorithms.bc import BC, BCConfig
from policy.algorithms.offline import Transitions, inner_split, return_scale
from policy.inference.spec import ModuleSpec, PolicySpec
from policy.networks.policy import Policy
from storage.experience.sequences import fragment_ends
from storage.spaces.descriptors import Box, Discrete
from tests.policy.algorithms.steps import corridor, log_of

SPEC = PolicySpec(Box((2,)), Discrete(2), ModuleSpec(hidden=(), value_head=False))


class Recorded(BC):
    """An imitator of numbers that notes each step's rate, rows and weights after it."""

    def watch(self) -> None:
        self.rates: list[float] = []
        self.sizes: list[int] = []
        self.weights: list[np.ndarray] = []

    def loss_of(self, index: Tensor, done: int) -> dict[str, Tensor]:
        self.rates.append(self.optimizer.param_groups[0]["lr"])
        self.sizes.append(len(index))
        target = torch.randn(1, generator=torch.Generator().manual_seed(done))
        outputs = self.policy.module.dist_inputs(torch.ones(len(index), 2))
        return {"loss": (outputs - target).square().mean()}

    def note(self, *_: object) -> None:
        self.weights.append(self.policy.get_weights()["pi.0.weight"])


def run(config: BCConfig, rows: int, **scored: object) -> Recorded:
    algorithm = Recorded(Policy(SPEC), config)
    algorithm.watch()
    rng = np.random.default_rng(0)
    algorithm.descend(rows, rng, algorithm.loss_of, algorithm.note, **scored)  # type: ignore[arg-type]
    algorithm.note()
    return algorithm


@pytest.mark.parametrize("rows", [3, 64, 1000])
def test_updates_are_counted_whatever_the_rows(rows: int) -> None:
    """Passes of whole minibatches, and of what is left, until all updates are made."""
    found = run(BCConfig(updates=30, minibatch=32), rows)
    assert len(found.sizes) == 30
    each = [min(32, rows - first) for first in range(0, rows, 32)]
    assert found.sizes == (each * 30)[:30]


def test_epochs_take_the_place_of_updates() -> None:
    """Two passes over 70 rows in minibatches of 32 are six updates."""
    assert len(run(BCConfig(updates=30, epochs=2, minibatch=32), 70).sizes) == 6


def test_the_rate_decreases_to_nothing() -> None:
    """Linearly, from the first rate to a last step that is one of `updates` parts of it."""
    found = run(BCConfig(updates=20, lr=0.1), 8)
    # the rate that a step sees is the one before it
    np.testing.assert_allclose(found.rates[1:], [0.1 * (1 - k / 20) for k in range(19)])


def test_the_mean_of_the_last_tenth_stays() -> None:
    """The weights after each of the last two of twenty updates, averaged."""
    found = run(BCConfig(updates=20, lr=0.1), 8)
    before, last, kept = found.weights[-3:]
    assert not np.allclose(before, last)
    np.testing.assert_allclose(kept, (before + last) / 2, rtol=1e-6)


def test_the_part_with_the_highest_score_stays() -> None:
    """Scores 0, 1, ..., with the fourth part above all: its mean weights are kept."""
    seen: list[np.ndarray] = []

    def score(module: torch.nn.Module) -> float:
        seen.append(module.state_dict()["pi.0.weight"].numpy().copy())
        return 9.0 if len(seen) == 4 else 1.0

    found = run(BCConfig(updates=20, lr=0.1), 8, score=score)
    assert len(seen) == 10
    np.testing.assert_array_equal(found.weights[-1], seen[3])


def test_a_loss_that_is_not_finite_stops() -> None:
    """By the algorithm's name."""
    algorithm = BC(Policy(SPEC), BCConfig(updates=3))

    def loss_of(index: Tensor, done: int) -> dict[str, Tensor]:
        return {"loss": torch.tensor(float("nan"), requires_grad=True)}

    with pytest.raises(FloatingPointError, match="bc: the loss became nan"):
        algorithm.descend(4, np.random.default_rng(0), loss_of, lambda *_: None)


def test_the_unit_of_returns() -> None:
    """The deviation of discounted sums of what was logged; 1 if all are alike."""
    log = log_of(np.zeros((3, 2)), [0, 1, 0], [1, 2, 3], [0, 1, 1], np.zeros((3, 2)))
    ends = fragment_ends(log["t"], log["episode_ordinal"])
    rows = Transitions.of(Policy(SPEC), log)
    assert return_scale(rows, ends, 0.5) == pytest.approx(np.std([2.0, 2.0, 3.0]))
    log["rewards"] = np.array([1.0, 2.0, 2.0])
    assert return_scale(Transitions.of(Policy(SPEC), log), ends, 0.5) == 1.0


def test_the_inner_split_has_its_share_and_no_row_twice() -> None:
    """Random indices of both parts are all rows."""
    inner, own = inner_split(50, 0.2, np.random.default_rng(0), torch.device("cpu"))
    assert len(inner) == 10
    assert sorted([*inner.tolist(), *own.tolist()]) == list(range(50))
    assert inner.tolist() != list(range(10))


def test_rows_that_lead_nowhere_known_are_left_out() -> None:
    """Neither terminated nor with a next observation; one that cannot be read where it matters."""
    log = corridor(16)
    log["has_new_obs"][3] = False
    log["new_obs"][[4, 7]] = np.nan  # row 7 terminates
    reasons = Transitions.left_out(log)
    assert np.flatnonzero(reasons["no_next_obs"]).tolist() == [3]
    assert np.flatnonzero(reasons["not_finite"]).tolist() == [4]
