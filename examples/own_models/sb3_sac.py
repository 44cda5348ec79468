"""A policy of Stable-Baselines3's SAC: its squashed normal distribution, with the true density.

python examples/own_models/sb3_sac.py ROOT
"""

import sys

import torch
from stable_baselines3 import SAC
from torch import nn

from headrace import publish_module


class Actor(nn.Module):
    """The means and log standard deviations before tanh."""

    def __init__(self, actor):
        super().__init__()
        self.actor = actor

    def forward(self, obs):
        means, log_std, _ = self.actor.get_action_dist_params(obs)
        return torch.cat([means, log_std], dim=1)


def main(root):
    model = SAC("MlpPolicy", "Pendulum-v1", seed=1, device="cpu", learning_starts=100)
    model.learn(total_timesteps=200)
    metrics = {"algorithm": "SB3 SAC"}
    return publish_module(root, Actor(model.actor), head="squashed_gaussian", metrics=metrics)


if __name__ == "__main__":
    print(main(sys.argv[1]))
