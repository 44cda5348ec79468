"""Write a log of one-step decisions as real shards; run by Headrace's own environment.

write_log.py ROOT FIRST COUNT: decisions FIRST .. FIRST + COUNT - 1, whose best action is given by
the sign of the observation; the best policy earns 1 per decision, the logging one 0.5.
"""

import sys
from pathlib import Path

import numpy as np

from storage.declarations.declaration import PolicyDeclaration
from storage.declarations.policy_files import save_declaration
from storage.experience.episode import Part
from storage.shards.shard import ShardWriter
from storage.spaces.codec import Codec
from storage.spaces.descriptors import Box, Discrete, canonical_json, schema_id

SPACES = Box((1,)), Discrete(2)


def part(i: int, rng: np.random.Generator) -> Part:
    seen, action = np.float32(rng.normal()), int(rng.integers(2))
    return Part(
        episode_id=f"e{i}",
        part=0,
        t0=0,
        steps=1,
        schema_id=schema_id(*SPACES),
        obs=Codec(SPACES[0]).encode(np.array([seen])),
        actions=Codec(SPACES[1]).encode(action),
        rewards=np.float64(action == (seen > 0)).tobytes(),
        action_logp=np.float64(np.log(0.5)).tobytes(),
        policy_version=np.int64(-1).tobytes(),
        source=b"\1",
        pass_prob=np.float64(1).tobytes(),
        ts=np.int64(i).tobytes(),
        received_ts=np.int64(i).tobytes(),
        ended="terminated",
        ordinal=i,
        episode_ordinal=i,
    )


if __name__ == "__main__":
    root, first, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    declared = PolicyDeclaration(
        observation=SPACES[0], action=SPACES[1], reward_range=(0.0, 1.0)
    )  # without a range, a policy that never fails has no failures to be judged by
    save_declaration(root, declared)
    rng = np.random.default_rng(first)
    parts = [part(i, rng) for i in range(first, first + count)]
    stream = f"0123456789ab-{schema_id(*SPACES)}"
    if parts:
        ShardWriter(root / "shards").write(stream, canonical_json(*SPACES), parts)
