"""Action rules: strict documents, and propensities that match the frequencies of actions."""

import itertools
import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policy.inference.action_layout import action_layout
from policy.inference.action_rule import GREEDY, SAMPLE, ActionRule
from policy.inference.distributions import Product
from policy.inference.numpy_policy import NumpyPolicy
from policy.inference.spec import ModuleSpec, PolicySpec, SpecError
from policy.networks.policy import Policy
from storage.spaces.descriptors import (
    Box,
    Dict,
    Discrete,
    MultiBinary,
    MultiDiscrete,
    Tuple,
)

SPEC = PolicySpec(Box((2,)), Discrete(3))
RULES = [
    ActionRule(),
    ActionRule("sample", temperature=0.5),
    ActionRule("sample", temperature=3.0),
    ActionRule("epsilon_greedy", epsilon=0.1),
    ActionRule("epsilon_greedy", epsilon=0.0),
    ActionRule("epsilon_greedy", epsilon=1.0),
    ActionRule("greedy"),
    ActionRule("sample", temperature=0.5, explore=0.2),
    ActionRule("greedy", explore=0.3),
    ActionRule("squarecb", gamma=3.0),
    ActionRule("squarecb", gamma=0.0, explore=0.1),
]
# Logits with ties for the best in each choice; of the bits, the middle one is a tie.
TIED = [
    (Discrete(4, 2), [1.0, 2.0, 2.0, -1.0]),
    (Discrete(20), [0.0] * 18 + [1.5, 1.5]),
    (MultiDiscrete((3, 2), (0, 1)), [0.5, 0.5, 0.1, 2.0, 0.3]),
    (MultiBinary((3,)), [1.0, 0.0, -0.5]),
    (Tuple((Discrete(2), Dict({"b": MultiBinary((1,)), "c": Discrete(2)}))), [1, 1, -2, 0, 0.7]),
]


def with_rule(rule):
    return PolicySpec(SPEC.observation, SPEC.action, action_rule=rule)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_a_rule_comes_back_from_its_spec(rule):
    """Through JSON, as in a policy's file and a version's manifest."""
    spec = with_rule(rule)
    assert PolicySpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec


def test_the_default_is_what_specs_without_a_rule_mean():
    """A document without a rule means sampling, and a spec that samples is written without one."""
    assert "action_rule" not in SPEC.to_json()
    document = {**SPEC.to_json(), "action_rule": {"kind": "sample", "temperature": 1.0}}
    assert PolicySpec.from_json(document) == SPEC == PolicySpec.from_json(SPEC.to_json())


@pytest.mark.parametrize(
    ("document", "text"),
    [
        ("sample", "expected an object with a kind"),
        ({"temperature": 1.0}, "expected an object with a kind"),
        ({"kind": "boltzmann"}, "expected a kind of"),
        ({"kind": "sample", "temperature": 0}, "expected temperature > 0"),
        ({"kind": "sample", "temperature": float("nan")}, "expected temperature > 0"),
        ({"kind": "sample", "epsilon": 0.1}, "sample takes no epsilon"),
        ({"kind": "sample"}, "expected temperature as a number, got None"),
        ({"kind": "sample", "temperature": 10**400}, "expected temperature > 0"),
        ({"kind": ["greedy"]}, "expected a kind of"),
        (None, "expected an object with a kind"),
        ({"kind": "epsilon_greedy"}, "expected epsilon as a number, got None"),
        ({"kind": "epsilon_greedy", "epsilon": True}, "expected epsilon as a number"),
        ({"kind": "epsilon_greedy", "epsilon": 1.5}, "expected epsilon from 0 to 1"),
        ({"kind": "greedy", "temperature": 1.0}, "greedy takes no temperature"),
        ({"kind": "greedy", "other": 1}, "expected kind and its parameter"),
        ({"kind": "greedy", "explore": 1.1}, "expected explore from 0 to 1"),
        ({"kind": "squarecb", "gamma": -1}, "expected gamma >= 0"),
        ({"kind": "squarecb"}, "expected gamma as a number, got None"),
    ],
)
def test_a_rule_that_makes_no_sense_is_refused(document, text):
    """The error has the expected and the given value."""
    with pytest.raises(SpecError, match=text):
        PolicySpec.from_json({**SPEC.to_json(), "action_rule": document})


