"""A process that spools what it logs until it is killed.

python -m tests.ingest.delivery.spooling_client ADDRESS SPOOL_DIR EPISODES PREFIX OPTIONS

OPTIONS is a JSON object of arguments of PolicyClient. The process logs EPISODES episodes of two
steps, PREFIX-0 and so on, and PREFIX-open, which stays open. It then prints a line and waits to be
killed.
"""

from __future__ import annotations

import json
import sys
import threading

from ingest.client.policy_client import PolicyClient

OBS = [0.0, 0.5, 1.0, -0.5]


def main(address: str, directory: str, episodes: str, prefix: str, options: str) -> None:
    client = PolicyClient(address, on_full="spool", spool_dir=directory, **json.loads(options))
    for number in range(int(episodes)):
        name = client.start_episode(f"{prefix}-{number}", tags={"number": str(number)})
        for t in range(2):
            client.log_action(name, OBS, t, action_prob=0.5)
            client.log_returns(name, 2.0 * number + t)
        client.end_episode(name)
    name = client.start_episode(f"{prefix}-open", tags={"number": "open"})
    client.log_action(name, OBS, 1)
    print("logged", client.stats.waiting, flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
