"""Action distributions: torch and numpy agree, probabilities sum to 1, samples fit logp."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from policy.inference.action_layout import action_layout
from policy.inference.action_rule import GREEDY
from policy.inference.distributions import Product
from policy.networks.distributions import ActionDistribution, action_tensors
from storage.spaces.codec import Codec
from storage.spaces.descriptors import (
    Box,
    Dict,
    Discrete,
    MultiBinary,
    MultiDiscrete,
    SpaceError,
    Tuple,
)

leaf_spaces = st.one_of(
    st.builds(Discrete, st.integers(1, 5), st.integers(-3, 3)),
    st.builds(
        lambda n: MultiDiscrete(tuple(n), tuple(range(len(n)))),
        st.lists(st.integers(1, 4), min_size=1, max_size=3),
    ),
    st.builds(MultiBinary, st.lists(st.integers(1, 3), min_size=1, max_size=2).map(tuple)),
    st.builds(
        lambda shape, dtype: Box(tuple(shape), dtype, -1.0, 1.0),
        st.lists(st.integers(1, 3), max_size=2),
        st.sampled_from(["float16", "float32", "float64"]),
    ),
)
spaces = st.recursive(
    leaf_spaces,
    lambda inner: st.one_of(
        st.dictionaries(st.sampled_from("abc"), inner, min_size=1).map(Dict),
        st.lists(inner, min_size=1, max_size=3).map(lambda items: Tuple(tuple(items))),
    ),
    max_leaves=4,
)


bounded = st.builds(
    lambda shape, dtype, low, width: Box(tuple(shape), dtype, low, low + width),
    st.lists(st.integers(1, 3), max_size=2),
    st.sampled_from(["float32", "float64"]),
    st.sampled_from([-2.0, 0.0, 3.0]),
    st.sampled_from([0.5, 1.0, 40.0]),
)
layouts = st.one_of(
    spaces.map(action_layout), bounded.map(lambda box: action_layout(box, squashed=True))
)


def random_inputs(layout, count, rng, scale=2.0):
    """(B, K) float32; log stds within [-1, 1]."""
    inputs = rng.normal(scale=scale, size=(count, layout.size))
    inputs[:, layout.head :] = np.clip(inputs[:, layout.head :], -1, 1)
    return inputs.astype(np.float32)


@settings(max_examples=60, deadline=None)
@given(layouts, st.integers(0, 2**32))
def test_torch_and_numpy_give_the_same_logp(layout, seed):
    """For sampled and for most likely actions of any acting space, in float64, within 1e-9."""
    rng = np.random.default_rng(seed)
    inputs, actions = random_inputs(layout, 5, rng), Product(layout)
    dist = ActionDistribution(layout, torch.from_numpy(inputs))
    for columns in (actions.sample(inputs, rng), Product(layout, GREEDY).sample(inputs, rng)):
        logp = dist.logp(action_tensors(layout, columns))
        assert logp.dtype == torch.float64
        np.testing.assert_allclose(logp.numpy(), actions.logp(inputs, columns), atol=1e-9)


@settings(max_examples=60, deadline=None)
@given(layouts, st.integers(0, 2**32))
def test_what_is_sent_lies_in_the_space_and_what_is_stored_fits_its_codec(layout, seed):
    """Clipped actions pass the strict check, unclipped ones the check without a range."""
    rng = np.random.default_rng(seed)
    actions, codec = Product(layout), Codec(layout.space)
    columns = actions.sample(random_inputs(layout, 3, rng), rng)
    for data in codec.encode_columns(columns, 3):
        codec.check(data, check_range=False)
    for data in codec.encode_columns(actions.clip(columns), 3):
        codec.check(data)


@pytest.mark.parametrize(
    "space", [Discrete(3, -1), MultiDiscrete((2, 3)), MultiBinary((2,)), Tuple((Discrete(2),) * 2)]
)
def test_samples_occur_as_often_as_their_logp_says(space):
    """20,000 draws by numpy and by torch: each action's share is exp(logp) within 5 sigma."""
    rng, layout, n = np.random.default_rng(3), action_layout(space), 20_000
    inputs = np.repeat(random_inputs(layout, 1, rng, scale=1.0), n, axis=0)
    actions = Product(layout)
    columns = actions.sample(inputs, rng)
    dist = ActionDistribution(layout, torch.from_numpy(inputs))
    drawn = dist.sample(torch.Generator().manual_seed(3))
    by_numpy = torch.cat(action_tensors(layout, columns), dim=1)
    by_torch = torch.cat(drawn, dim=1)
    probs = np.exp(actions.logp(inputs, columns))
    kinds, first, counts = np.unique(by_numpy, axis=0, return_index=True, return_counts=True)
    assert probs[first].sum() == pytest.approx(1, abs=1e-9)
    for kind, p, count in zip(kinds, probs[first], counts, strict=True):
        bound = 5 * math.sqrt(n * p * (1 - p)) + 1
        assert abs(count - n * p) < bound
        assert abs(int((by_torch.numpy() == kind).all(axis=1).sum()) - n * p) < bound


