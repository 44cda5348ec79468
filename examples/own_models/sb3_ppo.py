"""A policy of Stable-Baselines3's PPO: the logits of its actor act in clients.

python examples/own_models/sb3_ppo.py ROOT
"""

import sys

from stable_baselines3 import PPO
from torch import nn

from headrace import publish_module


class Actor(nn.Module):
    """The part of an ActorCriticPolicy that acts.

    For a Box the outputs would be torch.cat([means, policy.log_std.expand_as(means)], dim=1).
    """

    def __init__(self, policy):
        super().__init__()
        self.policy = policy

    def forward(self, obs):
        features = self.policy.extract_features(obs, self.policy.pi_features_extractor)
        return self.policy.action_net(self.policy.mlp_extractor.forward_actor(features))


def main(root):
    model = PPO("MlpPolicy", "CartPole-v1", n_steps=256, seed=1, device="cpu")
    model.learn(total_timesteps=2048)
    return publish_module(root, Actor(model.policy), metrics={"algorithm": "SB3 PPO"})


if __name__ == "__main__":
    print(main(sys.argv[1]))