def test_defaults_are_a_temperature_of_1_and_an_epsilon_of_5_percent():
    """In code and on a command line; greedy has no parameter, and must be named."""
    assert ActionRule() == ActionRule("sample", temperature=1) == SAMPLE
    assert ActionRule("epsilon_greedy") == ActionRule("epsilon_greedy", epsilon=0.05)
    assert [rule.explores for rule in RULES] == [
        *(True, True, True, True, False, True, False),
        *(True, True, True, True),
    ]


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_a_rule_is_read_as_it_is_printed(rule):
    assert ActionRule.parse(str(rule)) == rule


@pytest.mark.parametrize(
    "text",
    ["", "boltzmann", "greedy:1", "sample:", "epsilon_greedy:2", "sample+explore:x", "squarecb:-1"],
)
def test_a_text_that_names_no_rule_is_refused(text):
    with pytest.raises(ValueError, match=r"^action_rule: expected"):
        ActionRule.parse(text)


@pytest.mark.parametrize("action", [Box((2,)), Dict({"a": Discrete(2), "b": Box((1,))})])
def test_epsilon_greedy_is_refused_where_a_best_action_has_no_density(action):
    """With a Box in the space, sample and greedy remain, and greedy's logp is unknown."""
    with pytest.raises(SpecError, match="expected sample or greedy for continuous actions"):
        PolicySpec(Box((1,)), action, action_rule=ActionRule("epsilon_greedy"))
    assert PolicySpec(Box((1,)), action).has_propensity
    assert not PolicySpec(Box((1,)), action, action_rule=GREEDY).has_propensity
    with pytest.raises(SpecError, match="expected an ActionRule, got 'greedy'"):
        PolicySpec(Box((1,)), Discrete(2), action_rule="greedy")


def every_action(space):
    """Columns of all actions of a space, each once."""
    layout, options = action_layout(space), []
    for part in layout.components:
        starts = part.start or (0,) * math.prod(part.leaf.shape)
        sizes = part.sizes or (2,) * len(starts)
        choices = [range(a, a + n) for a, n in zip(starts, sizes, strict=True)]
        options.append([np.reshape(one, part.leaf.shape) for one in itertools.product(*choices)])
    rows = list(itertools.product(*options))
    columns = zip(layout.components, zip(*rows, strict=True), strict=True)
    return {part.leaf.path: np.array(of_leaf) for part, of_leaf in columns}, len(rows)


def constant_policy(space, logits, rule):
    """A policy with these logits for every observation."""
    spec = PolicySpec(Box((1,)), space, ModuleSpec(hidden=(), value_head=False), action_rule=rule)
    policy = Policy(spec)
    weights = {"pi.0.weight": np.zeros((len(logits), 1)), "pi.0.bias": np.array(logits)}
    policy.set_weights({name: array.astype(np.float32) for name, array in weights.items()})
    return policy


