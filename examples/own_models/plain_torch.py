"""A recommender in plain torch: embeddings of users and items, learned from the log.

python examples/own_models/plain_torch.py ROOT

The log's observations are a user's number, five candidates with four features each, and their mask.
"""

import sys

import torch
from torch import nn

from headrace import ActionRule, ShardReader, publish_module


class Ranker(nn.Module):
    """The expected reward of each candidate for a user."""

    def __init__(self, users, features):
        super().__init__()
        self.taste = nn.Embedding(users, 8)
        self.item = nn.Sequential(nn.Linear(features, 8), nn.GELU(), nn.Linear(8, 8))

    def forward(self, user, candidates):
        return (self.item(candidates) * self.taste(user)[:, None]).sum(dim=2)


def main(root):
    torch.manual_seed(1)
    model = Ranker(users=50, features=4)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    with ShardReader(root, policy_id="default", batch_size=256, shuffle=1024) as reader:
        for batch in reader:
            user = torch.as_tensor(batch["obs.user"]).long()
            scores = model(user, torch.as_tensor(batch["obs.candidates"]))
            chosen = scores.gather(1, torch.as_tensor(batch["actions"]).long()[:, None])[:, 0]
            loss = nn.functional.mse_loss(chosen, torch.as_tensor(batch["rewards"]).float())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        learned = reader.ledger
    rule = ActionRule("squarecb", gamma=20)
    return publish_module(root, model, head="q_values", action_rule=rule, lineage=learned)


if __name__ == "__main__":
    print(main(sys.argv[1]))
