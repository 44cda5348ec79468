"""Multi-agent episodes as the collector writes them: tracks in the streams of their policies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from storage.declarations.declaration import PolicyDeclaration
from storage.declarations.policy_files import save_declaration
from storage.experience.episode import Part
from storage.shards.names import ShardInfo
from storage.shards.shard import ShardWriter
from storage.spaces.codec import Codec
from storage.spaces.descriptors import Box, Discrete, canonical_json, schema_id

COLLECTOR = "a" * 12
SPACES = {
    "seller": (Box((2,)), Discrete(3)),
    "scout": (Box((2,)), Discrete(3)),  # a stream shared with the sellers
    "buyer": (Box((3,)), Discrete.of(["pass", "buy"])),
}


@dataclass(frozen=True)
class Run:
    """One agent's run through an episode: when it acted, and the last steps of its parts."""

    episode_id: str
    agent_id: str
    policy_id: str
    env_t: tuple[int, ...]
    ended: Any = "terminated"
    agents: int = -1
    cuts: tuple[int, ...] = ()  # numbers of steps after which a part ends
    more: Mapping[str, Any] = field(default_factory=dict)

    @property
    def steps(self) -> set[tuple[str, str, int]]:
        return {(self.episode_id, self.agent_id, t) for t in self.env_t}


def parts_of(run: Run, ordinal: int) -> list[Part]:
    """Observations hold the agent's own t; rewards the environment's."""
    observation, action = SPACES[run.policy_id]
    bounds = [0, *sorted({c for c in run.cuts if 0 < c < len(run.env_t)}), len(run.env_t)]
    return [
        _part(run, number, begin, end, ordinal, (Codec(observation), Codec(action)), bounds)
        for number, (begin, end) in enumerate(pairwise(bounds))
    ]


def _part(
    run: Run, number: int, begin: int, end: int, first: int, codecs: Any, bounds: Sequence[int]
) -> Part:
    count, last = end - begin, end == bounds[-1]
    size = SPACES[run.policy_id][0].shape[0]
    zeros = bytes(8 * count)
    values = {
        "episode_id": run.episode_id,
        "agent_id": run.agent_id,
        "policy_id": run.policy_id,
        "part": number,
        "t0": begin,
        "steps": count,
        "schema_id": schema_id(*SPACES[run.policy_id]),
        "obs": b"".join(codecs[0].encode([float(t)] * size) for t in range(begin, end)),
        "actions": b"".join(codecs[1].encode(t % 2) for t in range(begin, end)),
        "rewards": np.array(run.env_t[begin:end], float).tobytes(),
        "action_logp": np.full(count, -0.5).tobytes(),
        "policy_version": zeros,
        "source": bytes(count),
        "pass_prob": np.ones(count).tobytes(),
        "ts": zeros,
        "received_ts": np.full(count, 1000 * (first + number), "<i8").tobytes(),
        "env_t": np.array(run.env_t[begin:end], "<i8").tobytes(),
        "ended": run.ended if last else None,
        "agents": run.agents if last else -1,
        "ordinal": first + number,
        "episode_ordinal": first,
    }
    return Part(**(values | dict(run.more)))


class JointLog:
    """A root that grows; each write is one shard of one stream."""

    def __init__(self, root: Path, collector: str = COLLECTOR) -> None:
        self.root, self.collector = root, collector
        self._writer = ShardWriter(root / "shards", fsync=lambda descriptor: None)
        self._ordinals: dict[str, int] = {}
        for name, (observation, action) in SPACES.items():
            declared = PolicyDeclaration(policy_id=name, observation=observation, action=action)
            save_declaration(root, declared)

    def seal(self, runs: Iterable[Run]) -> dict[str, list[list[Part]]]:
        """The parts of each run by schema, with ordinals."""
        sealed: dict[str, list[list[Part]]] = {}
        for run in runs:
            key = canonical_json(*SPACES[run.policy_id])
            first = self._ordinals.get(key, 0)
            parts = parts_of(run, first)
            self._ordinals[key] = first + len(parts)
            sealed.setdefault(key, []).append(parts)
        return sealed

    def write(self, *runs: Run) -> list[ShardInfo]:
        """One shard a stream, of all these runs."""
        sealed = self.seal(runs)
        return [
            self.shard(key, [p for parts in found for p in parts]) for key, found in sealed.items()
        ]

    def shard(self, canonical: str, parts: Sequence[Part]) -> ShardInfo:
        stream = f"{self.collector}-{parts[0].schema_id}"
        return self._writer.write(stream, canonical, list(parts))
