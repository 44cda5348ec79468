"""A separate process that reads orders, some time after the visits, and logs them as late rewards.

python examples/recommender/orders.py < orders.txt

Orders that cannot be logged (of unknown visits, or later than the reward window) are printed and
counted, and do not hold up the others.
"""

from __future__ import annotations

import os
import sys

from headrace import PolicyClient, Refusal

refused: list[Refusal] = []
address = os.environ.get("HEADRACE_ADDRESS", "http://127.0.0.1:8642")
with PolicyClient(address, on_error=refused.append) as client:
    for episode in dict.fromkeys(sys.stdin.read().split()):
        # the reward of step 0; its id makes it count once, however often this is run
        client.log_returns(episode, 1.0, step=0, reward_id=f"order-of-{episode}")
    try:
        client.flush()
    except Refusal:  # of the orders in `refused`, or of the client itself, such as for its token
        if client.stats.waiting:
            raise
    logged, known = client.stats.acknowledged, client.stats.duplicates
for refusal in refused:
    print(refusal, file=sys.stderr)
print(f"{logged - known} orders logged, {known} known already, {len(refused)} refused")
