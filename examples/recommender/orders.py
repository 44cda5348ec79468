"""Another process reads the orders, some time after the visits, and logs them as late rewards.

python examples/recommender/orders.py < orders.txt
"""

from __future__ import annotations

import os
import sys

from headrace import PolicyClient

with PolicyClient(os.environ.get("HEADRACE_ADDRESS", "http://127.0.0.1:8642")) as client:
    for line in sys.stdin:
        episode = line.strip()
        # the reward of step 0; its id makes it count once, however often this is run
        client.log_returns(episode, 1.0, step=0, reward_id=f"order-of-{episode}")
    client.flush()
    known = client.stats.duplicates
    print(client.stats.acknowledged - known, "orders logged,", known, "known already")
