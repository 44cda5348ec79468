"""A log of one-step decisions, in memory and as real shards, with a known best policy."""

from dataclasses import dataclass

import numpy as np
import pytest

from storage.declarations.declaration import PolicyDeclaration
from storage.declarations.policy_files import save_declaration
from storage.experience.episode import Part
from storage.experience.sample_batch import SampleBatch
from storage.objects.opening import Root, objects_at
from storage.shards.shard import ShardWriter
from storage.spaces.codec import Codec
from storage.spaces.descriptors import Box, Discrete, canonical_json, schema_id

OBSERVATION, ACTION = Box((2,)), Discrete(3, 1)
STREAM = f"0123456789ab-{schema_id(OBSERVATION, ACTION)}"


@dataclass
class BanditLog:
    """N decisions: the sign of obs[0] decides whether action 1 or 3 earns; action 2 never does."""

    obs: np.ndarray  # (N, 2) float32
    actions: np.ndarray  # (N,) int64, 1 to 3
    rewards: np.ndarray  # (N,) 0 or 1
    logp: np.ndarray  # (N,)
    ended: list[str | None]

    @classmethod
    def make(cls, count, seed=0):
        """Action 2, which earns nothing, is logged most; the best policy earns 0.9 a decision."""
        rng = np.random.default_rng(seed)
        obs = rng.normal(size=(count, 2)).astype(np.float32)
        prob = np.array([0.2, 0.6, 0.2])
        actions = rng.choice(3, size=count, p=prob) + 1
        best = np.where(obs[:, 0] > 0, 1, 3)
        rewards = np.where(actions == best, rng.random(count) < 0.9, 0.0).astype(np.float64)
        return cls(obs, actions, rewards, np.log(prob[actions - 1]), ["terminated"] * count)

    def batch(self):
        count = len(self.actions)
        ended = np.array(self.ended, object)
        return SampleBatch(
            obs=self.obs,
            actions=self.actions,
            rewards=self.rewards,
            action_logp=self.logp,
            t=np.zeros(count, np.int64),
            terminateds=ended == "terminated",
            truncateds=np.isin(self.ended, ["truncated", "abandoned", "broken"]),
            ended=ended,
            stream=np.array([STREAM] * count, object),
            ordinal=np.arange(count),
            episode_ordinal=np.arange(count),
        )

    def write(self, root: Root, shard_rows: int = 500, **changes):
        """The same as shards under `root`, with the policy's declaration."""
        save_declaration(root, PolicyDeclaration(observation=OBSERVATION, action=ACTION))
        writer = ShardWriter(objects_at(root).under("shards"))
        parts = [self._part(i, changes) for i in range(len(self.actions))]
        for first in range(0, len(parts), shard_rows):
            block = parts[first : first + shard_rows]
            writer.write(STREAM, canonical_json(OBSERVATION, ACTION), block)

    def _part(self, i, changes):
        values = {
            "episode_id": f"e{i}",
            "part": 0,
            "t0": 0,
            "steps": 1,
            "schema_id": schema_id(OBSERVATION, ACTION),
            "obs": Codec(OBSERVATION).encode(self.obs[i]),
            "actions": Codec(ACTION).encode(int(self.actions[i])),
            "rewards": np.float64(self.rewards[i]).tobytes(),
            "action_logp": np.float64(self.logp[i]).tobytes(),
            "policy_version": np.int64(-1).tobytes(),
            "source": b"\1",
            "pass_prob": np.float64(1).tobytes(),
            "ts": np.int64(i).tobytes(),
            "received_ts": np.int64(i).tobytes(),
            "ended": self.ended[i],
            "ordinal": i,
            "episode_ordinal": i,
        }
        return Part(**(values | changes))


@pytest.fixture
def bandit_log():
    return BanditLog.make
