"""`headrace demo`, part B: clients learn CartPole through shards, while the collector is killed.

`headrace up` runs a collector and a trainer. Client processes act in local mode, with weights that
were trained on their own recent steps. The collector is killed once with SIGKILL, and `up` restarts
it. At the end every step that the clients acted must be acknowledged exactly once.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from storage.wording import counted

ENV = "CartPole-v1"
GOAL, WINDOW = 475.0, 20
MAX_STEPS, MAX_SECONDS = 100_000, 180.0
PLAYERS, SEATS = 2, 4
KILL_AT_VERSION = 20
START_SECONDS, STOP_SECONDS = 60.0, 60.0

Json = dict[str, Any]


class LiveFailed(RuntimeError):
    """The live loop did not start or end well; the text says what failed."""


@dataclass
class PlayedEpisode:
    """One ended episode: the total steps by then, its return, the version that acted last."""

    steps: int
    total: float
    version: int


@dataclass
class LiveRun:
    """The processes' reports so far. Their threads append; one loop reads."""

    episodes: list[PlayedEpisode] = field(default_factory=list)
    address: str = ""
    collector_pid: int = 0
    version: int = 0
    lag: float = 0.0
    steps: int = 0
    acted: int = 0  # from the players' last reports
    reports: int = 0
    listening: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def mean(self) -> float:
        """The mean of the last WINDOW returns, 0 while there are fewer."""
        last = self.episodes[-WINDOW:]
        return sum(e.total for e in last) / WINDOW if len(last) == WINDOW else 0.0

    def up_says(self, message: Json) -> None:
        if "collect" in message:
            self.address = message["collect"]["address"]
            self.collector_pid = message["collect"]["pid"]
            self.listening.set()
        elif "version" in message.get("train", {}):
            self.version = int(message["train"]["version"])
            self.lag = message["train"]["policy_lag_mean"] or 0.0  # None: an update without rows

    def player_says(self, message: Json) -> None:
        with self.lock:
            if "return" in message:
                self.steps += message["steps"]
                self.episodes.append(
                    PlayedEpisode(self.steps, message["return"], message["version"])
                )
            elif "acted" in message:
                self.acted += message["acted"]
                self.reports += 1


