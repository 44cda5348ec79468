"""Networks that were made elsewhere become versions with the head that they were made for."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from policy.inference.action_rule import GREEDY, ActionRule
from policy.inference.numpy_policy import NumpyPolicy
from policy.inference.own_models import publish_mlp, publish_onnx
from policy.inference.spec import SpecError
from policy.inference.weight_store import WeightStore
from storage.declarations.declaration import PolicyDeclaration
from storage.declarations.policy_files import save_declaration
from storage.errors import WeightsRefused
from storage.spaces.descriptors import Box, Discrete
from tests.policy.inference.onnx_files import linear

OBS, BOX = Box((4,)), Box((2,), low=-1.0, high=1.0)


def layers(*sizes: int) -> list[tuple[Any, Any]]:
    rng = np.random.default_rng(0)
    return [(rng.normal(size=(out, into)), rng.normal(size=out)) for into, out in pairwise(sizes)]


def live(root: Path) -> NumpyPolicy:
    store = WeightStore(root, "default")
    now = store.live()
    assert now is not None
    return NumpyPolicy.published(*store.read(now.version))


def test_layers_act_as_they_are(tmp_path: Path) -> None:
    """By any activation; Q-values are followed epsilon-greedily, unless there is another rule."""
    given = layers(4, 8, 3)
    spaces = OBS, Discrete(3)
    publish_mlp(tmp_path, given, activation="leaky_relu", spaces=spaces, head="q_values")
    policy, obs = live(tmp_path), np.ones(4, np.float32)
    h = given[0][0] @ obs + given[0][1]
    expected = given[1][0] @ np.where(h > 0, h, 0.01 * h) + given[1][1]
    np.testing.assert_allclose(policy.dist_inputs(obs[None])[0], expected, atol=1e-5)
    assert policy.spec.action_rule == ActionRule("epsilon_greedy")
    publish_mlp(tmp_path, given, spaces=spaces, head="q_values", action_rule=GREEDY)
    assert live(tmp_path).spec.action_rule == GREEDY


def test_a_boxs_deviations_are_outputs_or_given(tmp_path: Path) -> None:
    """Outputs are limited to the range of every policy's; squashing keeps samples inside."""
    publish_mlp(tmp_path, layers(4, 2), spaces=(OBS, BOX), log_std=[-1.0, 0.5])
    fixed = live(tmp_path).dist_inputs(np.ones((1, 4), np.float32))[0, 2:]
    np.testing.assert_array_equal(fixed, [-1.0, 0.5])
    ((weight, bias),) = layers(4, 4)
    publish_mlp(
        tmp_path,
        [(weight, np.add(bias, [0, 0, 100, -100]))],
        spaces=(OBS, BOX),
        head="squashed_gaussian",
    )
    policy = live(tmp_path)
    inputs = policy.dist_inputs(np.ones((9, 4), np.float32))
    np.testing.assert_array_equal(inputs[:, 2:], [[2.0, -20.0]] * 9)
    found = policy.act(np.ones((9, 4), np.float32), np.random.default_rng(0))
    np.testing.assert_array_equal(found.columns[""], found.env_columns[""])


def test_the_spaces_are_the_declared_ones(tmp_path: Path) -> None:
    """Without a declaration they are asked for; lineage and metrics are the candidate's."""
    data = linear().SerializeToString()
    with pytest.raises(SpecError, match="the root declares no policy 'default'"):
        publish_onnx(tmp_path, data)
    save_declaration(tmp_path, PolicyDeclaration(observation=OBS, action=Discrete(3)))
    path = tmp_path / "given.onnx"
    path.write_bytes(data)
    lineage = {"0123456789ab-0123456789abcdef": [(0, 3)]}
    digest = publish_onnx(tmp_path, path, lineage=lineage, metrics={"loss": 1.5}, live=False)
    store = WeightStore(tmp_path, "default")
    assert store.live() is None
    assert store.candidate(digest).metrics == {"algorithm": "own model", "loss": 1.5}
    assert [one.ranges() for one in store.candidate_lineage(digest).values()] == [[(0, 3)]]
    with pytest.raises(WeightsRefused, match="the spaces that the policy is declared with"):
        publish_onnx(tmp_path, data, spaces=(OBS, Discrete(3, 1)))


@pytest.mark.parametrize(
    ("given", "more", "text"),
    [
        ([], {}, "expected one or more weights"),
        ([np.ones((3, 4))], {}, "expected pairs of a weight and a bias"),
        (
            [*layers(4, 8), *layers(7, 3)],
            {},
            r"layers\[1\]: expected a weight \(out, 8\), got \(3, 7",
        ),
        (layers(4, 2), {}, r"pi.0.weight: expected float32 \(3, 4\), got float32 \(2, 4\)"),
        (layers(4, 3), {"log_std": [0.0]}, r"not expected \['log_std'\]"),
        (layers(4, 3), {"head": "squashed_gaussian"}, "expected 'categorical' for this action"),
        (layers(4, 3), {"activation": "sine"}, "expected an activation of"),
    ],
)
def test_layers_that_do_not_fit_are_refused(
    tmp_path: Path, given: list[Any], more: dict[str, Any], text: str
) -> None:
    """By what was expected; nothing is stored."""
    with pytest.raises(ValueError, match=text):
        publish_mlp(tmp_path, given, spaces=(OBS, Discrete(3)), **more)
    assert WeightStore(tmp_path, "default").candidates() == []
