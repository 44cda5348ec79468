"""`headrace demo`: a real production log becomes a published policy, by the commands that you have.

Two logs of one shop, each by another logging policy, are replayed to two collectors. A policy is
learned from the first, judged by the episodes that its training held out and by the other log,
published, and asked for actions by a remote client. Every step is a process or an HTTP request of
its own; each command is printed before it runs, so that it can be typed again.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import urllib3

from headrace.demo.live import LiveFailed, run_live, show_live
from headrace.output import console, results
from ingest.client.policy_client import PolicyClient
from storage.reading.shard_reader import ShardReader

__all__ = ["LOGS", "DemoFailed", "make_room", "run_demo"]

LOGS = ("random_all", "bts_all")
"""The log to learn from (uniform choices), and the one to compare with (Thompson sampling)."""

FEATURES = ("user_feature_0", "user_feature_1", "user_feature_2", "user_feature_3", "position")
ACTION, REWARD, PROPENSITY, TIME = "item_id", "click", "propensity_score", "timestamp_us"
ACTIONS = 80
CATEGORIES = "categories.json"
DECISIONS = 20
IN_SHARDS_SECONDS = 30.0
STOP_SECONDS = 30.0


class DemoFailed(RuntimeError):
    """A stage did not do what it has to; the text says which, and what it said."""


@dataclass
class Collecting:
    """`headrace collect` as a process of its own."""

    name: str
    root: Path
    process: subprocess.Popen[str]
    address: str

    def counts(self) -> dict[str, Any]:
        """What /readyz says."""
        response = urllib3.request("GET", f"{self.address}/readyz", retries=False, timeout=10.0)
        found: dict[str, Any] = response.json()
        return found

    def stop(self) -> None:
        """SIGTERM, which drains. Raises DemoFailed unless it ends well."""
        self.process.send_signal(signal.SIGTERM)
        if self.process.wait(STOP_SECONDS) != 0:
            raise DemoFailed(f"the collector of {self.name} ended with {self.process.returncode}")


@dataclass
class Demo:
    """Where the demo works, and what its stages found."""

    root: Path
    data: Path
    seed: int
    quiet: bool  # say nothing on stderr
    found: dict[str, Any] = field(default_factory=dict)

    def say(self, text: str) -> None:
        if not self.quiet:
            print(text, file=sys.stderr, flush=True)

    def command(self, *words: object, accept: tuple[int, ...] = (0,)) -> dict[str, Any]:
        """Run one command of headrace; what its --json line says."""
        arguments = [str(word) for word in words]
        began = time.monotonic()
        self.say(f"$ headrace {shlex.join(arguments)}")
        done = subprocess.run(
            [sys.executable, "-P", "-m", "headrace", *arguments, "--json"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if self.quiet else None,
            text=True,
            check=False,
        )
        if done.returncode not in accept:
            raise DemoFailed(f"headrace {arguments[0]} ended with {done.returncode}")
        self.say(f"  {time.monotonic() - began:.1f} s")
        document: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return document

    @contextlib.contextmanager
    def collecting(self, name: str) -> Iterator[Collecting]:
        """A collector on a free port, for a log's observations and actions."""
        root = self.root / name
        sizes = ",".join(str(len(values)) for values in self.found["categories"].values())
        arguments = ["collect", "--root", str(root), "--port", "0"]
        arguments += ["--observation", f"multi_discrete:{sizes}"]
        arguments += ["--action", f"discrete:{ACTIONS}"]
        self.say(f"$ headrace {shlex.join(arguments)} &")
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "headrace", *arguments, "--json"],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            line = process.stdout.readline() if process.stdout else ""
            if not line:
                raise DemoFailed(f"the collector of {name} did not start")
            address = json.loads(line)["address"]
            self.say(f"  {address}")
            yield Collecting(name, root, process, address)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
            if process.stdout:
                process.stdout.close()


