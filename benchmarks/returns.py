"""The returns that live clients earn, by steps: clients, shards and a trainer are processes.

    python -m benchmarks.returns Pendulum-v1 torchrl:sac --steps 10000 --goal -250
    python -m benchmarks.returns Pendulum-v1 sb3:sac --steps 10000 --goal -250

`headrace up` trains by the defaults while a client plays four environments. With `sb3:`, learners
of Stable-Baselines3 play as many steps in one process, by its own defaults; that needs an
environment with Stable-Baselines3, and nothing of Headrace. A mean return is of 20 episodes.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

WINDOW = 20
SEATS = 4

Returns = list[tuple[int, float]]
"""(steps by then, return) of each ended episode."""


def live(env: str, algorithm: str, steps: int, seed: int) -> Returns:
    """Of `headrace up` and a client."""
    from headrace.demo.live import LiveRun, end, running  # noqa: PLC0415  Stable-Baselines3 has none

    run = LiveRun()
    with tempfile.TemporaryDirectory() as root, ExitStack() as stack:
        words = ["headrace", "up", "--root", root, "--env", env, "--port", "0", "--json"]
        words += ["--algorithm", algorithm, "--seed", str(seed)]
        up = stack.enter_context(running(words, run.up_says))
        stack.callback(end, up, "headrace up")
        if not run.listening.wait(60):
            raise RuntimeError("headrace up reported no address")
        words = ["headrace.demo.play", run.address, env, "--seats", str(SEATS)]
        words += ["--seed", str(1000 * seed)]
        player = stack.enter_context(running(words, run.player_says))
        while run.steps < steps and up.poll() is None and player.poll() is None:
            time.sleep(0.5)
        if run.steps < steps:
            raise RuntimeError(f"a process ended after {run.steps} steps; its message is above")
    return [(one.steps, one.total) for one in run.episodes]


def of_sb3(env: str, algorithm: str, steps: int, seed: int) -> Returns:
    """Of Stable-Baselines3, in one process."""
    import gymnasium  # noqa: PLC0415  in an environment of its own, as the next
    import stable_baselines3  # noqa: PLC0415  as above
    from stable_baselines3.common.monitor import Monitor  # noqa: PLC0415  as above

    found = Monitor(gymnasium.make(env))
    kind: Any = getattr(stable_baselines3, algorithm.upper())
    kind("MlpPolicy", found, seed=seed, device="cpu").learn(steps)
    ends = itertools.accumulate(found.get_episode_lengths())
    return list(zip(ends, found.get_episode_rewards(), strict=True))


def means(returns: Returns) -> Iterator[tuple[int, float]]:
    """(steps by then, the mean of the last 20 returns), from the 20th episode on."""
    for i in range(WINDOW, len(returns) + 1):
        yield returns[i - 1][0], statistics.fmean(total for _, total in returns[i - WINDOW : i])


def main() -> None:
    """Print the steps to the goal and the last mean, by seed, and their medians."""
    options = argparse.ArgumentParser(prog="python -m benchmarks.returns", description=__doc__)
    options.add_argument("env")
    options.add_argument("algorithm")
    options.add_argument("--steps", type=int, required=True)
    options.add_argument("--goal", type=float, required=True)
    options.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    given = options.parse_args()
    play = of_sb3 if given.algorithm.startswith("sb3:") else live
    lasts = []
    for seed in given.seeds:
        began = time.monotonic()
        returns = play(given.env, given.algorithm.removeprefix("sb3:"), given.steps, seed)
        curve = [one for one in means(returns) if one[0] <= given.steps]
        reached = next((steps for steps, mean in curve if mean >= given.goal), None)
        lasts.append(curve[-1][1])
        best, took = max(mean for _, mean in curve), time.monotonic() - began
        print(f"seed {seed}: {given.goal:g} after {reached} steps; best {best:.1f}; "
              f"{curve[-1][1]:.1f} after {curve[-1][0]}, {took:.0f} s", flush=True)  # fmt: skip
    print(f"{given.env}, {given.algorithm}, {given.steps:,} steps: "
          f"median {statistics.median(lasts):.1f}, worst {min(lasts):.1f}")  # fmt: skip


if __name__ == "__main__":
    main()
