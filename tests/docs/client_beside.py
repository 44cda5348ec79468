"""`python client_beside.py ADDRESS`: start a client of the kind that each line of stdin names, as a
process next to a program of the documents.

- logging: logs 300 steps with its own actions, for every policy, and exits.
- idle: opens an episode of every policy, and waits until it is killed.
- killed: acts (or logs, where nothing is live) in the middle of an episode until it is killed.

Prints its kind and process id when it has done what it was started for. It reads spaces from the
collector. Clients are forked, as to load their modules takes longer than what they do.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

import numpy as np
import urllib3

from headrace import PolicyClient
from storage.spaces.descriptors import Box, space_from_json


def main(address: str) -> None:
    for line in sys.stdin:
        if os.fork() == 0:
            play(line.strip(), address)
            return


def play(kind: str, address: str) -> None:
    with urllib3.PoolManager() as pool:
        spec = json.loads(pool.request("GET", f"{address}/v1/spec").data)
    client = PolicyClient(address, inference_mode="remote")
    episodes = {
        name: (client.start_episode(policy_id=name), _zeros(policy), policy["live_version"])
        for name, policy in spec["policies"].items()
    }
    for name, (episode, obs, live) in episodes.items():
        if kind == "idle":
            continue
        for _ in range(300 if kind == "logging" else 5):
            if kind == "killed" and live is not None:
                client.get_action(episode, obs)
            else:
                client.log_action(episode, obs, _action(spec["policies"][name]))
            client.log_returns(episode, 1.0)
        if kind == "logging":
            client.end_episode(episode, obs)
    client.flush()
    print(kind, os.getpid(), flush=True)
    if kind != "logging":
        signal.pause()


def _zeros(policy: dict[str, Any]) -> Any:
    space = space_from_json(policy["observation"])
    if not isinstance(space, Box):
        raise TypeError(f"expected a Box, got {space}")
    return np.zeros(space.shape, np.float32)


def _action(policy: dict[str, Any]) -> int:
    return int(policy["action"].get("start", 0))


if __name__ == "__main__":
    main(*sys.argv[1:])
