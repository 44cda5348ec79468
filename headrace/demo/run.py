"""`headrace demo`: its three parts, one after another, and their results.

A log with known true values is judged (headrace.demo.digits), a real one turns out to be too small
for a verdict (headrace.demo.bandit), and clients learn as they act (headrace.demo.live). Every step
is a process or an HTTP request of its own; each command is printed before it runs, so that users
can repeat it.
"""

from __future__ import annotations

import itertools
import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

from headrace.demo import bandit, digits
from headrace.demo.live import LiveFailed, run_live, show_live
from headrace.demo.stage import Demo, DemoFailed


def make_place(root: Path, data: Path) -> None:
    """Move existing files aside. Raises ValueError if the logs are missing."""
    wanted = [digits.FILE, *(Path(bandit.FOLDER) / f"{name}.parquet" for name in bandit.LOGS)]
    absent = [name for name in wanted if not (data / name).is_file()]
    if absent:
        raise ValueError(f"--data: expected {absent[0]} in {data}; it ships with the source")
    if root.exists():
        taken = (root.with_name(f"{root.name}-{n}") for n in itertools.count(1))
        root.rename(next(path for path in taken if not path.exists()))


def run_demo(root: Path, data: Path, *, seed: int = 0, live: bool = True) -> dict[str, Any]:
    """Run everything under `root`, which must not exist; return the findings as plain types.

    `data` is the folder of the logs; with `live`, clients learn CartPole, on-policy. `ok` says that
    each part had the expected result. Raises DemoFailed if a stage fails, OSError.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the collectors end too
    began = time.monotonic()
    root.mkdir(parents=True)
    demo = Demo(root, data, seed)
    found: dict[str, Any] = {"root": str(root)}
    demo.say("Digits: a log whose truth is known.")
    found["digits"] = digits.run_digits(demo)
    demo.say("Open Bandit: a real log.")
    found["bandit"] = bandit.run_bandit(demo)
    if live:
        demo.say("CartPole: clients learn through the shards.")
        found["live"] = _live(demo)
    found["ok"] = all(found[part]["ok"] for part in ("digits", "bandit", "live") if part in found)
    found["seconds"] = round(time.monotonic() - began, 1)
    (root / "summary.json").write_text(json.dumps(found, indent=1) + "\n")
    return found


def _live(demo: Demo) -> dict[str, Any]:
    """Run CartPole; check that every step of its clients is in a shard exactly once."""
    try:
        found = run_live(demo.root / "cartpole", seed=demo.seed, say=demo.say)
    except LiveFailed as error:
        raise DemoFailed(str(error)) from error
    checked = demo.command("verify", "--root", found["root"], accept=(0, 1))
    found["verify"] = checked
    once = found["acted"] == checked["acknowledged"] == checked["in_shards"]
    found["ok"] = bool(found["reached"] and once and checked["ok"])
    return found


def show(found: dict[str, Any]) -> None:
    """Print the final results of `headrace demo`."""
    digits.show_digits(found["digits"])
    bandit.show_bandit(found["bandit"])
    if "live" in found:
        show_live(found["live"])
    in_order = found["digits"]["verify"]["ok"] and found["bandit"]["accounted"]
    every = "every" if in_order else "NOT every"
    print(f"verify: {every} acknowledged step is accounted for exactly once.")
    print(f"{found['seconds']} s. The data: {found['root']}")
