"""A client that ends an episode for each line of its input, and prints the time.

`python -m benchmarks.ending_client ADDRESS STEPS`: the rest of each episode is acknowledged before
it waits for the line, so that the end is sent alone. Times are from `time.perf_counter`, which on
Linux all processes of a machine share.
"""

from __future__ import annotations

import sys
import time

import numpy as np

from ingest.client.policy_client import PolicyClient

OBS = np.array([0.1, -0.2, 0.3, 0.4], np.float32)


def main(address: str, steps: str) -> None:
    with PolicyClient(address, inference_mode="remote", linger=0.0) as client:
        while True:
            episode = client.start_episode()
            for _ in range(int(steps)):
                client.log_action(episode, OBS, 1)
                client.log_returns(episode, 1.0)
            client.flush()
            print("ready", flush=True)
            if not sys.stdin.readline():
                return
            began = time.perf_counter()
            client.end_episode(episode, OBS)
            print(began, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
