"""`python -m headrace.demo.play ADDRESS ENV`: a client that plays a gymnasium environment locally.

It shows what your own on-policy program can look like, and `headrace demo` learns from it. Each
ended episode is printed as a JSON line: return, length, the version that acted last, and the steps
that the collector has acknowledged.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import threading
from typing import Any

import gymnasium

from ingest.client.policy_client import PolicyClient
from ingest.protocol.errors import Refusal

DELIVERY_SECONDS = 20.0


class Seat:
    """One environment and its open episode."""

    def __init__(self, client: PolicyClient, env: gymnasium.Env[Any, Any], seed: int) -> None:
        self._client, self._env = client, env
        self._observation, _ = env.reset(seed=seed)
        self.acted = 0
        self._begin()

    def _begin(self) -> None:
        self._episode = self._client.start_episode()
        self._return, self._length = 0.0, 0

    def step(self) -> dict[str, Any] | None:
        """Act once; return the episode's result if it ended."""
        action = self._client.get_action(self._episode, self._observation)
        observation, reward, terminated, truncated, _ = self._env.step(action)
        self._observation = observation
        self._client.log_returns(self._episode, float(reward))
        self._return += float(reward)
        self._length += 1
        self.acted += 1
        if not (terminated or truncated):
            return None
        version = self._client.acting_version(episode_id=self._episode)
        ended = {"return": self._return, "steps": self._length, "version": version}
        self.leave(truncated=not terminated)
        self._observation, _ = self._env.reset()
        self._begin()
        return ended

    def leave(self, *, truncated: bool) -> None:
        self._client.end_episode(self._episode, self._observation, truncated=truncated)


def play(client: PolicyClient, env: str, seats: int, seed: int, stop: threading.Event) -> int:
    """Play until `stop`, then truncate the open episodes. Returns the number of steps."""
    taken = [Seat(client, gymnasium.make(env), seed + number) for number in range(seats)]
    while not stop.is_set():
        for seat in taken:
            try:
                ended = seat.step()
            except Refusal as refusal:
                if refusal.code != "no_version" or stop.wait(0.1):
                    raise
                continue
            if ended is not None:
                print(json.dumps(ended), flush=True)
    for seat in taken:
        seat.leave(truncated=True)
    return sum(seat.acted for seat in taken)


def main(arguments: list[str] | None = None) -> int:
    """Play until SIGTERM, then deliver everything and print what was acknowledged; exit status."""
    parser = argparse.ArgumentParser(prog="python -m headrace.demo.play")
    parser.add_argument("address")
    parser.add_argument("env")
    parser.add_argument("--seats", type=int, default=4, help="episodes that are open at once")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        with PolicyClient(given.address, on_full="block") as client:
            acted = play(client, given.env, given.seats, given.seed, stop)
            client.flush(DELIVERY_SECONDS)
            stats = client.stats
    except TimeoutError as error:  # the collector is gone, and the process that stopped us waits
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(json.dumps({"acted": acted, "refused": stats.refused}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