def test_gaussian_samples_have_the_mean_and_std_of_their_inputs():
    """20,000 draws by numpy and by torch, within 5 standard errors."""
    layout, n = action_layout(Box((2,), "float64")), 20_000
    mean, std = np.array([0.5, -2.0]), np.array([0.3, 1.5])
    inputs = np.tile(np.concatenate([mean, np.log(std)]), (n, 1)).astype(np.float32)
    by_numpy = Product(layout).sample(inputs, np.random.default_rng(1))[""]
    dist = ActionDistribution(layout, torch.from_numpy(inputs))
    by_torch = dist.sample(torch.Generator().manual_seed(1))[0].numpy()
    for drawn in (by_numpy, by_torch):
        assert (np.abs(drawn.mean(axis=0) - mean) < 5 * std / np.sqrt(n)).all()
        assert (np.abs(drawn.std(axis=0) / std - 1) < 5 / np.sqrt(2 * n)).all()


@settings(max_examples=40, deadline=None)
@given(layouts, st.integers(0, 2**32))
def test_entropy_is_the_mean_of_minus_logp(layout, seed):
    """Over 4,000 draws, within 6 standard errors; one action only has entropy 0."""
    rng, n = np.random.default_rng(seed), 4000
    inputs = np.repeat(random_inputs(layout, 1, rng, scale=1.0), n, axis=0)
    dist = ActionDistribution(layout, torch.from_numpy(inputs))
    surprise = -dist.logp(dist.sample(torch.Generator().manual_seed(seed % 2**31))).numpy()
    error = 6 * surprise.std() / np.sqrt(n) + 1e-9
    assert abs(float(dist.entropy()[0]) - surprise.mean()) < error


def test_a_known_gaussian_logp():
    """N(0, 1) at 0 and at 2, worked by hand; logp is that of the unclipped action."""
    layout = action_layout(Box((1,), "float64", -1.0, 1.0))
    inputs = np.zeros((2, 2), np.float32)
    logp = Product(layout).logp(inputs, {"": np.array([[0.0], [2.0]])})
    expected = -0.5 * math.log(2 * math.pi)
    np.testing.assert_allclose(logp, [expected, expected - 2.0], rtol=1e-12)


def test_logp_has_gradients_for_every_input():
    """For the learner, d logp / d dist_inputs exists for logits, means and log stds."""
    layout = action_layout(Dict({"a": Discrete(3), "b": Box((2,)), "c": MultiBinary((2,))}))
    inputs = torch.zeros(1, layout.size, requires_grad=True)
    columns = {"a": np.array([1]), "b": np.array([[0.5, 1.0]]), "c": np.array([[0, 1]], np.int8)}
    logp = ActionDistribution(layout, inputs).logp(action_tensors(layout, columns))
    (gradient,) = torch.autograd.grad(logp.sum(), inputs)
    assert (gradient[0, [0, 1, 2, 3, 4, 5, 6]] != 0).all()


