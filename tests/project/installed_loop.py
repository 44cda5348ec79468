"""The whole loop on an installed wheel, by public names: run by the python of an environment.

    python installed_loop.py ROOT [--train]

A collector receives a client's episodes and writes shards, a reader reads them, weights are
published through the collector and a local client acts with them. With --train a learner also
trains a candidate from the shards, and the second reader compares them with ours. One line of JSON
at the end gives the results; any deviation is an error.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

import headrace
from headrace import (
    Box,
    Discrete,
    PolicyClient,
    PolicyDeclaration,
    PolicySpec,
    Publisher,
    ShardReader,
    WeightStore,
    save_declaration,
)

LENGTHS, ARMS = (1,) * 60 + (5,) * 10, 3  # episodes of one step are what `train` learns from
OBSERVATION, ACTION = Box((2,)), Discrete(ARMS)
SPEC = PolicySpec(OBSERVATION, ACTION)
COMMAND = Path(sys.executable).with_name("headrace")


def require(holds: object, what: str) -> None:
    if not holds:
        raise RuntimeError(f"expected {what}")


def command(*words: object, status: int = 0) -> str:
    """The output of a command: stdout, or stderr if it should fail with `status`."""
    done = subprocess.run([COMMAND, *map(str, words)], capture_output=True, text=True, check=False)
    output = f"{done.stdout}{done.stderr}"
    require(done.returncode == status, f"{words[0]} to end with {status}: {output}")
    return done.stderr if status else done.stdout


def answer(*words: object) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(command(*words, "--json").splitlines()[-1])
    return document


def token(root: Path, *scopes: str) -> str:
    words = [word for scope in scopes for word in ("--scope", scope)]
    text: str = answer("token", "create", "loop", *words, "--root", root)["token"]
    return text


def weights_for(arm: int) -> dict[str, np.ndarray[Any, Any]]:
    """Weights that choose `arm` whatever is observed."""
    made = {name: np.zeros(shape, np.float32) for name, shape in SPEC.weight_shapes().items()}
    last = max(name for name in made if name.startswith("pi.") and name.endswith(".bias"))
    made[last][arm] = 50.0
    return made


def log_episodes(address: str, secret: str) -> int:
    """Episodes of a uniform policy: arm 2 earns, the others do not."""
    rng = np.random.default_rng(0)
    with PolicyClient(address, "remote", token=secret) as client:
        for length in LENGTHS:
            episode = client.start_episode()
            for _ in range(length):
                arm = int(rng.integers(ARMS))
                client.log_action(episode, rng.standard_normal(2), arm, action_prob=1 / ARMS)
                client.log_returns(episode, float(arm == 2))
            client.end_episode(episode)
        client.flush()
        require(client.stats.waiting == 0, "nothing to wait after a flush")
    return sum(LENGTHS)


def act(address: str, secret: str, root: Path) -> int:
    """A local client adopts a version, and the next one, published while it acts."""
    store = WeightStore(root, "default")
    first, second = (
        store.add_candidate(weights_for(arm), spec=SPEC.to_json(), metrics={}, lineage={})
        for arm in (1, 2)
    )
    steps = 0
    with Publisher(address, token=secret) as publisher:
        publisher.publish_candidate(store, first)
        with PolicyClient(address, "local", update_interval=None, token=secret) as client:
            for version, arm in ((1, 1), (2, 2)):
                if version == 2:
                    publisher.publish_candidate(store, second)
                    client.update_policy_weights()
                episode = client.start_episode()
                require(client.get_action(episode, np.zeros(2)) == arm, f"arm {arm} of v{version}")
                client.log_returns(episode, 1.0)
                client.end_episode(episode)
                steps += 1
        live = publisher.versions().live
    require(live is not None and live.version == 2, f"version 2 live, got {live}")
    return steps


def read(root: Path) -> tuple[int, float]:
    """(rows, sum of rewards) as batches of the reader."""
    rows, rewards = 0, 0.0
    with ShardReader(root, batch_size=64) as reader:
        while True:
            try:
                batch = reader.next()
            except headrace.EndOfInput:
                return rows, rewards
            rows += len(batch)
            rewards += float(batch["rewards"].sum())


def learn(root: Path) -> dict[str, Any]:
    """Use the [train] extra: a candidate, its evaluation, pandas, an environment."""
    import gymnasium  # noqa: PLC0415 - only here

    for name in headrace.__all__:
        require(getattr(headrace, name) is not None, f"the public name {name}")
    trained = answer("train", "--root", root, "--algorithm", "snips", "--epochs", "1")
    require(trained["rows_trained"] > 0, f"rows to train on, got {trained}")
    plot = root / "plot.png"
    answer("evaluate", "--root", root, "--estimator", "wis", "--plot", plot)
    require(plot.stat().st_size, "a plot")
    (first, *_) = sorted((root / "shards").glob("*/*.parquet"))
    require(len(headrace.to_pandas(first).dropna(subset=["rewards"])), "rows for pandas")
    worker = headrace.RolloutWorker(
        env_creator=lambda context: gymnasium.make("CartPole-v1"),
        policy=headrace.TrainablePolicy,
        batch_steps=20,
    )
    require(len(worker.sample()) == 20, "steps of CartPole")
    return {"trained": trained["rows_trained"]}


def main(root: Path, train: bool) -> dict[str, Any]:
    require("collect" in command("--help"), "the commands in --help")
    require("--root" in command("collect", "--help"), "the options in collect --help")
    save_declaration(
        root,
        PolicyDeclaration(observation=OBSERVATION, action=ACTION, seal_seconds=0.2),
    )
    secret = token(root, "log", "act", "weights:read", "weights:publish")
    words = [COMMAND, "collect", "--root", root, "--port", "0", "--json"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        try:
            require(process.stdout, "a pipe")
            address = json.loads(process.stdout.readline())["address"]  # type: ignore[union-attr]
            steps = log_episodes(address, secret) + act(address, secret, root)
        finally:
            process.send_signal(signal.SIGTERM)
        require(process.wait(30) == 0, f"the collector to end with 0, got {process.returncode}")
    rows, rewards = read(root)
    require(rows == steps, f"{steps} rows, read {rows}")
    report = answer("verify", "--root", root, *(["--second-reader"] if train else []))
    require(report["ok"] and report["acknowledged"] == steps, f"all in order, got {report}")
    found = {"python": sys.version.split()[0], "headrace": headrace.__file__, "rows": rows}
    found |= {"rewards": rewards, "torch": "torch" in sys.modules}
    if not train:
        message = command("verify", "--root", root, "--second-reader", status=2)
        require("pip install 'headrace[train]'" in message, f"the extra to install, got {message}")
    else:
        found |= {"read_again": report["second_reader"]["rows"], **learn(root)}
    return found


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), "--train" in sys.argv)))
