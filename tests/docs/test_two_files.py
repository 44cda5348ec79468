"""The two programs of docs/two_files.md run: updates happen, and clients get later versions."""

from __future__ import annotations

import os
import re
import subprocess
from contextlib import ExitStack
from pathlib import Path

import gymnasium
import pytest

from headrace import Policy, PolicyClient, PolicyServerInput, PolicySpec
from policy.algorithms.learner import Learner
from policy.algorithms.ppo import PPOConfig
from storage.declarations.declaration import PolicyDeclaration
from storage.reading.shard_reader import ShardReader
from storage.spaces.gymnasium_spaces import from_gym

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/two_files.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
SERVER, CLIENT, WORKER, RESTART = BLOCKS
ROWS = 512
UPDATES = ROWS // 256


class Program:
    """A Python process whose output is read line by line; ended at the latest by `close`."""

    def __init__(self, python: Path, *words: str) -> None:
        self._process = subprocess.Popen(
            [python, *words],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )

    def line(self) -> str:
        if self._process.stdout is None:
            raise RuntimeError("the program has no output")
        return self._process.stdout.readline()

    def rest(self, timeout: float = 120) -> tuple[int, list[str]]:
        output, _ = self._process.communicate(timeout=timeout)
        return self._process.returncode, output.splitlines()

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def test_the_programs_fit_a_screen() -> None:
    """25 lines each at most, blank ones aside."""
    for program in (SERVER, CLIENT, WORKER):
        assert len([line for line in program.splitlines() if line]) <= 25


def test_two_servers_and_their_clients_learn(tmp_path: Path, loaded: Path) -> None:
    """Two servers on one machine: one with a root and a local client, one in memory with a remote
    client. Clients act with every version."""
    server, client = tmp_path / "server.py", tmp_path / "client.py"
    server.write_text(SERVER.replace("100_000", str(ROWS)))
    client.write_text(CLIENT)
    root = tmp_path / "root"
    with ExitStack() as stack:

        def run(*words: str) -> Program:
            program = Program(loaded / "python", *words)
            stack.callback(program.close)
            return program

        servers = [run(str(server), "0", str(root)), run(str(server), "0")]
        for one in servers:
            words = one.line().split()
            assert words[:3] == ["version", "1", "at"]
            run(str(client), words[3], "local" if one is servers[0] else "remote")
        for one in servers:
            code, lines = one.rest()
            assert code == 0
            assert [line.split()[:2] for line in lines] == [
                ["version", str(version)] for version in range(2, UPDATES + 2)
            ]
    with ShardReader(root, columns=("policy_version", "source")) as reader:
        rows = reader.next()
    assert set(rows["source"]) == {"on_policy"}
    assert rows["policy_version"].max() >= UPDATES - 1
    assert rows.count >= ROWS


@pytest.mark.parametrize("program", [SERVER, CLIENT, WORKER], ids=["server", "client", "worker"])
def test_the_programs_use_public_names(program: str) -> None:
    """The programs use only public names."""
    assert not re.search(r"\._|import _", program)


def test_a_restart_as_the_page_shows_it_trains_on_every_step_once(tmp_path: Path) -> None:
    """The learner's checkpoint has the position; the next server returns the unread rows."""
    before, after = RESTART.split("...\n")
    env, config = gymnasium.make("CartPole-v1"), PPOConfig(epochs=1)
    spec = PolicySpec(from_gym(env.observation_space), from_gym(env.action_space))
    names = {
        "PolicyServerInput": PolicyServerInput,
        "learner": Learner(Policy(spec, seed=1), config, seed=1),
        "path": tmp_path / "learner.safetensors",
        "reading": {
            "mode": "fragments", "batch_size": 50, "eager": False, "columns": config.columns
        },
    }  # fmt: skip
    rules = PolicyDeclaration(observation=spec.observation, action=spec.action)
    root = tmp_path / "run"
    with PolicyServerInput(
        None, "127.0.0.1", 0, root=root, policies=rules, **names["reading"]
    ) as names["inputs"]:
        names["inputs"].publish(names["learner"].policy)
        with PolicyClient(names["inputs"].address) as client:
            episode = client.start_episode()
            for _ in range(100):
                client.get_action(episode, env.observation_space.sample())
                client.log_returns(episode, 1.0)
            client.end_episode(episode)
        names["learner"].update(names["inputs"].next())
        exec(before, names)  # noqa: S102  our own page
    names["learner"] = Learner(Policy(spec, seed=2), config, seed=2)
    exec(after.replace("9900", "0").replace('"run"', f'"{root}"'), names)  # noqa: S102
    with names["inputs"] as inputs:
        names["learner"].update(inputs.next())
        assert names["learner"].counts.rows_trained == 100