def fits(counts, probs):
    """Whether counts fit a multinomial: chi-square, wrong once in a million."""
    from scipy import stats  # noqa: PLC0415 - each worker of a run imports this module

    possible = probs > 0
    expected = probs[possible] * counts.sum()
    statistic = float(((counts[possible] - expected) ** 2 / expected).sum())
    freedom = int(possible.sum()) - 1
    return not counts[~possible].any() and statistic <= stats.chi2.isf(1e-6, max(freedom, 1))


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize(("space", "logits"), TIED, ids=lambda one: str(one)[:20])
def test_an_action_occurs_as_often_as_its_propensity_says(space, logits, rule):
    """5,000 draws by numpy, by torch, and 500 one by one: chi-square. logp is the logged one, and
    the probabilities of all actions sum to 1."""
    policy, n = constant_policy(space, logits, rule), 5000
    twin, flat = policy.to_numpy(), np.zeros((n, 1), np.float32)
    columns, count = every_action(space)
    logp = twin.logp(flat[:count], columns)
    probs = np.exp(logp)
    assert probs.sum() == pytest.approx(1, abs=1e-12)
    np.testing.assert_array_equal(policy.logp(flat[:count], columns), logp)

    def check(drawn, logged):
        same = np.ones((len(logged), count), np.bool_)
        for path, column in drawn.items():
            rows = np.reshape(column, (len(logged), 1, -1))
            same &= (rows == columns[path].reshape(1, count, -1)).all(axis=2)
        index = same.argmax(axis=1)
        assert fits(np.bincount(index, minlength=count), probs)
        np.testing.assert_allclose(logged, logp[index], atol=1e-12)

    for make in (twin.act, policy.compute_actions):
        actions = make(flat, np.random.default_rng(11))
        check(actions.columns, actions.logp)
    if isinstance(space, Discrete):
        rng, obs = np.random.default_rng(12), np.zeros(1, np.float32)
        ones = [twin.act_one(obs, rng) for _ in range(500)]
        check({"": [one.action for one in ones]}, [one.logp for one in ones])


def test_known_propensities():
    """Worked by hand: logits 0, ln 2, ln 2 under each rule; ties share."""
    logits = np.log([[1.0, 2.0, 2.0]])

    def probabilities(rule):
        return Product(action_layout(Discrete(3)), rule).probabilities(logits)[0]

    close = {"rtol": 0, "atol": 1e-12}
    np.testing.assert_allclose(probabilities(SAMPLE), [0.2, 0.4, 0.4], **close)
    half = ActionRule("sample", temperature=0.5)
    np.testing.assert_allclose(probabilities(half), np.array([1, 4, 4]) / 9, **close)
    some = ActionRule("epsilon_greedy", epsilon=0.3)
    np.testing.assert_allclose(probabilities(some), [0.1, 0.45, 0.45], **close)
    np.testing.assert_allclose(probabilities(GREEDY), [0, 0.5, 0.5], **close)
    floor = ActionRule("greedy", explore=0.3)
    np.testing.assert_allclose(probabilities(floor), [0.1, 0.45, 0.45], **close)
    both = ActionRule("sample", explore=0.3)
    np.testing.assert_allclose(probabilities(both), [0.24, 0.38, 0.38], **close)
    square = ActionRule("squarecb", gamma=2 / math.log(2))
    np.testing.assert_allclose(probabilities(square), [0.2, 0.4, 0.4], **close)


def test_a_temperature_scales_the_deviation_of_continuous_actions():
    """20,000 draws have the std; logp is the density of N(mean, (std temperature)^2)."""
    from scipy import stats  # noqa: PLC0415 - as above

    action = Box((1,), "float64")
    rule = ActionRule("sample", temperature=0.25)
    layout, n = action_layout(action), 20_000
    inputs = np.tile([3.0, math.log(2.0)], (n, 1)).astype(np.float32)
    actions = Product(layout, rule)
    drawn = actions.sample(inputs, np.random.default_rng(5))[""]
    assert abs(drawn.std() / 0.5 - 1) < 5 / np.sqrt(2 * n)
    std = 0.25 * math.exp(np.float32(math.log(2.0)))
    expected = stats.norm.logpdf(drawn[:, 0], 3.0, std)
    np.testing.assert_allclose(actions.logp(inputs, {"": drawn}), expected, rtol=1e-9)


@pytest.mark.parametrize("explore", [True, False])
def test_a_greedy_continuous_action_is_the_mean_and_has_no_density(explore):
    """logp is unknown, for a Dict as a whole, whether the rule or the caller turns exploration
    off.
    """
    action = Dict({"a": Discrete(2), "b": Box((2,))})
    spec = PolicySpec(Box((1,)), action, action_rule=GREEDY if explore else SAMPLE)
    policy, flat = Policy(spec, seed=3), np.ones((4, 1), np.float32)
    for twin in (policy.to_numpy().act, policy.compute_actions):
        actions = twin(flat, np.random.default_rng(0), explore=explore)
        np.testing.assert_array_equal(actions.columns["b"], actions.dist_inputs[:, 2:4])
        assert np.isnan(actions.logp).all()


