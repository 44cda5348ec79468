"""Updates per second of processor time, beside other libraries: `python -m benchmarks.updates`.

    python -m benchmarks.updates headrace     # or sb3, or d3rlpy, in an environment with it

All have the same rows, of random actions in CartPole-v1 or Pendulum-v1, the same networks (two
hidden layers of 64 units) and minibatches of 256 rows, on one thread.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import numpy as np
import torch

ROWS, UPDATES, MINIBATCH, HIDDEN = 10_000, 500, 256, (64, 64)
ENVS = {"continuous": "Pendulum-v1", "discrete": "CartPole-v1"}

Train = Callable[[int], object]
"""Makes as many updates."""


def columns(env: str) -> dict[str, Any]:
    """Rows of random actions; those of an episode follow each other."""
    made = gymnasium.make(env)
    made.action_space.seed(0)
    obs, _ = made.reset(seed=0)
    rows, t, episode = [], 0, 0
    for _ in range(ROWS):
        action = made.action_space.sample()
        after, reward, terminated, truncated, _ = made.step(action)
        rows.append((obs, action, float(reward), terminated, truncated, after, t, episode))
        obs, t = after, t + 1
        if terminated or truncated:
            (obs, _), t, episode = made.reset(), 0, episode + 1
    names = "obs", "actions", "rewards", "terminateds", "truncateds", "new_obs", "t", "ordinal"
    found = zip(names, zip(*rows, strict=True), strict=True)
    return {name: np.array(values) for name, values in found}


def of_headrace() -> Iterator[tuple[str, Train]]:
    """The built-in learners, and torchrl's losses."""
    from policy.algorithms.by_name import algorithm  # noqa: PLC0415  other libraries' lack it
    from policy.algorithms.learner import Learner  # noqa: PLC0415  as above
    from policy.inference.spec import ModuleSpec, PolicySpec  # noqa: PLC0415  as above
    from policy.networks.policy import Policy  # noqa: PLC0415  as above
    from policy.training.train import acting_spec  # noqa: PLC0415  as above
    from storage.experience.sample_batch import SampleBatch  # noqa: PLC0415  as above
    from storage.spaces.descriptors import Box, Discrete  # noqa: PLC0415  as above

    spaces = {
        "continuous": (Box((3,)), Box((1,), low=-2.0, high=2.0)),
        "discrete": (Box((4,)), Discrete(2)),
    }
    names = {
        "continuous": ("torchrl:sac", "torchrl:td3", "iql", "bc"),
        "discrete": ("torchrl:dqn", "cql", "bc"),
    }
    for kind, env in ENVS.items():
        rows = columns(env)
        batch = SampleBatch(
            rows,
            episode_ordinal=rows["ordinal"],
            has_new_obs=np.ones(ROWS, np.bool_),
            agent_id=np.full(ROWS, "agent0", object),
            stream=np.full(ROWS, "in-process", object),
        )
        for name in names[kind]:
            bare = PolicySpec(*spaces[kind], ModuleSpec(hidden=HIDDEN))
            spec = acting_spec(bare, algorithm(name))

            def train(updates: int, spec: Any = spec, name: str = name, batch: Any = batch) -> None:
                config = algorithm(name, minibatch=MINIBATCH, updates=updates)
                Learner(Policy(spec), config).update(batch)

            yield f"{name.removeprefix('torchrl:')}, {kind}", train


def of_sb3() -> Iterator[tuple[str, Train]]:
    """Stable-Baselines3."""
    from stable_baselines3 import DQN, SAC, TD3  # noqa: PLC0415  in an environment of its own

    for kind, learner in (("continuous", SAC), ("continuous", TD3), ("discrete", DQN)):
        networks = {"net_arch": list(HIDDEN)}  # a learner adds keys of its own
        made: Any = learner("MlpPolicy", ENVS[kind], policy_kwargs=networks, device="cpu",
                            batch_size=MINIBATCH, learning_starts=ROWS + 1)  # fmt: skip
        made.learn(ROWS)
        name = learner.__name__.lower()
        yield f"{name}, {kind}", lambda updates, made=made: made.train(updates, MINIBATCH)


def of_d3rlpy() -> Iterator[tuple[str, Train]]:
    """d3rlpy."""
    import d3rlpy  # noqa: PLC0415  in an environment of its own
    from d3rlpy import algos  # noqa: PLC0415  as above
    from d3rlpy.models.encoders import VectorEncoderFactory  # noqa: PLC0415  as above

    encoder = VectorEncoderFactory(list(HIDDEN))
    actor_critic = "actor_encoder_factory", "critic_encoder_factory"
    valued = "actor_encoder_factory", "critic_encoder_factory", "value_encoder_factory"
    for kind, configs in (
        (
            "continuous",
            (
                ("sac", algos.SACConfig, actor_critic),
                ("td3", algos.TD3Config, actor_critic),
                ("iql", algos.IQLConfig, valued),
                ("bc", algos.BCConfig, ("encoder_factory",)),
            ),
        ),
        (
            "discrete",
            (
                ("dqn", algos.DoubleDQNConfig, ("encoder_factory",)),
                ("cql", algos.DiscreteCQLConfig, ("encoder_factory",)),
                ("bc", algos.DiscreteBCConfig, ("encoder_factory",)),
            ),
        ),
    ):
        rows = columns(ENVS[kind])
        data = d3rlpy.dataset.MDPDataset(
            rows["obs"], rows["actions"].reshape(ROWS, -1), rows["rewards"].astype(np.float32),
            rows["terminateds"].astype(np.float32), rows["truncateds"].astype(np.float32),
        )  # fmt: skip
        for name, config, networks in configs:
            given = dict.fromkeys(networks, encoder)
            made = config(batch_size=MINIBATCH, **given).create(device="cpu:0")
            made.build_with_dataset(data)

            def train(updates: int, made: Any = made, data: Any = data) -> None:
                for _ in range(updates):
                    made.update(data.sample_transition_batch(MINIBATCH))

            yield f"{name}, {kind}", train


LIBRARIES = {"headrace": of_headrace, "sb3": of_sb3, "d3rlpy": of_d3rlpy}


def main(library: str) -> None:
    """Print the updates per second of each learner: the best of three rounds."""
    torch.set_num_threads(1)
    for name, train in LIBRARIES[library]():
        train(10)
        seconds = []
        for _ in range(3):
            began = time.process_time()
            train(UPDATES)
            seconds.append(time.process_time() - began)
        print(f"{library} {name}: {UPDATES / min(seconds):.0f}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
