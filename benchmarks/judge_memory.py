"""Seconds and memory that a judgement takes, by the size of its log.

    python -m benchmarks.judge_memory --episodes 100000 --episodes 400000 --steps 10

Each size is logged (not measured), then judged with bounds against the logging policy by a process
of its own, which tells the peak of its memory.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from policy.inference.spec import ModuleSpec, PolicySpec
from policy.inference.weight_store import WeightStore
from policy.jobs.evaluate import evaluate
from storage.declarations.declaration import PolicyDeclaration
from storage.declarations.policy_files import save_declaration
from storage.experience.episode import Part
from storage.shards.shard import ShardWriter
from storage.spaces.descriptors import Box, Discrete, canonical_json, schema_id

SPACES = Box((8,)), Discrete(4)
SCHEMA = schema_id(*SPACES)
SHARD = 20_000  # episodes


def main() -> None:
    """Print one line a size."""
    options = argparse.ArgumentParser(prog="python -m benchmarks.judge_memory")
    options.add_argument("--episodes", type=int, action="append", required=True)
    options.add_argument("--steps", type=int, default=10)
    options.add_argument("--judge", type=Path, help="a root that is logged already")
    given = options.parse_args()
    if given.judge is not None:
        print(json.dumps(judged(given.judge)))
        return
    for episodes in given.episodes:
        with tempfile.TemporaryDirectory() as folder:
            began = time.monotonic()
            log(Path(folder), episodes, given.steps)
            logged = time.monotonic() - began
            command = [sys.executable, "-m", "benchmarks.judge_memory", "--episodes", "1"]
            told = subprocess.run(
                [*command, "--judge", folder], check=True, stdout=subprocess.PIPE
            ).stdout
            found = json.loads(told)
        rows = episodes * given.steps
        print(
            f"{episodes:,} episodes of {given.steps} steps: {found['verdict']}, judged in "
            f"{found['seconds']:.0f} s, {found['bytes'] / 1e6:.0f} MB at most, of which "
            f"{found['before'] / 1e6:.0f} MB before ({rows:,} rows; logged in {logged:.0f} s)",
            flush=True,
        )


def log(root: Path, episodes: int, steps: int) -> None:
    """A uniform policy's log, whose first action is the best, and a candidate that takes it."""
    save_declaration(root, PolicyDeclaration(observation=SPACES[0], action=SPACES[1]))
    rng, writer = np.random.default_rng(0), ShardWriter(root / "shards")
    for first in range(0, episodes, SHARD):
        parts = [part(rng, number, steps) for number in range(first, min(episodes, first + SHARD))]
        writer.write(f"0123456789ab-{SCHEMA}", canonical_json(*SPACES), parts)
    spec = PolicySpec(*SPACES, ModuleSpec(hidden=(), value_head=False))
    weights = {
        "pi.0.weight": np.zeros((4, 8), np.float32),
        "pi.0.bias": np.array([0.6, 0, 0, 0], np.float32),
    }
    WeightStore(root, "default").add_candidate(weights, spec=spec.to_json(), metrics={}, lineage={})


def part(rng: np.random.Generator, number: int, steps: int) -> Part:
    """One episode."""
    actions = rng.integers(4, size=steps)
    rewards = (rng.random(steps) < np.where(actions == 0, 0.8, 0.4)).astype(np.float64)
    return Part(
        episode_id=f"e{number}",
        part=0,
        t0=0,
        steps=steps,
        schema_id=SCHEMA,
        obs=rng.random((steps, 8), np.float32).tobytes(),
        actions=actions.tobytes(),
        rewards=rewards.tobytes(),
        action_logp=np.full(steps, np.log(0.25)).tobytes(),
        policy_version=np.full(steps, -1).tobytes(),
        source=b"\1" * steps,
        pass_prob=np.ones(steps).tobytes(),
        ts=np.full(steps, number).tobytes(),
        received_ts=np.full(steps, number).tobytes(),
        ended="terminated",
        ordinal=number,
        episode_ordinal=number,
    )


def judged(root: Path) -> dict[str, float | str]:
    """Judge the root's only candidate by all of its log."""
    (digest,) = WeightStore(root, "default").candidates()
    before, began = peak(), time.monotonic()
    found = evaluate(root, "default", digest, split="all", reward_range=(0.0, 1.0))
    seconds = time.monotonic() - began
    verdict = found.judgement.verdict
    return {"verdict": verdict, "seconds": seconds, "bytes": peak(), "before": before}


def peak() -> int:
    """Bytes that this process held at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
