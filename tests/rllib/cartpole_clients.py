"""A client that balances several poles: `python -m tests.rllib.cartpole_clients ADDRESS POLES`.

It runs until it is killed, and outlives its collector.
"""

from __future__ import annotations

import sys
import threading

import gymnasium as gym

from headrace import PolicyClient
from ingest.protocol.errors import Refusal

PACE = threading.Event()
"""Never set: the time between two tries before the first version."""


def main(address: str, poles: int) -> None:
    envs = [gym.make("CartPole-v1") for _ in range(poles)]
    with PolicyClient(address, inference_mode="local", on_full="block") as client:
        seen = [env.reset()[0] for env in envs]
        ids = [client.start_episode() for _ in envs]
        while True:
            try:
                actions = client.get_action(ids, dict(zip(ids, seen, strict=True)))
            except Refusal as refusal:
                if refusal.code != "no_version":
                    raise
                PACE.wait(0.2)
                continue
            except (TimeoutError, ConnectionError):
                continue
            for at, env in enumerate(envs):
                action = actions[ids[at]]
                seen[at], reward, terminated, truncated, _ = env.step(action)
                client.log_returns(ids[at], float(reward))
                if terminated or truncated:
                    client.end_episode(ids[at], seen[at], truncated=not terminated)
                    seen[at], ids[at] = env.reset()[0], client.start_episode()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
