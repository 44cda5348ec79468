"""The time and memory of a judgement, by the size of its log.

    python -m benchmarks.judge_memory --episodes 100000 --episodes 1000000 --steps 10

Each size is logged (not measured), then judged, with bounds, against the logging policy by separate
processes, which print their peak memory: with one thread; with several threads that read ahead of
the sums; with the estimators that fit q to episodes of several steps (fitted Q evaluation); q
alone, as fitted for the bound of one-step decisions, to as many rows in blocks; and the command
`headrace evaluate`, with everything that it shows.
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
from policy.judging import judged_sample
from policy.judging.evaluate import evaluate
from policy.judging.settings import EvaluationSettings
from policy.ope.cross_fitting import EarlierScores
from storage.declarations.declaration import PolicyDeclaration
from storage.declarations.policy_files import save_declaration
from storage.experience.episode import Part
from storage.shards.shard import ShardWriter
from storage.spaces.descriptors import Box, Discrete, canonical_json, schema_id

SPACES = Box((8,)), Discrete(4)
SCHEMA = schema_id(*SPACES)
SHARD = 20_000  # episodes
BLOCK = 20_000  # rows
WAYS = ("one thread", "several threads", "with dm and dr", "q alone", "the command")


def main() -> None:
    """Print one line per size."""
    options = argparse.ArgumentParser(prog="python -m benchmarks.judge_memory")
    options.add_argument("--episodes", type=int, action="append", required=True)
    options.add_argument("--steps", type=int, default=10)
    options.add_argument("--only", choices=WAYS, action="append", help="default: all")
    options.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    options.add_argument("--root", type=Path, help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.way is not None:
        (episodes,) = given.episodes
        print(json.dumps(measured(given.way, given.root, episodes * given.steps)))
        return
    for episodes in given.episodes:
        with tempfile.TemporaryDirectory() as folder:
            log(Path(folder), episodes, given.steps)
            for way in given.only or WAYS:
                command = [sys.executable, "-m", "benchmarks.judge_memory", "--way", way]
                command += ["--episodes", str(episodes), "--steps", str(given.steps)]
                output = subprocess.run(
                    [*command, "--root", folder], check=True, stdout=subprocess.PIPE
                ).stdout
                found = json.loads(output)
                print(
                    f"{episodes:,} episodes of {given.steps} steps, {way}: "
                    f"{found['seconds']:.0f} s ({found['processor']:.0f} of processor time), "
                    f"{found['bytes'] / 1e6:.0f} MB at most, {found['before'] / 1e6:.0f} before",
                    flush=True,
                )


def log(root: Path, episodes: int, steps: int) -> None:
    """Write a uniform policy's log, and a candidate that takes the best action, the first."""
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


def measured(way: str, root: Path, rows: int) -> dict[str, float]:
    """One kind of judgement of the root's only candidate, by all of its log."""
    judged_sample.MOST_THREADS = 1 if way == "one thread" else 8
    if way == "the command":
        return commanded(root)
    before, began, spent = peak(), time.monotonic(), time.process_time()
    if way == "q alone":
        fit(rows)
    else:
        (digest,) = WeightStore(root, "default").candidates()
        names = ("dm", "dr") if way == "with dm and dr" else None
        evaluate(
            root,
            "default",
            digest,
            settings=EvaluationSettings(split="all", reward_range=(0.0, 1.0), estimators=names),
        )
    return {
        "seconds": time.monotonic() - began,
        "processor": time.process_time() - spent,
        "bytes": peak(),
        "before": before,
    }


def commanded(root: Path) -> dict[str, float]:
    """The same by `headrace evaluate`, as a process."""
    began = time.monotonic()
    command = [sys.executable, "-m", "headrace", "evaluate", "--root", str(root), "--split", "all"]
    subprocess.run([*command, "--reward-range", "0", "1"], check=True, stdout=subprocess.DEVNULL)
    seconds, used = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = used.ru_utime + used.ru_stime
    return {
        "seconds": seconds, "processor": processor, "bytes": used.ru_maxrss * 1024, "before": 0
    }  # fmt: skip


def fit(rows: int) -> None:
    """Fit a reward model for a bound on one-step decisions, in blocks as a log is read."""
    rng, scores = np.random.default_rng(0), EarlierScores(4, (0.0, 1.0))
    target = np.broadcast_to([0.7, 0.1, 0.1, 0.1], (BLOCK, 4))
    for _ in range(rows // BLOCK):
        flat, taken = rng.random((BLOCK, 8), np.float32), rng.integers(4, size=BLOCK)
        rewards = (rng.random(BLOCK) < np.where(taken == 0, 0.8, 0.4)).astype(np.float64)
        scores.scored(flat, taken, rewards, [target])


def peak() -> int:
    """The peak memory of this process in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
