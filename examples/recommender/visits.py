"""Visitors come, the live policy makes an offer to each, and orders arrive later.

python examples/recommender/visits.py > orders.txt     # the episode of each order
"""

from __future__ import annotations

import os
import random
import sys

from shop import buys, visitor

from headrace import PolicyClient

VISITS = 1000

rng = random.Random(2)
with PolicyClient(os.environ.get("HEADRACE_ADDRESS", "http://127.0.0.1:8642")) as client:
    for _ in range(VISITS):
        someone = visitor(rng)
        episode = client.start_episode()
        offer = client.get_action(episode, someone)  # "tools": the names of the log
        client.end_episode(episode)
        if buys(someone, offer, rng):
            print(episode)
    client.flush()  # now every visit is on the collector's disk
    print(client, file=sys.stderr)
