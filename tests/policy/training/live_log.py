"""A root with a declared policy and generated shards, and the rows that a lineage claims."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from policy.algorithms.ppo import PPOConfig
from policy.inference.spec import ModuleSpec, PolicySpec
from policy.inference.weight_store import WeightStore
from policy.training.settings import FollowSettings
from policy.training.train_live import FollowResult, follow
from storage.declarations.declaration import PolicyDeclaration
from storage.declarations.policy_files import save_declaration
from storage.experience.episode import Part
from storage.shards.shard import ShardWriter
from storage.spaces.descriptors import Box, Discrete, canonical_json, schema_id

OBSERVATION, ACTION = Box((4,)), Discrete(2)
SCHEMA = schema_id(OBSERVATION, ACTION)
STREAM = f"0123456789ab-{SCHEMA}"
SPEC = PolicySpec(OBSERVATION, ACTION, ModuleSpec(hidden=(8,)))
CONFIG = PPOConfig(epochs=1)

Row = tuple[int, int]
"""(ordinal, row within the part)"""


def part(ordinal: int, steps: int = 10, version: int = 1, source: int = 0, **changes: Any) -> Part:
    """An episode in one part, which ends terminated unless changed."""
    rng = np.random.default_rng(ordinal)
    ones = np.ones(steps)
    values = {
        "episode_id": f"e{ordinal}", "part": 0, "t0": 0, "steps": steps, "schema_id": SCHEMA,
        "obs": rng.normal(size=(steps, 4)).astype(np.float32).tobytes(),
        "actions": rng.integers(0, 2, steps).tobytes(),
        "rewards": ones.tobytes(), "pass_prob": ones.tobytes(),
        "action_logp": np.full(steps, np.log(0.5)).tobytes(),
        "policy_version": np.full(steps, version).tobytes(),
        "source": bytes([source]) * steps,
        "ts": np.arange(steps).tobytes(), "received_ts": np.arange(steps).tobytes(),
        "ended": "terminated", "ordinal": ordinal, "episode_ordinal": ordinal,
    }  # fmt: skip
    return Part(**(values | changes))


def declare(root: Path) -> Path:
    save_declaration(
        root, PolicyDeclaration(observation=OBSERVATION, action=ACTION, spec=SPEC.to_json())
    )
    return root


def write(root: Path, *parts: Part) -> Path:
    """One shard of these parts; its path."""
    written = ShardWriter(root / "shards").write(
        STREAM, canonical_json(OBSERVATION, ACTION), list(parts)
    )
    return Path(written.path)


def run(
    root: Path, updates: int, *, stop_after: int = 300, **settings: Any
) -> tuple[FollowResult, list[dict[str, float]]]:
    """Follow for so many updates, or until no rows arrive for long; (result, reports)."""
    reports: list[dict[str, float]] = []
    asked = iter(range(stop_after))
    given = {"on_update": reports.append, "spec": SPEC}
    given |= {name: settings.pop(name) for name in ("spec", "on_update") if name in settings}
    result = follow(
        root,
        "default",
        CONFIG,
        FollowSettings(**{"steps_per_update": 100, **settings}),
        stop=lambda: len(reports) >= updates or next(asked, None) is None,
        **given,
    )
    return result, reports


def rows_of(root: Path, ordinals: Iterable[int]) -> set[Row]:
    """All rows of these parts, as the shards hold them."""
    wanted, found = set(ordinals), set()
    for path in root.glob("shards/*/*.parquet"):
        counts: Counter[int] = Counter()
        for ordinal in pq.read_table(path, columns=["ordinal"])["ordinal"].to_pylist():
            found.add((ordinal, counts[ordinal]))
            counts[ordinal] += 1
    return {row for row in found if row[0] in wanted}


def claimed(root: Path, version: int) -> set[Row]:
    """The rows that a version's lineage says it was trained on."""
    store = WeightStore(root, "default")
    ordinals = [n for a, b in store.lineage(version)[STREAM].ranges() for n in range(a, b + 1)]
    without = {
        (ordinal, row + i)
        for ordinal, row, count in store.untrained(version).get(STREAM, [])
        for i in range(count)
    }
    rows = rows_of(root, ordinals)
    assert without <= rows
    return rows - without


# --- a follower of its own process ---------------------------------------------------------------


class Followers:
    """Followers that are forked from one process (tests/policy/training/dying_follower.py)."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.policy.training.dying_follower"],
            cwd=Path(__file__).parents[3],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, root: Path, **job: Any) -> int:
        """Its exit status; below zero the signal that killed it."""
        return self.wait(self.start(root, **job))

    def start(self, root: Path, **job: Any) -> int:
        """Its process id."""
        return self._ask({"root": str(root), **job})

    def wait(self, pid: int) -> int:
        """The exit status of one that was started."""
        return self._ask(pid)

    def _ask(self, line: object) -> int:
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("no pipe")
        print(json.dumps(line), file=self._process.stdin, flush=True)
        return int(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate()


def history(root: Path) -> list[Row]:
    """The rows that the last weights were trained on; a repeated update replaces the first one."""
    found: dict[int, list[list[Any]]] = {}
    for line in (root / "record").read_text().splitlines():
        record = json.loads(line)
        found = {trained: rows for trained, rows in found.items() if trained < record["trained"]}
        found[record["trained"]] = record["rows"]
    return [(ordinal, t) for rows in found.values() for ordinal, t in rows]
