"""`headrace demo`, first part: a log with known true values, so that judgements can be checked.

Contexts are images of handwritten digits, an action names a digit, and the reward is 1 if it is
right. So the value of any policy can be measured. A weak policy logs decisions over HTTP with its
true propensities. A policy learned from these is judged, passes the gate and acts for a remote
client; its rewards are compared with the prediction. A second candidate, which has hardly learned,
must be judged worse.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq

from headrace.demo.stage import CollectorCommand, Demo
from headrace.output import console
from ingest.client.policy_client import PolicyClient
from storage.declarations.declaration import PolicyDeclaration
from storage.spaces.descriptors import Discrete, parse_space

FILE = Path("digits") / "digits.parquet"
NAME = "digits"
PIXELS, CLASSES, BRIGHTEST = 64, 10, 16
LOGGED, ACTED = 4_000, 1_000
EXPLORED = 0.7  # share of the weak policy's decisions that are random
SEEN = 20  # labelled images that it knows
AGREE = 3.29  # normal quantile: two-sided 99.9 %

Floats = npt.NDArray[np.float64]


def run_digits(demo: Demo) -> dict[str, Any]:
    """Log, learn, judge, publish, act; return the findings.

    `ok` says that each verdict was right and that the measured reward agrees with the predicted
    one.
    """
    images, digits = _read(demo.data / FILE)
    rng = np.random.default_rng(demo.seed)
    chances = weak_policy(images, digits, rng)
    declared = demo.root / "digits.json"
    policy = PolicyDeclaration(
        observation=parse_space(f"box:{PIXELS}:float32:0:1"),
        action=Discrete(CLASSES),
        reward_range=(0.0, 1.0),
    )
    declared.write_text(json.dumps(policy.to_json(), indent=1) + "\n")
    found: dict[str, Any] = {"weak": float(chances[np.arange(len(digits)), digits].mean())}
    with demo.collecting(NAME, "--policy", declared) as collector:
        _log(demo, collector, images, digits, chances, rng)
        found["rows"] = demo.await_shards(collector)
        own = ["--root", collector.root]
        trained = demo.command("train", *own, "--seed", demo.seed)
        plot = demo.root / "digits.png"
        judged = demo.command("evaluate", trained["candidate"][:12], *own, "--plot", plot)
        asked = demo.command("publish", trained["candidate"][:12], *own, accept=(0, 1, 4))
        found |= {"plot": judged["plot"], "better": asked["gate"], "published": asked["published"]}
        if asked["published"]:
            found |= _measure(judged, _act(demo, collector, images, digits, rng))
            lazy = ["--algorithm", "ips", "--epochs", 1, "--seed", demo.seed + 1]
            worse = demo.command("train", *own, *lazy)
            refused = demo.command("publish", worse["candidate"][:12], *own, accept=(0, 1, 4))
            found["worse"] = refused["gate"]
        collector.stop()
    found["verify"] = demo.command("verify", "--root", demo.root / NAME, accept=(0, 1))
    verdicts = [found.get(name, {}).get("verdict") for name in ("better", "worse")]
    found["ok"] = bool(
        verdicts == ["better", "worse"] and found["agrees"] and found["verify"]["ok"]
    )
    return found


def _read(path: Path) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """Read (N, 64) pixels from 0 to 1, and the digits of the images, (N,)."""
    table = pq.read_table(path)
    pixels = np.array(table["pixels"].to_pylist(), np.float32) / np.float32(BRIGHTEST)
    return pixels, np.array(table["digit"].to_pylist(), np.int64)


def weak_policy(
    images: npt.NDArray[np.float32], digits: npt.NDArray[np.int64], rng: np.random.Generator
) -> Floats:
    """(N, 10) probabilities of a policy that knows few images.

    It chooses the digit of the nearest known image, or a random one.
    """
    seen = rng.choice(len(images), SEEN, replace=False)
    distances = ((images[:, None] - images[seen]) ** 2).sum(axis=2)
    chances = np.full((len(images), CLASSES), EXPLORED / CLASSES)
    chances[np.arange(len(images)), digits[seen][distances.argmin(axis=1)]] += 1 - EXPLORED
    return chances


def _log(
    demo: Demo,
    collector: CollectorCommand,
    images: npt.NDArray[np.float32],
    digits: npt.NDArray[np.int64],
    chances: Floats,
    rng: np.random.Generator,
) -> None:
    """Log decisions of the weak policy on random images, with their true probabilities."""
    demo.say(f"  a service logs {LOGGED:,} decisions of a weak policy to {collector.address}")
    with PolicyClient(collector.address, inference_mode="remote", on_full="block") as client:
        client.connect()
        for one in rng.integers(len(images), size=LOGGED):
            action = int(rng.choice(CLASSES, p=chances[one]))
            reward = float(action == digits[one])
            client.log_step(images[one], action, reward, action_prob=chances[one, action])
        client.flush()


def _act(
    demo: Demo,
    collector: CollectorCommand,
    images: npt.NDArray[np.float32],
    digits: npt.NDArray[np.int64],
    rng: np.random.Generator,
) -> Floats:
    """Act with the live version as a remote client; return the rewards, (ACTED,)."""
    demo.say(f"  a remote client asks for {ACTED:,} actions")
    rewards = np.zeros(ACTED)
    with PolicyClient(collector.address, inference_mode="remote") as client:
        for i, one in enumerate(rng.integers(len(images), size=ACTED)):
            # only to check the prediction: not for learning or judging
            episode = client.start_episode(training_enabled=False, tags={"purpose": "demo"})
            action: Any = client.get_action(episode, images[one])
            rewards[i] = float(int(action) == digits[one])
            client.log_returns(episode, rewards[i])
            client.end_episode(episode)
    return rewards


def _measure(judged: dict[str, Any], rewards: Floats) -> dict[str, Any]:
    """Compare the `dr` prediction of `evaluate` with the measured rewards, within both errors."""
    log = judged["logs"][0]
    (predicted,) = (one for one in log["target"] if one["name"] == "dr")
    error = float(rewards.std(ddof=1)) / math.sqrt(len(rewards))
    measured = float(rewards.mean())
    apart = abs(measured - predicted["value"])
    return {
        "predicted": {"value": predicted["value"], "stderr": predicted["stderr"]},
        "measured": {"value": measured, "stderr": error, "n": len(rewards)},
        "agrees": apart <= AGREE * math.hypot(error, predicted["stderr"]),
    }


def show_digits(found: dict[str, Any]) -> None:
    """Print the results of this part."""
    rows = [("the weak policy that logged", f"{found['weak']:.3f}", "exact, over all images")]
    if "measured" in found:
        predicted, measured = found["predicted"], found["measured"]
        rows += [
            ("learned, as predicted", _with_error(predicted), "dr, on held-out episodes"),
            ("learned, as measured", _with_error(measured), f"{measured['n']:,} actions"),
        ]
    console.table("Digits: share of right answers", ("policy", "value", "by"), rows)
    for verdict, text in (("better", "What was learned"), ("worse", "What was barely learned")):
        if verdict in found:
            print(f"{text} is judged: {found[verdict]['verdict']}{_difference(found[verdict])}.")
    if "measured" in found:
        agrees = "agree" if found["agrees"] else "do NOT agree"
        print(f"Prediction and measurement {agrees} within both errors (99.9 %).")


def _with_error(one: dict[str, Any]) -> str:
    return f"{one['value']:.3f} ± {one['stderr']:.3f}"


def _difference(gate: dict[str, Any]) -> str:
    """The deciding difference, with its interval."""
    decided = [one for one in gate["comparisons"] if one["verdict"] == gate["verdict"]]
    if not decided:
        return "".join(f"\n  {reason}" for reason in gate["reasons"])
    one = decided[0]
    low, high = one["interval"]
    return f" ({one['difference']:+.3f} [{low:.3f}, {high:.3f}] against {one['bar']}, n={one['n']})"
