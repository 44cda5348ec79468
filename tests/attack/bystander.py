"""A well-behaved client whose requests are timed during an attack.

python -m tests.attack.bystander ADDRESS FILE

It logs one-step episodes, one call after another, and appends a line to FILE for each call: the
time of its answer (by the monotonic clock, which processes share), its duration, and the status.
"""

from __future__ import annotations

import itertools
import json
import sys
import threading
import time

import urllib3

PAUSE_SECONDS = 0.003


def main(address: str, path: str) -> None:
    """Log until killed."""
    pool = urllib3.PoolManager(retries=False, timeout=30.0)
    headers = {"content-type": "application/json"}
    step = json.dumps({"obs": [0.1, 0.2, 0.3, 0.4], "action": 1, "action_prob": 0.5}).encode()
    with open(path, "a", buffering=1) as file:
        for number in itertools.count():
            name = f"bystander-{number}"
            start = json.dumps({"episode_id": name}).encode()
            one = f"/v1/episodes/{name}"
            calls = (("/v1/episodes", start), (f"{one}/log_action", step), (f"{one}/end", b"{}"))
            for route, body in calls:
                began = time.monotonic()
                try:
                    status = pool.request(
                        "POST", address + route, body=body, headers=headers
                    ).status
                except urllib3.exceptions.HTTPError:
                    status = 0
                now = time.monotonic()
                file.write(f"{now} {now - began} {status}\n")
                threading.Event().wait(PAUSE_SECONDS)


if __name__ == "__main__":
    main(*sys.argv[1:])
