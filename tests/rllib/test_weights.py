"""Modules that clients act with, and what is refused, each in one sentence.

`headrace.rllib` itself refuses a Ray that is too old.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import ray
import torch
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.algorithms.ppo.torch.default_ppo_torch_rl_module import DefaultPPOTorchRLModule
from ray.rllib.connectors.env_to_module import MeanStdFilter
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig

import headrace.rllib
from headrace.rllib.runner import HeadraceEnvRunner
from headrace.rllib.weights import published_policy
from storage.declarations.declaration import PolicyDeclaration
from storage.declarations.policy_files import save_declaration
from storage.errors import StorageError
from storage.spaces.gymnasium_spaces import from_gym
from storage.weights.store import WeightFolder

SEEN = gym.spaces.Box(-9, 9, (4,))
CHOICE, VECTOR = gym.spaces.Discrete(3), gym.spaces.Box(-1, 1, (2,))


def module(action: Any, seen: Any = SEEN, kind: Any = DefaultPPOTorchRLModule, **model: Any) -> Any:
    config = dataclasses.asdict(DefaultModelConfig(fcnet_hiddens=[16, 16], **model))
    spaces = {"observation_space": seen, "action_space": action}
    return kind(**spaces, model_config=config, inference_only=True)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("action", [CHOICE, VECTOR, gym.spaces.MultiDiscrete([2, 3])])
def test_clients_act_by_the_same_distribution(action: Any, shared: bool) -> None:
    """Of a first layer that the values share, too."""
    free = isinstance(action, gym.spaces.Box)
    model = module(action, free_log_std=free, vf_share_layers=shared, fcnet_activation="relu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        seen = torch.randn(5, 4)
        theirs = model.forward_inference({"obs": seen})["action_dist_inputs"]
    ours = published_policy(model, SEEN, action).to_numpy().dist_inputs(seen.numpy())
    assert np.allclose(ours, theirs.numpy(), atol=1e-5)


class Doubled(DefaultPPOTorchRLModule):  # type: ignore[misc]
    def _forward(self, batch: Any, **kwargs: Any) -> Any:
        found = super()._forward(batch, **kwargs)
        return {**found, "action_dist_inputs": 2 * found["action_dist_inputs"] + 1}


class Deeper(DefaultPPOTorchRLModule):  # type: ignore[misc]
    def setup(self) -> None:
        super().setup()
        self.extra = torch.nn.Linear(2, 2)


class Normed(DefaultPPOTorchRLModule):  # type: ignore[misc]
    def setup(self) -> None:
        super().setup()
        self.pi.net.mlp.append(torch.nn.LayerNorm(3))


REFUSED: dict[str, tuple[Any, Any, Any]] = {
    r"module: expected fully connected layers, got extra\.weight of Deeper: export it to ONNX": (
        *(lambda: module(CHOICE, kind=Deeper), SEEN, CHOICE),
    ),
    r"module: expected the outputs of fully connected layers, got others from Doubled: .*ONNX": (
        *(lambda: module(CHOICE, kind=Doubled), SEEN, CHOICE),
    ),
    r"module: expected fully connected layers, got pi\.net\.mlp\.1\.weight of Normed: .*ONNX": (
        *(lambda: module(CHOICE, kind=Normed), SEEN, CHOICE),
    ),
    r"module: .*; for a Box set free_log_std=True": (lambda: module(VECTOR), SEEN, VECTOR),
    r"expected one activation in all layers, got \['relu', 'tanh'\]": (
        *(lambda: module(CHOICE, head_fcnet_hiddens=[8]), SEEN, CHOICE),
    ),
    r"observation: expected a Box of one axis, got Discrete": (
        *(lambda: module(CHOICE), gym.spaces.Discrete(3), CHOICE),
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_clients_cannot_run_is_refused(message: str) -> None:
    make, seen, action = REFUSED[message]
    with pytest.raises(ValueError, match=message):
        published_policy(make(), seen, action)


def config(root: Path, action: Any = CHOICE, policy_id: str = "default", **runners: Any) -> Any:
    where = HeadraceEnvRunner.at(root=root, policy_id=policy_id)
    return (
        PPOConfig()
        .environment(observation_space=SEEN, action_space=action)
        .env_runners(env_runner_cls=where, num_env_runners=0, **runners)
    )


def declare(root: Path, action: Any = CHOICE, policy_id: str = "default") -> None:
    spaces = {"observation": from_gym(SEEN), "action": from_gym(action)}
    save_declaration(root, PolicyDeclaration(policy_id=policy_id, **spaces))


def test_a_runner_needs_a_policy_of_the_same_spaces(tmp_path: Path) -> None:
    with pytest.raises((ValueError, StorageError), match="declared policy 'default', got none"):
        config(tmp_path).env_runner_cls(config=config(tmp_path))
    declare(tmp_path, gym.spaces.Discrete(2))
    with pytest.raises(ValueError, match=r"spaces that the collector declares.*got.*Discrete\(3\)"):
        config(tmp_path).env_runner_cls(config=config(tmp_path))


def test_settings_that_act_only_in_ray_are_refused_by_name(tmp_path: Path) -> None:
    declare(tmp_path)
    (tmp_path / "shards").mkdir()
    filtered = config(tmp_path, env_to_module_connector=lambda env, spaces, device: MeanStdFilter())
    runner = filtered.env_runner_cls(config=filtered)
    with pytest.raises(ValueError, match="changes observations, got MeanStdFilter: clients"):
        runner.release()
    runner.stop()
    several = config(tmp_path, num_envs_per_env_runner=4)
    with pytest.raises(ValueError, match="num_envs_per_env_runner: expected 1"):
        several.env_runner_cls(config=several)
    boxes = tmp_path / "boxes"
    declare(boxes, VECTOR)
    with pytest.raises(ValueError, match="normalize_actions: expected False"):
        config(boxes, VECTOR).env_runner_cls(config=config(boxes, VECTOR))


def test_a_release_is_the_same_content_as_a_new_version(tmp_path: Path) -> None:
    """And a second state with the same weights is no version."""
    declare(tmp_path)
    (tmp_path / "shards").mkdir()
    given = config(tmp_path).rl_module(model_config={"fcnet_hiddens": [8]})
    runner = given.env_runner_cls(config=given)
    store = WeightFolder(tmp_path, "default")
    for expected in (1, 1):
        runner.set_state({"rl_module": runner.module.get_state()})
        live = store.live()
        assert live is not None
        assert live.version == expected
    runner.release()
    found = [store.load(version)[1] for version in (1, 2)]
    assert all(np.array_equal(found[0][name], found[1][name]) for name in found[0])
    with pytest.raises(ValueError, match="expected num_timesteps at most, got num_episodes"):
        runner.sample(num_episodes=2)
    runner.stop()


def test_each_policy_under_a_root_has_its_own_positions(tmp_path: Path) -> None:
    """And what one has learned is not in the other's lineage."""
    (tmp_path / "shards").mkdir()
    for name in ("a", "0-of-1-a"):
        declare(tmp_path, policy_id=name)
        given = config(tmp_path, policy_id=name)
        runner = given.env_runner_cls(config=given)
        assert runner._lineage() == {}
        position = tmp_path / "readers" / f"rllib-0-of-1-{name}.json"
        state = json.loads(position.read_text())
        position.write_text(json.dumps({**state, "ledger": {name: [[0, 4]]}}))
        assert set(runner._lineage()) == {name}
        runner.stop()


def test_an_old_ray_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "__version__", "2.55.1")
    with pytest.raises(ImportError, match=r"expected Ray 2\.60 or later, got 2\.55\.1"):
        _ = headrace.rllib.RootData
