"""What it takes to add a number to each step: a copy of the tree with one more column.

The edits below are what somebody who adds a column writes. They touch at most six files of the
product, and the number gets from a client and from a bulk import into a batch.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.collector_process import CollectorProcess, declare
from tests.project.environments import ROOT

EDITS = {
    "storage/experience/step_columns.py": (
        (
            "STEP_COLUMNS = (\n",
            '    StepColumn(name="urgency", default=0.5, low=0.0, high=1.0, added=True),\n',
        ),
        ("    actions: bytes\n", "    urgency: bytes\n"),
    ),
    "ingest/protocol/messages.py": (
        ("    replayed: bool = False\n", "    urgency: float | None = None\n"),
        ("\nFIELDS: tuple[str, ...] = (", '"log_action.urgency",'),
    ),
    "ingest/episodes/journal_events.py": (
        (
            "    env_t: int = -1  # the environment's step, for tracks\n",
            "    urgency: float = 0.5\n",
        ),
        ('    env_t: bytes = b""  # int64, of tracks\n', '    urgency: bytes = b""\n'),
        ('    env_t: bytes = b""\n', '    urgency: bytes = b""\n'),
    ),
    "ingest/client/policy_client.py": (
        (
            (
                "        action_logp: float | Mapping[str, float] | None = None,\n"
                "        policy_version: int = -1,\n        ts: int | None = None,\n"
            ),
            "        urgency: float | None = None,\n",
        ),
        (
            (
                "            self._log_action(\n                episode_id, observation, action, "
                "action_prob, action_logp, policy_version, ts"
            ),
            ", urgency",
        ),
        (
            (
                "        action_logp: float | Mapping[str, float] | None,\n"
                "        policy_version: int,\n        ts: int | None,\n"
            ),
            "        urgency: float | None = None,\n",
        ),
        (
            "            ts=time_ns() // 1000 if ts is None else now_or(ts),\n        )\n",
            "        step.urgency = urgency\n",
        ),
    ),
}
"""file -> (a text in it, what is added behind that text)"""

PROGRAM = """
import json, sys
from zlib import crc32
import numpy as np, pyarrow as pa, urllib3
from headrace import PolicyClient, Refusal, ShardReader

address, root, old = sys.argv[1:]
with PolicyClient(address) as client:
    episode = client.start_episode()
    for t, urgency in enumerate((0.25, None, 1.0)):
        client.log_action(episode, np.full(4, t, np.float32), 1, urgency=urgency)
        client.log_returns(episode, 1.0)
    client.end_episode(episode)
    client.flush(60)
    client.start_episode("refused")
    client.log_action("refused", np.zeros(4, np.float32), 1, urgency=7.0)
    try:
        client.flush(60)
        refused = ""
    except Refusal as error:
        refused = str(error)

def stream(name, **columns):
    sink = pa.BufferOutputStream()
    table = pa.table({
        "eps_id": [name] * 3, "rewards": [0.0, 0.0, 0.0], "actions": [0, 0, 0],
        "obs": pa.array([[0.0] * 4] * 3, pa.list_(pa.float32(), 4)), **columns})
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()

def post(body):
    answer = urllib3.request("POST", address + "/v1/steps", body=body, headers={
        "Content-Type": "application/vnd.apache.arrow.stream",
        "Headrace-CRC32": f"{crc32(body):08x}"})
    return json.loads(answer.data)

accepted = post(stream("i", urgency=[0.75, None, 0.0]))
invalid = post(stream("j", urgency=[0.125, 9.0, 0.0]))
found = {}
with ShardReader(root, follow=True, columns=["eps_id", "t", "urgency"], batch_size=1) as reader:
    while len(found) < 7:
        batch = reader.next(timeout=60.0)
        assert batch.count, f"no more rows after {found}"
        key = "c" if batch["eps_id"][0] == episode else str(batch["eps_id"][0])
        found[f"{key}{batch['t'][0]}"] = float(batch["urgency"][0])
with ShardReader(old, columns=["urgency"]) as reader:
    earlier = reader.next()["urgency"].tolist()
print(json.dumps({"found": found, "refused": refused, "accepted": accepted["accepted"],
                  "invalid": invalid["refused_by"], "earlier": earlier}))
"""

EARLIER = """
import sys
import numpy as np
from headrace import PolicyClient

with PolicyClient(sys.argv[1]) as client:
    client.start_episode("earlier")
    client.log_action("earlier", np.zeros(4, np.float32), 1, urgency=0.25)
    client.end_episode("earlier")
"""
"""The client of the copy with a collector that lacks the field."""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the product with one more column."""
    copy = tmp_path / "tree"
    for package in ("headrace", "ingest", "policy", "storage"):
        shutil.copytree(
            ROOT / package, copy / package, ignore=shutil.ignore_patterns("__pycache__")
        )
    for name, edits in EDITS.items():
        path = copy / name
        text = path.read_text()
        for anchor, added in edits:
            assert text.count(anchor) == 1, f"{name}: expected {anchor!r} once"
            text = text.replace(anchor, anchor + added)
        path.write_text(text)
    return copy


def test_a_number_of_each_step_is_added_in_few_files(tree: Path, tmp_path: Path) -> None:
    """It gets from client and import through wire, journal and shard into a batch.

    Values out of the range of the table are refused on both ways. A shard that was written before
    has the default in every row. A collector without the field is not sent it.
    """
    assert len(EDITS) <= 6
    env = {**os.environ, "PYTHONPATH": str(tree)}
    old, root = tmp_path / "old", tmp_path / "root"
    declare(old)
    with CollectorProcess(old) as collector:
        collector.post("/v1/episodes", {"episode_id": "e"})
        collector.post("/v1/episodes/e/log_action", {"obs": [0.0] * 4, "action": 1})
        collector.post("/v1/episodes/e/end", {})
        sent = subprocess.run(
            [sys.executable, "-c", EARLIER, collector.address],
            env=env, cwd=tmp_path, stderr=subprocess.PIPE, text=True, timeout=300,
        )  # fmt: skip
        assert sent.returncode == 0, sent.stderr
        assert "does not list log_action.urgency: not sent" in sent.stderr
        collector.stop()
    declare(root)
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    words = [sys.executable, "-m", "headrace", "collect", "--root", str(root), "--port", "0"]
    words += ["--json"]
    with subprocess.Popen(
        words, env=env, cwd=tree, stdout=subprocess.PIPE, text=True
    ) as collecting:
        try:
            assert collecting.stdout is not None
            address = json.loads(collecting.stdout.readline())["address"]
            ran = subprocess.run(
                [sys.executable, program, address, root, old],
                env=env, cwd=tmp_path, stdout=subprocess.PIPE, text=True, timeout=300,
            )  # fmt: skip
        finally:
            collecting.terminate()
    assert ran.returncode == 0
    result = json.loads(ran.stdout)
    assert result["found"] == {
        "c0": 0.25, "c1": 0.5, "c2": 1.0, "i0": 0.75, "i1": 0.5, "i2": 0.0, "j0": 0.125,
    }  # fmt: skip
    assert "urgency: Episode refused: expected a number in [0, 1], got 7" in result["refused"]
    assert result["accepted"] == 5
    assert list(result["invalid"]) == ["urgency: expected a number in [0, 1]"]
    assert result["earlier"] == [0.5, 0.5]
