"""A program that decides, run by Headrace's own environment.

live_client.py ROOT declare                  declares the policy, with short limits of time
live_client.py ADDRESS log COUNT             logs decisions of a uniform rule
live_client.py ADDRESS act SECONDS           acts with what is live, and prints each new version
"""

import sys
import threading
import time

import numpy as np

from headrace import Box, Discrete, PolicyClient, PolicyDeclaration, save_declaration

PACE = threading.Event()  # never set: a decision every few milliseconds

where, what, *rest = sys.argv[1:]
rng = np.random.default_rng(7)

if what == "declare":
    limits = {"episode_timeout": 4.0, "part_seconds": 0.5, "seal_seconds": 0.5}
    declared = PolicyDeclaration(
        observation=Box((1,)),
        action=Discrete(2),
        reward_range=(0.0, 1.0),
        **limits,
    )
    save_declaration(where, declared)
    sys.exit()

with PolicyClient(where) as client:
    if what == "log":
        for _ in range(int(rest[0])):
            seen, action = rng.normal(size=1).astype(np.float32), int(rng.integers(2))
            episode = client.start_episode()
            client.log_action(episode, seen, action, action_prob=0.5)
            client.log_returns(episode, float(action == (seen[0] > 0)))
            client.end_episode(episode, seen)
        client.flush(60)
        sys.exit()
    end, seen_version = time.monotonic() + float(rest[0]), -2
    while time.monotonic() < end:
        seen = rng.normal(size=1).astype(np.float32)
        episode = client.start_episode()
        action = client.get_action(episode, seen)
        client.log_returns(episode, float(action == (seen[0] > 0)))
        client.end_episode(episode, seen)
        if (version := client.acting_version()) != seen_version:
            seen_version = version
            print(version, flush=True)
        PACE.wait(0.004)
