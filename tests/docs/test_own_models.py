"""The programs of examples/own_models: `plain_torch`, `sb3_ppo`, `sb3_sac`, `torchrl_actor` and
`sklearn_mlp`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from policy.inference.weight_store import WeightStore
from storage.declarations.declaration import PolicyDeclaration
from storage.declarations.policy_files import save_declaration
from storage.shards.shard import ShardWriter
from storage.spaces.codec import Codec
from storage.spaces.descriptors import (
    Box,
    Dict,
    Discrete,
    MultiBinary,
    Space,
    canonical_json,
    schema_id,
)
from tests.collector_process import CollectorProcess, shard_rows
from tests.headrace.command import answer, headrace
from tests.policy.training.live_log import part

ROOT = Path(__file__).parents[2]
EPISODES = 200

ACTS = """
import json, sys
for name in ("torch", "stable_baselines3", "torchrl", "sklearn", "pandas", "pyarrow"):
    sys.modules[name] = None
import numpy as np
from headrace import PolicyClient
with PolicyClient(sys.argv[1]) as client:
    name = client.start_episode()
    obs = {key: np.array(value) for key, value in json.loads(sys.argv[2]).items()}
    for _ in range(3):
        client.get_action(name, obs.get("", obs))
    client.end_episode(name)
"""


def _box(rng: np.random.Generator) -> Any:
    return rng.normal(size=4).astype(np.float32)


def _pendulum(rng: np.random.Generator) -> Any:
    return rng.uniform(-1, 1, 3).astype(np.float32)


def _shop(rng: np.random.Generator) -> Any:
    return {
        "user": int(rng.integers(50)),
        "candidates": rng.normal(size=(5, 4)).astype(np.float32),
        "action_mask": np.array([1, 1, 1, 1, 0], np.int8),
    }


SHOP = Dict(
    {"user": Discrete(50), "candidates": Box((5, 4), ragged=True), "action_mask": MultiBinary((5,))}
)
TWO = Box((4,)), Discrete(2), _box
TORQUE = Box((3,)), Box((1,), low=-2.0, high=2.0), _pendulum
LOGS: dict[str, tuple[Space, Space, Callable[[np.random.Generator], Any]]] = {
    "sklearn_mlp": TWO,
    "sb3_ppo": TWO,
    "sb3_sac": TORQUE,
    "torchrl_actor": TORQUE,
    "plain_torch": (SHOP, Discrete(5), _shop),
}


def logged(root: Path, name: str, first: int = 0) -> Any:
    """Add one-step episodes by a uniform policy to a log; return an observation."""
    observation, action, seen = LOGS[name]
    save_declaration(root, PolicyDeclaration(observation=observation, action=action))
    rng, codecs = np.random.default_rng(first), (Codec(observation), Codec(action))
    schema, parts = schema_id(observation, action), []
    for number in range(first, first + EPISODES):
        obs = seen(rng)
        encoded = codecs[0].encode(obs, "obs")
        sizes = np.array([len(encoded)], "<u4").tobytes() if name == "plain_torch" else b""
        options = 4 if name == "plain_torch" else 2
        if isinstance(action, Box):
            taken, density = rng.uniform(-2, 2, 1).astype(np.float32), 0.25
        else:
            taken, density = rng.integers(options), 1 / options
        parts.append(
            part(
                number,
                1,
                schema_id=schema,
                obs=encoded,
                obs_lengths=sizes,  # the candidates are ragged
                actions=codecs[1].encode(taken, "action"),
                rewards=np.array([float(rng.random() < 0.5)]).tobytes(),
                action_logp=np.log([density]).tobytes(),
            )
        )
    writer = ShardWriter(root / "shards")
    writer.write(f"0123456789ab-{schema}", canonical_json(observation, action), parts)
    return obs


@pytest.mark.long
@pytest.mark.parametrize("name", LOGS)
def test_a_model_of_another_library_acts_and_is_judged(name: str, tmp_path: Path) -> None:
    """Its program ends in a version on which a client without that library acts, and which the
    judge judges by episodes that came later."""
    obs = logged(tmp_path, name)
    program = [sys.executable, ROOT / f"examples/own_models/{name}.py", tmp_path]
    ran = subprocess.run(program, capture_output=True, text=True, cwd=ROOT)
    assert ran.returncode == 0, ran.stderr
    digest = ran.stdout.split()[-1]
    store = WeightStore(tmp_path, "default")
    assert store.manifest(1).candidate == digest
    with CollectorProcess(tmp_path) as collector:
        given = obs if isinstance(obs, dict) else {"": obs}
        plain = {key: np.asarray(value).tolist() for key, value in given.items()}
        words = [sys.executable, "-c", ACTS, collector.address, json.dumps(plain)]
        acted = subprocess.run(words, capture_output=True, text=True, cwd=ROOT)
        assert acted.returncode == 0, acted.stderr
        assert collector.stop() == 0
    assert len(shard_rows(tmp_path)) == EPISODES + 3
    logged(tmp_path, name, first=EPISODES)
    words = ["evaluate", digest, "--root", tmp_path, "--split", "all", "--json"]
    (judged,) = answer(headrace(*words))["logs"]
    assert judged["verdict"] in ("better", "worse", "cannot tell")
    assert judged["episodes"] >= EPISODES
