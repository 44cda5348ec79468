"""A root with a canary and its episodes; run by Headrace's own environment.

canary_traffic.py ROOT COUNT CANARY LIVE: COUNT episodes, in which the canary earns 1 with the
probability CANARY, the live version with LIVE. Prints the candidate and the generation as JSON.
"""

import json
import sys
from pathlib import Path

from policy.judging.canary import start_canary
from tests.policy.judging.test_canary import SHARE, Traffic

root, count, canary, live = sys.argv[1:]
traffic = Traffic(Path(root))
started = start_canary(root, "default", traffic.candidate(2), SHARE)
if int(count):
    traffic.log(int(count), {True: float(canary), False: float(live)})
print(json.dumps({name: started[name] for name in ("candidate", "generation")}))