@contextlib.contextmanager
def running(words: list[str], on_line: Callable[[Json], None]) -> Iterator[subprocess.Popen[str]]:
    """A process whose JSON lines are passed to `on_line`; it is stopped at the end of the block."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", *words], stdout=subprocess.PIPE, text=True
    )

    def read() -> None:
        for line in process.stdout or ():
            with contextlib.suppress(ValueError):
                on_line(json.loads(line))

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        reader.join()
        if process.stdout is not None:
            process.stdout.close()


def end(process: subprocess.Popen[str], what: str) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        code = process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        code = -1
    if code != 0:
        raise LiveFailed(f"{what} ended with {code}")


def run_live(
    root: Path,
    *,
    seed: int,
    say: Callable[[str], None],
    goal: float = GOAL,
    kill_at_version: int = KILL_AT_VERSION,
) -> Json:
    """Play and learn until the mean of the last returns is `goal`. Raises LiveFailed.

    The collector is killed once, when `kill_at_version` is live.
    """
    live, began = LiveRun(), time.monotonic()
    words = ["headrace", "up", "--root", str(root), "--env", ENV, "--port", "0"]
    with contextlib.ExitStack() as stack:
        say(f"$ {' '.join(words)} &")
        up = stack.enter_context(running([*words, "--seed", str(seed), "--json"], live.up_says))
        if not live.listening.wait(START_SECONDS):
            raise LiveFailed("headrace up did not report its collector's address")
        players = [
            stack.enter_context(running(_player(live.address, seed, i), live.player_says))
            for i in range(PLAYERS)
        ]
        killed, mean = _watch(live, [up, *players], began, say, goal, kill_at_version)
        seconds = time.monotonic() - began
        for player in players:
            end(player, "a player")
        end(up, "headrace up")
    return {
        "root": str(root),
        "seed": seed,
        "reached": mean >= goal,
        "mean_return": mean,
        "steps": live.steps,
        "seconds": round(seconds, 1),
        "version": live.version,
        "killed": killed,
        "acted": live.acted,
        "players_reported": live.reports,
        "plot": str(_plot(live, root / "cartpole.png")),
    }


def _player(address: str, seed: int, number: int) -> list[str]:
    own = (seed * PLAYERS + number) * 1_000
    return ["headrace.demo.play", address, ENV, "--seats", str(SEATS), "--seed", str(own)]


def _watch(
    live: LiveRun,
    processes: list[subprocess.Popen[str]],
    began: float,
    say: Callable[[str], None],
    goal: float,
    kill_at_version: int,
) -> tuple[int, float]:
    """Print a line per second until the goal or a limit; kill the collector once.

    Returns the number of kills, and the mean return at the end of the watch. The players continue
    until they are stopped, possibly with worse returns.
    """
    killed, before, mean = 0, 0, live.mean
    while mean < goal and live.steps < MAX_STEPS:
        time.sleep(1.0)
        seconds, mean = time.monotonic() - began, live.mean
        if any(process.poll() is not None for process in processes):
            raise LiveFailed("a process ended before the goal was reached; its message is above")
        say(
            f"  {seconds:5.0f} s  {live.steps:6} steps  {live.steps - before:5} steps/s  "
            f"return {mean:6.1f}  version {live.version:4}  policy lag {live.lag:.2f}"
        )
        before = live.steps
        if not killed and live.version >= kill_at_version:
            say(f"  kill -9 {live.collector_pid} (the collector); headrace up starts it again")
            os.kill(live.collector_pid, signal.SIGKILL)
            killed += 1
        if seconds > MAX_SECONDS:
            break
    return killed, mean


def _plot(live: LiveRun, path: Path) -> Path:
    """Plot returns, their moving average and versions over steps, as a picture."""
    import matplotlib  # noqa: PLC0415 - only at the end: it takes half a second
    from matplotlib.figure import Figure  # noqa: PLC0415 - as above

    matplotlib.use("Agg")
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    steps = [episode.steps for episode in live.episodes]
    totals = [episode.total for episode in live.episodes]
    axes.plot(steps, totals, ".", markersize=3, alpha=0.4, label="return of an episode")
    average = f"mean of the last {WINDOW} episodes"
    axes.plot(steps[WINDOW - 1 :], moving_average(totals, WINDOW), linewidth=2, label=average)
    axes.axhline(GOAL, color="grey", linewidth=1, linestyle="--", label=f"goal {GOAL:.0f}")
    title = f"{ENV}: n={len(steps)} episodes, versions 1 to {live.version}"
    axes.set(xlabel="environment steps", ylabel="return", title=title)
    other = axes.twinx()
    versions = [episode.version for episode in live.episodes]
    other.plot(steps, versions, color="C2", linewidth=1, label="version that acted")
    other.set_ylabel("version")
    figure.legend(loc="outside lower center", ncols=4)
    figure.savefig(path, dpi=120)
    return path


def moving_average(values: Sequence[float], window: int) -> list[float]:
    """The means of all runs of `window` consecutive values: `window - 1` fewer than values."""
    sums = [0.0, *itertools.accumulate(values)]
    return [(b - a) / window for a, b in zip(sums, sums[window:], strict=False)]


def show_live(found: Json) -> None:
    """Print the results of part B."""
    goal = "reached" if found["reached"] else "NOT reached"
    print(
        f"CartPole: a mean return of {found['mean_return']:.0f} over the last {WINDOW} episodes "
        f"({goal}: {GOAL:.0f}) after {found['steps']} steps, {found['seconds']} s and "
        f"{found['version']} versions; the collector was killed "
        f"{counted(found['killed'], 'time')}."
    )
    checked = found["verify"]
    print(
        f"The clients acted {found['acted']} steps, {checked['acknowledged']} are acknowledged, "
        f"{checked['in_shards']} are in shards. A picture: {found['plot']}"
    )
