"""A root with a file of every kind, ways to damage one, and commands that open it.

`headrace train --follow` runs until a signal; here it is the function that it calls.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest

from ingest.client.policy_client import PolicyClient
from policy.inference.weight_store import WeightStore
from storage.declarations.dropped_steps import Lost, say_dropped
from storage.declarations.held_policies import say_held
from storage.reading.shard_reader import ShardReader
from storage.weights.decisions import record
from storage.weights.manifest import Served
from storage.weights.off_chain import mark_off_chain
from tests.headrace.command import Collect, headrace
from tests.policy.training import live_log

EPISODES, STEPS = 43, 10
COLLECTOR = live_log.STREAM.partition("-")[0]


def make_root(root: Path) -> Path:
    """Three shards, three updates of a follower, and what other commands leave behind."""
    live_log.declare(root)
    for first, end in ((0, 20), (20, 40), (40, EPISODES)):
        live_log.write(root, *(live_log.part(i, STEPS) for i in range(first, end)))
    live_log.run(root, 3, keep_versions=2, checkpoint_every=1)
    store = WeightStore(root, "default")
    decision = {"policy_id": "default", "candidate": store.candidates()[0], "verdict": "better"}
    decision |= {"published": True, "version": 2, "reasons": ["it is better"], "episodes": 12}
    record(root, {**decision, "rows": {live_log.STREAM: [0, 11]}})
    say_dropped(root, COLLECTOR, {"i1": Lost(1, 12), "i2": Lost(0, 3)})
    say_held(root, "default", 4)
    until = int((time.time() - 100) * 1e6)  # expired: nothing waits for it
    store.served.write(
        Served(
            collector_id=COLLECTOR,
            generation=2,
            version=2,
            wanted_generation=3,
            wanted_version=3,
            why="refused",
            until=until,
            served=[[1, 2]],
            refused={"3": "refused"},
        )
    )
    mark_off_chain(store.files, store.versions()[0], "its checkpoint is lost")
    with ShardReader(root, batch_size=7) as reader:
        reader.next()
        reader.save("mine")
    with (
        Collect(root, "--json") as collector,
        PolicyClient(json.loads(collector.first_line)["address"]) as client,
    ):
        episode = client.start_episode()
        client.log_action(episode, np.zeros(4, np.float32), 0)
        client.flush()
    assert headrace("token", "create", "t", "--scope", "admin", "--root", root).returncode == 0
    (root / "keys" / "redaction.key").write_text("ab" * 32 + "\n")
    assert headrace("freeze", "--root", root).returncode == 0
    assert headrace(*COMMANDS["train --manifest"](root), "--root", root).returncode == 0
    return root


def _manifest(root: Path) -> Path:
    (path,) = (one for one in (root / "manifests").glob("*.json") if one.name.count(".") == 1)
    return path


_CQL = ("train", "--algorithm", "cql", "--epochs", "1", "--evaluation-share", "0", "--json")
COMMANDS: Mapping[str, Callable[[Path], tuple[object, ...]]] = {
    "ls": lambda root: ("ls", "--json"),
    "verify": lambda root: ("verify",),
    "versions": lambda root: ("versions",),
    "decisions": lambda root: ("decisions",),
    "report": lambda root: ("report", "--output", root / "report.html", "--json"),
    "evaluate": lambda root: ("evaluate", "live", "--split", "all", "--json"),
    "train": lambda root: _CQL,
    "train --manifest": lambda root: (*_CQL, "--manifest", _manifest(root)),
    "freeze": lambda root: ("freeze", "--json"),
    "publish": lambda root: ("publish", "--no-gate"),
    "resume": lambda root: ("resume",),
    "token list": lambda root: ("token", "list"),
    "pseudonym": lambda root: ("pseudonym", "x"),
}
FOLLOW, COLLECT = "train --follow", "collect"


def run(command: str, root: Path) -> tuple[int, str]:
    """(exit status, output of a command); 0 for a job or a collector that ended as it should."""
    if command == FOLLOW:
        try:
            result, updates = live_log.run(root, 1, stop_after=30)
        except (ValueError, OSError, RuntimeError) as error:
            return 2, str(error)
        return (0, "") if updates else (1, str(result))
    if command == COLLECT:
        _, err, status = Collect(root).stop()
        return status, err
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logging.getLogger(), "handlers", [])  # as in a process of its own
        done = headrace(*COMMANDS[command](root), "--root", root)
    return done.returncode, done.stdout + done.stderr


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGE = (flip, cut, empty, folder)

_VERSION = ("versions", "verify", "evaluate", FOLLOW, COLLECT)
OPENED: Mapping[str, tuple[str, ...]] = {
    "policies/default.json": ("train", "ls", "freeze", "evaluate", FOLLOW, COLLECT),
    "decisions/default/*.json": ("report", "decisions", "evaluate"),
    f"dropped/{COLLECTOR}.json": ("evaluate", COLLECT),
    "flow/default.json": (FOLLOW, COLLECT),
    "keys/tokens.json": ("token list", COLLECT),
    "keys/redaction.key": ("pseudonym", COLLECT),
    "keys/etag.key": (COLLECT,),
    "manifests/????????????????.json": ("train --manifest", "freeze"),
    "manifests/*.train-*.json": ("train --manifest", "freeze"),
    "numbers/default.json": ("publish", "versions", FOLLOW, COLLECT),
    "numbers/default.lease": (FOLLOW, "publish"),
    "weights/default/candidates/*/candidate.json": ("versions", "publish", "train"),
    "weights/default/candidates/*/weights.safetensors": ("publish", "versions"),
    "weights/default/candidates/*/lineage.json": ("publish", "versions"),
    "weights/default/versions/4/manifest.json": _VERSION,
    "weights/default/versions/4/weights.safetensors": _VERSION,
    "weights/default/versions/4/lineage.json": _VERSION,
    "weights/default/versions/*/off_chain.json": ("versions", "verify"),
    "weights/default/pruned.jsonl": ("versions", "verify", "publish"),
    "weights/default/checkpoints/follow.1.safetensors": (FOLLOW,),
    "weights/default/checkpoints/follow.1.before.safetensors": (FOLLOW,),
    "weights/default/leases/1.json": (FOLLOW, "publish", COLLECT),
    "weights/default/live.json": ("versions", "verify", "publish", "resume", FOLLOW, COLLECT),
    "weights/default/live.copy.json": ("versions", "verify", "publish", FOLLOW, COLLECT),
    f"weights/default/served/{COLLECTOR}.json": ("versions", "publish", COLLECT),
    "weights/default/store.json": ("publish", FOLLOW, COLLECT),
    "journal/high-water": (COLLECT, "verify", "ls"),
    "journal/address": ("ls", "verify", COLLECT),
}
"""Every file but shards and the journal's database -> the commands that open it."""
