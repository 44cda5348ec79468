"""A client that logs in every way: `python logging_program.py ADDRESS MODE SPOOL`.

It runs with the packages of any build, so it uses only public names. It prints how many steps it
logged for each episode.
"""

from __future__ import annotations

import json
import sys
from collections import Counter

import numpy as np

from headrace import PolicyClient


def main(address: str, mode: str, spool: str) -> None:
    options = {"on_full": "spool", "spool_dir": spool} if spool else {}
    logged: Counter[str] = Counter()
    with PolicyClient(address, mode, timeout=60.0, max_wait=60.0, **options) as client:
        for share in (1.0, 0.5):
            name = client.start_episode(
                f"{mode}-{spool != ''}-acts-{share}", pass_prob=share, tags={"by": "test"}
            )
            for t in range(3):
                client.get_action(name, np.full(4, t))
                client.log_returns(name, float(t), {"t": t})
                logged[name] += 1
            client.end_episode(name, np.zeros(4))
            name = client.start_episode(f"{mode}-{spool != ''}-logs-{share}", pass_prob=share)
            for t in range(2):
                client.log_action(name, np.full(4, t), t, action_prob=0.25)
                client.log_returns(name, float(t))
                client.log_returns(name, 5.0, step=t, reward_id="named")
                logged[name] += 1
            client.end_episode(name)
        several = [client.start_episode(f"{mode}-{spool != ''}-list-{n}") for n in range(2)]
        client.get_action(several, {name: np.zeros(4) for name in several})
        for name in several:
            logged[name] += 1
            client.end_episode(name)
        name = client.start_episode(
            f"{mode}-{spool != ''}-agents", policy_id={"ann": "default", "bob": "default"}
        )
        client.log_action(name, {"ann": np.zeros(4), "bob": np.ones(4)}, {"ann": 0, "bob": 1})
        client.log_returns(name, {"ann": 1.0, "bob": 2.0})
        logged[name] += 2
        client.end_episode(name)
        client.flush(60.0)
        print(json.dumps({"logged": logged, "refused": dict(client.stats.refused)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
