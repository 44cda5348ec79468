"""`headrace demo`, second part: a real production log, which is too small for a verdict.

Two logs of one shop, by different logging policies, are imported by two collectors. A policy is
learned from the first log, and judged by both: by the first log's held-out episodes, and by the
other log. It is published, and a remote client asks it for actions. Every step is a process or an
HTTP request of its own; each command is printed before it runs, so that users can repeat it.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from headrace.demo.stage import CollectorCommand, Demo
from headrace.output import console, results
from ingest.client.policy_client import PolicyClient
from storage.reading.shard_reader import ShardReader

FOLDER = "open_bandit"
LOGS = ("random_all", "bts_all")
"""The log to learn from (uniform choices), and the one to compare with (Thompson sampling)."""

FEATURES = ("user_feature_0", "user_feature_1", "user_feature_2", "user_feature_3", "position")
ACTION, REWARD, PROPENSITY, TIME = "item_id", "click", "propensity_score", "timestamp_us"
ACTIONS = 80
CATEGORIES = "categories.json"
DECISIONS = 20


def run_bandit(demo: Demo) -> dict[str, Any]:
    """Import, learn, judge, publish, act; return the findings.

    `ok` is False if the intervals of the two logs do not overlap, or `verify` found a fault.
    """
    found: dict[str, Any] = {"categories": _categories(demo.data / FOLDER)}
    (demo.root / CATEGORIES).write_text(json.dumps(found["categories"], indent=1) + "\n")
    spaces = _spaces(found["categories"])
    with contextlib.ExitStack() as stack:
        collectors = [stack.enter_context(demo.collecting(name, *spaces)) for name in LOGS]
        found["logs"] = {one.name: {"import": _import(demo, one)} for one in collectors}
        for collector in collectors:
            found["logs"][collector.name]["rows"] = demo.await_shards(collector)
        found |= _learn(demo, *collectors)
        found["acted"] = _act(demo, collectors[0])
        for collector in collectors:
            collector.stop()
    for collector in collectors:
        checked = demo.command("verify", "--root", collector.root, accept=(0, 1))
        found["logs"][collector.name]["verify"] = checked
    found["versions"] = demo.command("versions", "--root", collectors[0].root)
    found["accounted"] = all(log["verify"]["ok"] for log in found["logs"].values())
    found["ok"] = found["accounted"] and all(found["overlap"].values())
    return found


def _categories(data: Path) -> dict[str, list[Any]]:
    """Column -> its values in both logs, sorted: one numbering, so that a policy fits both."""
    tables = [pq.read_table(data / f"{name}.parquet", columns=[*FEATURES]) for name in LOGS]
    table = pa.concat_tables(tables)
    return {name: sorted(pc.unique(table[name]).to_pylist()) for name in FEATURES}


def _spaces(categories: dict[str, list[Any]]) -> list[str]:
    """The options that declare the spaces of a log."""
    sizes = ",".join(str(len(values)) for values in categories.values())
    return ["--observation", f"multi_discrete:{sizes}", "--action", f"discrete:{ACTIONS}"]


def _import(demo: Demo, collector: CollectorCommand) -> dict[str, Any]:
    """Log every row of the file as an episode of one step."""
    words: list[object] = ["import", demo.data / FOLDER / f"{collector.name}.parquet"]
    words += ["--address", collector.address]
    for feature in FEATURES:
        words += ["--observation", f"{feature}:categories"]
    words += ["--categories", demo.root / CATEGORIES]
    words += ["--action", ACTION, "--reward", REWARD]
    words += ["--action-prob", PROPENSITY, "--time", TIME]
    return demo.command(*words)


def _learn(demo: Demo, learned_from: CollectorCommand, other: CollectorCommand) -> dict[str, Any]:
    """Train, judge by both logs, publish; without the gate if it refuses, to continue the demo."""
    own = ["--root", learned_from.root]
    trained = demo.command("train", *own, "--seed", demo.seed)
    plot = demo.root / "intervals.png"
    words = ["evaluate", trained["candidate"][:12], *own, "--log", other.root, "--plot", plot]
    judged = demo.command(*words)
    first, second = judged["logs"]
    words = ["publish", trained["candidate"][:12], *own]
    asked = published = demo.command(*words, accept=(0, 1, 4))
    if not asked["published"]:
        demo.say("  published without the gate: the demo needs a version to act with")
        published = demo.command(*words, "--no-gate")
    return {
        "train": trained,
        "evaluate": judged,
        "overlap": overlapping(first["target"], second["target"]),
        "gate": asked,
        "publish": published,
    }


def overlapping(first: list[dict[str, Any]], second: list[dict[str, Any]]) -> dict[str, bool]:
    """Estimator -> whether its two intervals overlap; an end that is None is infinite.

    The direct method is left out: its interval covers only the variation of the fitted model's
    predictions, not the model's error, so the models fitted to two logs need not agree.
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


def _act(demo: Demo, collector: CollectorCommand) -> dict[str, Any]:
    """Ask for actions on some observations of the log, as a remote client."""
    with ShardReader(collector.root, batch_size=DECISIONS) as reader:
        observations = reader.next()["obs"][:DECISIONS]
    demo.say(f"  a remote client asks {collector.address} for {len(observations)} actions")
    actions: list[int] = []
    with PolicyClient(collector.address, inference_mode="remote") as client:
        for observation in observations:
            # Nobody can click on these: they are stored, but not for learning.
            episode = client.start_episode(training_enabled=False, tags={"purpose": "demo"})
            action: Any = client.get_action(episode, observation)
            actions.append(int(action))
            client.end_episode(episode)
        version = client.update_policy_weights()
    return {"decisions": len(actions), "version": version, "actions": actions}


def show_bandit(found: dict[str, Any]) -> None:
    """Print the tables and sentences of this part."""
    trained = found["train"]
    rows = []
    for name, log in found["logs"].items():
        checked = log["verify"]
        # Evaluation reads the episodes that training held out, and all of the other log.
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


def _say_the_end(found: dict[str, Any]) -> None:
    apart = [name for name, overlap in found["overlap"].items() if not overlap]
    acted, asked = found["acted"], found["gate"]
    print(
        f"The intervals of both logs overlap ({', '.join(found['overlap'])}). dm is left out: its "
        "interval ignores the error of its model."
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
    print(f"The intervals as a picture: {found['evaluate']['plot']}")