def run_demo(
    root: Path, data: Path, *, seed: int = 0, live: bool = True, quiet: bool = False
) -> dict[str, Any]:
    """Run all of it under `root`, which must not exist yet; what was found, as plain types.

    `data` holds the logs; with `live`, part B follows: CartPole, on-policy. `ok` is False when the
    intervals of the two logs do not overlap, part B missed its goal, or `verify` found something.
    Raises DemoFailed when a stage fails, OSError.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the collectors end too
    began = time.monotonic()
    root.mkdir(parents=True)
    demo = Demo(root, data, seed, quiet)
    demo.found |= {"root": str(root), "categories": _categories(data)}
    (root / CATEGORIES).write_text(json.dumps(demo.found["categories"], indent=1) + "\n")
    with contextlib.ExitStack() as stack:
        collectors = [stack.enter_context(demo.collecting(name)) for name in LOGS]
        for collector in collectors:
            _replay(demo, collector)
        for collector in collectors:
            _await_shards(demo, collector)
        learned_from, other = collectors
        _learn(demo, learned_from, other)
        _act(demo, learned_from)
        for collector in collectors:
            collector.stop()
    _account(demo, collectors)
    in_order = all(log["verify"]["ok"] for log in demo.found["logs"].values())
    demo.found["accounted"] = in_order
    demo.found["ok"] = in_order and all(demo.found["overlap"].values())
    if live:
        demo.found["live"] = _live(demo)
        demo.found["ok"] = demo.found["ok"] and demo.found["live"]["ok"]
    demo.found["seconds"] = round(time.monotonic() - began, 1)
    (root / "summary.json").write_text(json.dumps(demo.found, indent=1) + "\n")
    return demo.found


def _live(demo: Demo) -> dict[str, Any]:
    """Part B, and whether every step that its clients acted is in a shard, once."""
    demo.say("Part B: clients learn CartPole-v1 through the shards.")
    try:
        found = run_live(demo.root / "cartpole", seed=demo.seed, say=demo.say)
    except LiveFailed as error:
        raise DemoFailed(str(error)) from error
    checked = demo.command("verify", "--root", found["root"], accept=(0, 1))
    found["verify"] = checked
    once = found["acted"] == checked["acknowledged"] == checked["in_shards"]
    found["ok"] = bool(found["reached"] and once and checked["ok"])
    return found


def _categories(data: Path) -> dict[str, list[Any]]:
    """Column -> its values in both logs, sorted: one numbering, so that a policy fits both."""
    tables = [pq.read_table(data / f"{name}.parquet", columns=[*FEATURES]) for name in LOGS]
    table = pa.concat_tables(tables)
    return {name: sorted(pc.unique(table[name]).to_pylist()) for name in FEATURES}


def _replay(demo: Demo, collector: Collecting) -> None:
    """Log every row of the file as an episode of one step, through PolicyClient."""
    words: list[object] = ["replay", demo.data / f"{collector.name}.parquet"]
    words += ["--address", collector.address]
    for feature in FEATURES:
        words += ["--observation", f"{feature}:categories"]
    words += ["--categories", demo.root / CATEGORIES]
    words += ["--action", ACTION, "--reward", REWARD]
    words += ["--action-prob", PROPENSITY, "--time", TIME]
    demo.found.setdefault("logs", {})[collector.name] = {"replay": demo.command(*words)}


def _await_shards(demo: Demo, collector: Collecting) -> None:
    """Wait until all that was acknowledged is in shards: seconds after the last episode ended."""
    limit = time.monotonic() + IN_SHARDS_SECONDS
    while (counts := collector.counts())["steps_in_shards"] < counts["steps"]:
        if time.monotonic() > limit:
            raise DemoFailed(f"{collector.name}: not all is in shards in time: {counts}")
        time.sleep(0.05)
    demo.found["logs"][collector.name]["rows"] = counts["steps_in_shards"]
    demo.say(
        f"  {collector.name}: {counts['steps_in_shards']:,} steps in {counts['shards']} shards"
    )


def _learn(demo: Demo, learned_from: Collecting, other: Collecting) -> None:
    """Train, judge by both logs, publish: without the gate when it says no, so as to go on."""
    own = ["--root", learned_from.root]
    demo.found["train"] = trained = demo.command("train", *own, "--seed", demo.seed)
    plot = demo.root / "intervals.png"
    words = ["evaluate", trained["candidate"][:12], *own, "--log", other.root, "--plot", plot]
    demo.found["evaluate"] = judged = demo.command(*words)
    first, second = judged["logs"]
    demo.found["overlap"] = overlapping(first["target"], second["target"])
    words = ["publish", trained["candidate"][:12], *own]
    asked = demo.found["gate"] = demo.found["publish"] = demo.command(*words, accept=(0, 1, 4))
    if not asked["published"]:
        demo.say("  published without the gate: the demo needs a version to act with")
        demo.found["publish"] = demo.command(*words, "--no-gate")


def overlapping(first: list[dict[str, Any]], second: list[dict[str, Any]]) -> dict[str, bool]:
    """Estimator -> whether its two intervals overlap; an end that is None is without a bound.

    The direct method is left out: its interval tells the noise of the fitted model's predictions
    and nothing of the model's own error, so that two models fitted to two logs need not agree.
    """
    intervals = {one["name"]: one["interval"] for one in second if one["name"] != "dm"}
    return {
        one["name"]: _below(one["interval"][0], intervals[one["name"]][1])
        and _below(intervals[one["name"]][0], one["interval"][1])
        for one in first
        if one["name"] in intervals
    }


def _below(low: float | None, high: float | None) -> bool:
    return low is None or high is None or low <= high


def _act(demo: Demo, collector: Collecting) -> None:
    """A remote client asks for actions on some observations of the log."""
    with ShardReader(collector.root, batch_size=DECISIONS) as reader:
        observations = reader.next()["obs"][:DECISIONS]
    demo.say(f"  a remote client asks {collector.address} for {len(observations)} actions")
    actions: list[int] = []
    with PolicyClient(collector.address, inference_mode="remote") as client:
        for observation in observations:
            # Nobody will click on these: kept, but not to learn from.
            episode = client.start_episode(training_enabled=False, tags={"purpose": "demo"})
            action: Any = client.get_action(episode, observation)
            actions.append(int(action))
            client.end_episode(episode)
        version = client.update_policy_weights()
    demo.found["acted"] = {"decisions": len(actions), "version": version, "actions": actions}


def _account(demo: Demo, collectors: list[Collecting]) -> None:
    """verify, versions: after the collectors have stopped."""
    for collector in collectors:
        found = demo.command("verify", "--root", collector.root, accept=(0, 1))
        demo.found["logs"][collector.name]["verify"] = found
    demo.found["versions"] = demo.command("versions", "--root", collectors[0].root)


def make_room(root: Path, data: Path) -> None:
    """Move aside what stands where the demo works. Raises ValueError when the logs are missing."""
    absent = [name for name in LOGS if not (data / f"{name}.parquet").is_file()]
    if absent:
        raise ValueError(
            f"--data: expected {absent[0]}.parquet in {data}; it ships with the source"
        )
    if root.exists():
        taken = (root.with_name(f"{root.name}-{n}") for n in itertools.count(1))
        root.rename(next(path for path in taken if not path.exists()))


# --- the end of it ---------------------------------------------------------------------------


def show(found: dict[str, Any]) -> None:
    """The tables that `headrace demo` ends with."""
    trained = found["train"]
    rows = []
    for name, log in found["logs"].items():
        checked = log["verify"]
        # Evaluation reads what training held out, and all of the log that it did not train on.
        learned, judged_by = 0, log["rows"]
        if name == LOGS[0]:
            learned, judged_by = trained["rows_trained"], trained["rows_held_out"]
        read = judged_by + (trained["rows_read"] if learned else 0)
        in_order = "yes" if checked["ok"] else "NO"
        counts = (checked["acknowledged"], checked["in_shards"], read, learned, judged_by)
        rows.append((name, *counts, in_order))
    columns = ("log", "acknowledged", "in shards", "read", "trained on", "judged by", "in order")
    console.table("Steps", columns, rows)
    results.estimates(found["evaluate"]["logs"])
    results.versions(found["versions"])
    _say_the_end(found)
    if "live" in found:
        show_live(found["live"])


def _say_the_end(found: dict[str, Any]) -> None:
    apart = [name for name, overlap in found["overlap"].items() if not overlap]
    acted, root, asked = found["acted"], found["root"], found["gate"]
    print(
        f"The intervals of both logs overlap ({', '.join(found['overlap'])}). dm is left out: its "
        "interval knows nothing of its model's own error."
        if not apart
        else f"The intervals of the two logs do NOT overlap: {', '.join(apart)}."
    )
    print(f"Is the policy better than the one that made its log? {asked['gate']['verdict']}:")
    for reason in asked["gate"]["reasons"]:
        print(f"  {reason}")
    how = "Published through the gate."
    if not asked["published"]:
        how = "Published without a gate all the same, so that the demo has a version to act with."
    print(
        f"{how} A remote client took {acted['decisions']} decisions with version "
        f"{acted['version']}; they are kept, and not trained on."
    )
    every = "every" if found["accounted"] else "NOT every"
    print(f"verify: {every} acknowledged step is accounted for exactly once.")
    print(
        f"{found['seconds']} s. The intervals as a picture: {found['evaluate']['plot']}; "
        f"the data: {root}"
    )
