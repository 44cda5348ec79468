"""Compares the steps that clients noted as acknowledged with the shards, by unique rewards."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import pyarrow.parquet as pq

from storage.experience.episode import DEFAULT_AGENT
from storage.shards.digests import digest_of
from storage.shards.names import ShardName
from tests.faults.scenario import Verdict

UNREWARDED = -1.0
"""The default reward of an event whose client was killed before it sent the reward."""

Place: TypeAlias = tuple[str, int | None]
"""An agent, and the step of the environment; none, where the episode has one agent."""


@dataclass
class Account:
    """`partial`: files with a shard's name whose bytes do not match its digest."""

    sent: Counter[float] = field(default_factory=Counter)
    acknowledged: Counter[float] = field(default_factory=Counter)
    stored: Counter[float] = field(default_factory=Counter)
    refused: list[object] = field(default_factory=list)
    partial: list[str] = field(default_factory=list)
    places: dict[float, Place] = field(default_factory=dict)  # of steps of several agents
    episodes: dict[float, str] = field(default_factory=dict)  # of steps
    found: dict[float, Place] = field(default_factory=dict)  # ... in shards

    @classmethod
    def of(cls, root: Path, notes: Sequence[Path]) -> Account:
        account = cls()
        for path in notes:
            for line in path.read_text().splitlines() if path.exists() else []:
                for what, items in json.loads(line).items():
                    if what == "refused":
                        account.refused.extend(items)
                    elif what == "episodes":
                        account.episodes |= dict(items)
                    elif what == "places":
                        account.places |= {reward: (agent, t) for reward, agent, t in items}
                    else:
                        getattr(account, what).update(items)
        for path in root.glob("shards/*/*.parquet"):
            if is_whole(path):
                table = pq.read_table(path, columns=["rewards", "agent_id", "env_t"])
                rewards, agents, env_t = (column.to_pylist() for column in table)
                account.stored.update(reward for reward in rewards if reward != UNREWARDED)
                rows = zip(rewards, agents, env_t, strict=True)
                account.found |= {reward: (agent, t) for reward, agent, t in rows if reward >= 0}
            else:
                account.partial.append(path.name)
        return account

    @property
    def lost(self) -> list[float]:
        return [step for step in self.acknowledged if step not in self.stored]

    @property
    def doubled(self) -> list[float]:
        return [step for step, count in self.stored.items() if count > 1]

    @property
    def unknown(self) -> list[float]:
        return [step for step in self.stored if step not in self.sent]

    @property
    def misplaced(self) -> list[float]:
        """Steps that shards give to another agent, or to another step of the environment."""
        alone = (DEFAULT_AGENT, None)
        return [step for step, at in self.found.items() if self.places.get(step, alone) != at]

    def judge(self, verdict: Verdict) -> None:
        """Add the counts and the violations to a verdict."""
        verdict.counts |= {
            "acknowledged": len(self.acknowledged),
            "stored": self.stored.total(),
            "lost": len(self.lost),
            "doubled": len(self.doubled),
            "stored_of_tracks": sum(step in self.places for step in self.found),
        }
        verdict.require(bool(self.acknowledged), "idle", "nothing was acknowledged")
        for kind in ("lost", "doubled", "unknown", "misplaced", "refused", "partial"):
            found = getattr(self, kind)
            verdict.require(not found, kind, f"{len(found)}, such as {found[:3]}")


def is_whole(path: Path) -> bool:
    """Whether a file's bytes match the digest in its name."""
    name = ShardName.parse(path.name)
    return name is None or digest_of(path.read_bytes())[:16] == name.digest16


class ShardWatch:
    """Checks each shard when it first appears: a final name must never show a partial file."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._seen: set[Path] = set()
        self.partial: list[str] = []

    def look(self) -> None:
        """Note new shards that are incomplete."""
        new = set(self._root.glob("shards/*/*.parquet")) - self._seen
        self._seen |= new
        self.partial += [path.name for path in new if not is_whole(path)]
