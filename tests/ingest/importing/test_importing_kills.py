"""SIGKILL of the collector, its writer and the client during an import of the real log."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from storage.declarations.declaration import PolicyDeclaration
from storage.declarations.policy_files import save_declaration
from storage.reading.multi_agent_reader import MultiAgentReader
from storage.spaces.descriptors import Box, Discrete
from tests.collector_process import CollectorProcess, declare, shard_rows
from tests.headrace.command import answer, headrace

ROOT = Path(__file__).parents[3]
LOG = ROOT / "data/open_bandit/random_all.parquet"
KILLS, ROWS, APART = 12, 10_000, 600
BANDIT = ["--observation", "position", "--action", "item_id", "--reward", "click"]
BANDIT += ["--action-prob", "propensity_score", "--time", "timestamp_us"]

RUN = """
import sys
import ingest.importing.posting
ingest.importing.posting.ROWS = int(sys.argv.pop(1))
from headrace.__main__ import main
main()
"""


def importing(rows: int, *words: object) -> subprocess.Popen[bytes]:
    """`headrace import` with requests of about the given number of rows."""
    command = [sys.executable, "-c", RUN, str(rows), "import", *map(str, words), "--json"]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)


def ended(client: subprocess.Popen[bytes]) -> None:
    """Send SIGKILL and close the pipe."""
    client.kill()
    client.wait()
    if client.stdout is not None:
        client.stdout.close()


@pytest.mark.long
@pytest.mark.parametrize("seed", [7, 8, 9])
def test_kills_within_an_import_lose_and_double_nothing(tmp_path: Path, seed: int) -> None:
    """Each kill comes after more of the log has arrived; at the end every row is stored once."""
    declare(tmp_path, observation="box:1", action="discrete:80")
    chance = random.Random(seed)
    with CollectorProcess(tmp_path) as collector:

        def begin() -> subprocess.Popen[bytes]:
            return importing(250, LOG, *BANDIT, "--address", collector.address)

        client = begin()
        try:
            for number in range(KILLS):
                client = await_steps(collector, (number + 1) * APART, client, begin)
                victim = chance.choice(("collector", "writer", "client"))
                writer = collector.writer_pid()
                if victim == "collector":
                    collector.kill()
                    collector.restart()
                elif victim == "writer" and writer is not None:
                    os.kill(writer, signal.SIGKILL)
                else:
                    ended(client)
            ended(client)
            client = begin()
            assert client.wait(120) == 0
        finally:
            ended(client)
        assert collector.stop() == 0
    rows = shard_rows(tmp_path)
    log = pq.read_table(LOG)
    assert sorted(row["ts"] for row in rows) == sorted(log["timestamp_us"].to_pylist())
    assert len({row["eps_id"] for row in rows}) == len(rows) == ROWS
    assert sum(row["rewards"] for row in rows) == sum(log["click"].to_pylist())


def await_steps(
    collector: CollectorProcess,
    steps: int,
    client: subprocess.Popen[bytes],
    begin: Callable[[], subprocess.Popen[bytes]],
) -> subprocess.Popen[bytes]:
    """Wait until this many have arrived; a killed client is replaced."""
    while collector.get("/readyz")[1]["steps"] < steps:
        if client.poll() is not None:
            ended(client)
            client = begin()
    return client


def test_a_killed_import_goes_on_where_it_stopped(tmp_path: Path) -> None:
    """The next run recognises the rows that arrived before SIGKILL, and sends only the rest.

    Episodes have several steps, with interleaved rows.
    """
    declare(tmp_path / "root", observation="box:1", action="discrete:2")
    count = np.arange(8_000)
    episodes = count // 800 * 8 + count % 8
    path = tmp_path / "log.parquet"
    columns = {"x": count, "a": count % 2, "r": count, "e": episodes, "n": count % 800 // 8}
    pq.write_table(pa.table(columns), path)
    words = [path, "--observation", "x", "--action", "a", "--reward", "r"]
    words += ["--episode", "e", "--step", "n"]
    with CollectorProcess(tmp_path / "root") as collector:
        words += ["--address", collector.address]
        client = importing(400, *words)
        await_steps(collector, 1_200, client, lambda: client)
        ended(client)
        rest = importing(400, *words)
        output, _ = rest.communicate(timeout=120)
        report = answer(subprocess.CompletedProcess([], 0, output.decode(), ""))
        assert 1_200 <= report["rows_known"] == 100 * report["skipped_known"]
        assert report["steps"] == len(count) - report["rows_known"]
        checked = headrace("import", *words, "--check", "--json")
        assert answer(checked)["steps"] == len(count)
        assert collector.stop() == 0
    rows = shard_rows(tmp_path / "root")
    assert Counter(row["rewards"] for row in rows) == {float(i): 1 for i in count}
    assert all(row["t"] == row["rewards"] % 800 // 8 for row in rows)
    assert {row["ended"] for row in rows} >= {"terminated"}


def test_a_killed_import_of_several_policies_makes_whole_episodes(tmp_path: Path) -> None:
    """The tracks of an episode are sent in requests of several policies, some of which had
    arrived.
    """
    root, path, episodes = tmp_path / "root", tmp_path / "log.csv", 1_000
    for name in ("walker", "flyer"):
        space, action = Box((1,)), Discrete(2)
        save_declaration(root, PolicyDeclaration(policy_id=name, observation=space, action=action))
    rows = [f"{e},{t},{who},{e},0,1" for e in range(episodes) for t in (0, 1) for who in "wf"]
    path.write_text("\n".join(["e,n,who,x,a,r", *rows]) + "\n")
    words = [path, "--observation", "x", "--action", "a", "--reward", "r", "--episode", "e"]
    words += ["--step", "n", "--agent", "who", "--policy", "w=walker", "--policy", "f=flyer"]
    with CollectorProcess(root) as collector:
        words += ["--address", collector.address]
        client = importing(125, *words)
        await_steps(collector, 400, client, lambda: client)
        ended(client)
        rest = importing(125, *words)
        output, _ = rest.communicate(timeout=120)
        report = answer(subprocess.CompletedProcess([], 0, output.decode(), ""))
        assert report["rows_known"] >= 400
        assert report["steps"] + report["rows_known"] == len(rows)
        assert collector.stop() == 0
    with MultiAgentReader(root) as reader:
        batches = list(reader)
    assert sum(batch.agent_steps() for batch in batches) == len(rows)
    assert sum(batch.env_steps() for batch in batches) == 2 * episodes
    assert reader.stats.episodes == episodes
    assert reader.stats.partial == {}