@pytest.mark.parametrize(
    ("space", "column", "text"),
    [
        (Discrete(2, 1), np.array([1, 3]), "action: expected one of .* got 3 in row 1"),
        (Discrete(2), np.array([0.0, 1.0]), "action: expected integers, got float64"),
        (MultiDiscrete((2, 2)), np.array([[0, 2], [0, 0]]), "in row 0"),
        (MultiDiscrete((2, 2)), np.array([0, 1]), r"expected shape \(B, \*\(2,\)\), got \(2,\)"),
        (MultiBinary((1,)), np.array([[2], [0]], np.int8), "expected zeros and ones"),
    ],
)
def test_actions_outside_the_space_are_refused(space, column, text):
    """A logged action that the policy can't take is an error, not a number."""
    layout = action_layout(space)
    with pytest.raises(SpaceError, match=text):
        Product(layout).logp(np.zeros((2, layout.size), np.float32), {"": column})


def test_inputs_that_are_not_finite_are_refused():
    """A policy that has diverged must not act."""
    layout = action_layout(Discrete(2))
    with pytest.raises(ValueError, match="expected finite numbers"):
        Product(layout).sample(np.array([[0.0, np.nan]]), np.random.default_rng(0))


@pytest.mark.parametrize(("mean", "log_std"), [(0.0, 0.0), (0.7, -1.0), (-1.5, 0.4)])
def test_a_squashed_density_integrates_to_one_and_is_that_of_its_samples(mean, log_std):
    """Over the Box, and over each of its tenths to the share of 20,000 samples within 5 sigma."""
    box, n = Box((1,), "float64", -1.0, 3.0), 20_000
    layout = action_layout(box, squashed=True)
    edges = np.linspace(-1, 3, 10_001)
    middle = (edges[1:] + edges[:-1]) / 2
    inputs = np.array([[mean, log_std]], np.float32)
    logp = Product(layout).logp(np.repeat(inputs, len(middle), axis=0), {"": middle[:, None]})
    mass = np.exp(logp) * np.diff(edges)
    assert mass.sum() == pytest.approx(1, abs=1e-3)
    many = np.repeat(inputs, n, axis=0)
    drawn = Product(layout).sample(many, np.random.default_rng(1))[""][:, 0]
    counts, _ = np.histogram(drawn, bins=np.linspace(-1, 3, 11))
    shares = mass.reshape(10, -1).sum(axis=1)
    assert (np.abs(counts - n * shares) < 5 * np.sqrt(n * shares * (1 - shares)) + 20).all()


def test_a_squashed_action_at_its_bound_has_a_finite_density_and_none_outside():
    """Rounding to float32 puts samples on the bound; another policy's may be beyond it."""
    layout = action_layout(Box((1,), "float32", 0.0, 1.0), squashed=True)
    inputs = np.array([[12.0, -1.0]] * 3, np.float32)
    columns = {"": np.array([[1.0], [0.0], [1.5]], np.float32)}
    logp = Product(layout).logp(inputs, columns)
    assert np.isfinite(logp[:2]).all()
    assert logp[2] == -np.inf
    assert logp[0] > logp[1]
    twin = ActionDistribution(layout, torch.from_numpy(inputs))
    np.testing.assert_array_equal(twin.logp(action_tensors(layout, columns)).numpy(), logp)
    sampled = Product(layout).sample(inputs, np.random.default_rng(0))
    assert (sampled[""] <= 1).all()
    assert np.isfinite(Product(layout).logp(inputs, sampled)).all()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_squashed_action_may_have_the_widest_bounds(dtype):
    """Their difference is more than the largest number."""
    most = float(np.finfo(dtype).max)
    layout = action_layout(Box((1,), dtype, -most, most), squashed=True)
    inputs = np.array([[0.5, -1.0]], np.float32)
    sampled = Product(layout).sample(inputs, np.random.default_rng(0))
    assert np.isfinite(sampled[""]).all()
    assert np.isfinite(Product(layout).logp(inputs, sampled)).all()
