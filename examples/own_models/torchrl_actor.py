"""An actor of torchrl, whose network is its own, learned from the log by weighted imitation.

python examples/own_models/torchrl_actor.py ROOT
"""

import sys

import torch
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.modules import MLP, NormalParamExtractor, ProbabilisticActor, TanhNormal

from headrace import ShardReader, publish_module


class Outputs(nn.Module):
    """What TanhNormal reads, as one tensor."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, obs):
        loc, scale = self.network(obs)
        return torch.cat([loc, scale.log()], dim=1)


def main(root):
    torch.manual_seed(1)
    layers = MLP(in_features=3, out_features=2, num_cells=[32], activation_class=nn.Mish)
    network = nn.Sequential(layers, NormalParamExtractor())
    actor = ProbabilisticActor(
        TensorDictModule(network, in_keys=["observation"], out_keys=["loc", "scale"]),
        in_keys=["loc", "scale"],
        distribution_class=TanhNormal,
        distribution_kwargs={"low": -2.0, "high": 2.0},
    )
    optimizer = torch.optim.Adam(actor.parameters(), lr=1e-3)
    with ShardReader(root, policy_id="default", batch_size=256, shuffle=1024) as reader:
        for batch in reader:
            loc, scale = network(torch.as_tensor(batch["obs"]))
            density = TanhNormal(loc, scale, low=-2.0, high=2.0)
            rewards = torch.as_tensor(batch["rewards"]).float()
            loss = -(density.log_prob(torch.as_tensor(batch["actions"])) * rewards).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        learned = reader.ledger
    return publish_module(root, Outputs(network), head="squashed_gaussian", lineage=learned)


if __name__ == "__main__":
    print(main(sys.argv[1]))