@pytest.mark.parametrize("rule", [SAMPLE, ActionRule("epsilon_greedy")], ids=str)
def test_without_exploration_the_logged_propensity_is_true_too(rule):
    """Greedy, whatever the rule: 1 for a single best action, 1/2 each if two share."""
    policy = constant_policy(Discrete(3), [0.0, 1.0, 1.0], rule)
    actions = policy.to_numpy().act(
        np.zeros((2000, 1), np.float32), np.random.default_rng(0), explore=False
    )
    counts = np.bincount(actions.columns[""], minlength=3)
    assert fits(counts, np.array([0.0, 0.5, 0.5]))
    np.testing.assert_allclose(actions.logp, math.log(0.5))
    one = constant_policy(Discrete(3), [0.0, 1.0, 2.0], rule).to_numpy()
    best = one.act_one(np.zeros(1), np.random.default_rng(0), explore=False)
    assert (best.action, best.logp) == (2, 0.0)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([Discrete(3), Discrete(30), MultiDiscrete((2, 3)), MultiBinary((2,))]),
    st.sampled_from(RULES),
    st.integers(0, 2**31),
)
def test_torch_and_numpy_give_an_action_the_same_propensity(action, rule, seed):
    """Within 1e-6, for random weights and observations."""
    policy = Policy(PolicySpec(Box((4,)), action, action_rule=rule), seed=seed)
    rng = np.random.default_rng(seed)
    weights = policy.get_weights()
    noise = {name: rng.normal(scale=0.2, size=w.shape) for name, w in weights.items()}
    policy.set_weights({k: (w + noise[k]).astype(np.float32) for k, w in weights.items()})
    flat = rng.normal(size=(16, 4)).astype(np.float32)
    actions = policy.compute_actions(flat, rng)
    ours = policy.to_numpy().logp(flat, actions.columns)
    np.testing.assert_allclose(np.exp(ours), np.exp(actions.logp), atol=1e-6)
    np.testing.assert_array_equal(policy.logp(flat, actions.columns), actions.logp)


@pytest.mark.parametrize("temperature", [1e-300, 5e-324, 1e300])
def test_an_extreme_temperature_acts_and_logs_numbers(temperature):
    """A temperature near 0 acts greedily and shares ties; a very high one acts uniformly, with a
    std of at most e^2.
    """
    rule = ActionRule("sample", temperature=temperature)
    for space, logits in TIED:
        policy, flat = constant_policy(space, logits, rule), np.zeros((50, 1), np.float32)
        actions = policy.compute_actions(flat, np.random.default_rng(0))
        other = constant_policy(
            space, logits, GREEDY if temperature < 1 else ActionRule("epsilon_greedy", epsilon=1)
        )
        np.testing.assert_allclose(actions.logp, other.logp(flat, actions.columns), atol=1e-9)
    spec = PolicySpec(Box((1,)), Box((2,), "float64"), action_rule=rule)
    drawn = Policy(spec).compute_actions(np.zeros((50, 1), np.float32), np.random.default_rng(0))
    assert np.isfinite(drawn.logp).all()


def test_a_policy_of_a_published_document_acts_by_its_rule():
    """The manifest's spec has the rule, and a client's policy follows it."""
    policy = constant_policy(Discrete(2), [0.0, 1.0], ActionRule("epsilon_greedy", epsilon=0.2))
    spec = PolicySpec.from_json(json.loads(json.dumps(policy.spec.to_json())))
    twin = NumpyPolicy(spec, policy.get_weights())
    np.testing.assert_allclose(twin.probabilities(np.zeros((1, 1), np.float32)), [[0.1, 0.9]])
