"""Everything above `storage.objects` works over any store: library, jobs and commands.

The third store is written in a test, and known by one line in `storage.objects.opening`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer.testing

from headrace.__main__ import _command_line
from policy.algorithms.bandit import BanditConfig
from policy.data.freeze import freeze, load_frozen
from policy.data.overview import overview
from policy.inference.weight_store import WeightStore
from policy.judging.canary import judge_canary, promote, start_canary
from policy.judging.evaluate import evaluate
from policy.judging.gate import publish
from policy.judging.settings import EvaluationSettings
from policy.training.settings import TrainSettings
from policy.training.train import train, train_once
from policy.training.train_live import follow
from storage.declarations.policy_files import load_declarations
from storage.experience.sample_batch import SampleBatch
from storage.objects import opening
from storage.objects.memory import MemoryObjects
from storage.objects.opening import Root, objects_at
from storage.reading.multi_agent_reader import MultiAgentReader
from storage.reading.shard_reader import ShardReader, read_position
from storage.shards.output_writer import ParquetOutputWriter
from storage.verify.audit import Trained, verify
from storage.verify.inventory import list_streams
from storage.verify.second_reader import SecondReader
from storage.weights.decisions import load_decisions
from tests.policy.conftest import ACTION, OBSERVATION, BanditLog
from tests.storage.objects.sqlite_objects import SCHEME, SqliteObjects

ROWS, MORE = 600, 40
CONFIG = BanditConfig(objective="dr", epochs=1)


@pytest.fixture(params=["folder", "memory", SCHEME])
def root(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Root:
    """A root with a log of decisions, in shards of two writers."""
    monkeypatch.setitem(opening.STORES, SCHEME, SqliteObjects)
    monkeypatch.chdir(tmp_path)
    roots: dict[str, Root] = {"folder": tmp_path / "root", "memory": MemoryObjects()}
    made = roots.get(request.param, f"{SCHEME}://{tmp_path / 'objects.db'}")
    BanditLog.make(ROWS).write(made, shard_rows=200)
    writer = ParquetOutputWriter(made, {"default": (OBSERVATION, ACTION)})
    writer.write(SampleBatch({**BanditLog.make(MORE, seed=1).batch(), "eps_id": _names(MORE)}))
    return made


def _names(count: int) -> Any:
    return np.array([f"more-{number}" for number in range(count)], object)


def test_a_log_is_read_once_over_a_saved_position(root: Root) -> None:
    """And followed: a shard that is written later is found."""
    seen: list[tuple[str, int]] = []

    def note(batch: SampleBatch) -> None:
        seen.extend(zip(batch["stream"].tolist(), batch["ordinal"].tolist(), strict=True))

    with ShardReader(root, policy_id="default", batch_size=150, shuffle=100) as reader:
        note(reader.next())
        reader.save("half")
    state = read_position(root, "half")
    with ShardReader([root], policy_id="default", batch_size=150, state=state) as reader:
        for batch in reader:
            note(batch)
    assert len(seen) == len(set(seen)) == ROWS + MORE
    with MultiAgentReader(root) as joined:
        assert sum(batch.env_steps() for batch in joined) == ROWS + MORE
    with ShardReader(root, follow=True, eager=True, poll_interval=0.01, state=state) as reader:
        while reader.stats.rows < ROWS + MORE - 150:
            reader.next(timeout=60.0)
        assert reader.caught_up()
        ParquetOutputWriter(root, {"default": (OBSERVATION, ACTION)}).write(
            SampleBatch({**BanditLog.make(5).batch(), "eps_id": _names(5)})
        )
        assert reader.next(timeout=60.0).count == 5


def test_the_way_from_a_log_to_a_live_version_and_back(root: Root, tmp_path: Path) -> None:
    """Train, evaluate, publish, roll back, canary, promote; every decision is recorded."""
    first = train(root, "default", CONFIG, settings=TrainSettings(seed=1))
    assert first.rows_trained + first.rows_held_out == ROWS + MORE
    judged = evaluate(
        root, "default", first.candidate, settings=EvaluationSettings(reward_range=(0.0, 1.0))
    )
    assert judged.episodes == first.rows_held_out
    assert publish(root, "default", first.candidate, None)["version"] == 1
    frozen = freeze(root)
    assert frozen.rows == ROWS + MORE
    assert freeze(root).unchanged
    second = train_once(root, "default", CONFIG, frozen, settings=TrainSettings(seed=2))
    assert not second["unchanged"]
    assert train_once(root, "default", CONFIG, frozen, settings=TrainSettings(seed=2))["unchanged"]
    decided = publish(root, "default", second["candidate"], None, frozen=frozen)
    assert (decided["version"], decided["published"]) == (2, True)
    if not isinstance(root, MemoryObjects):
        assert load_frozen(frozen.place) == frozen
    store = WeightStore(root, "default")
    assert store.rollback(1, by="test", why="").version == 3
    assert store.resume() is not None
    start_canary(root, "default", second["candidate"], 0.5)
    assert judge_canary(root, "default")["verdict"] == "cannot tell"
    assert promote(root, "default", gated=False)["promoted"]
    assert store.live().version == 4  # type: ignore[union-attr]
    known = load_decisions(root, "default")
    assert [one.get("kind", "gate") for one in known.known] == [
        *("gate", "gate", "rollback"),
        *("canary start", "canary"),
    ]
    assert overview(root, "default")["data"]["steps"] == ROWS + MORE
    with SecondReader() as reader:
        report = verify(root, None, Trained.of(root), second=reader)
    assert (report.findings, report.in_shards) == ((), ROWS + MORE)


def test_damage_is_found_and_set_aside(root: Root) -> None:
    """Its digest is noted, and other shards stay."""
    objects = objects_at(root)
    stream = next(one for one in objects.names("shards/") if len(objects.names(one)) == 3)
    name = objects.names(stream)[1]
    objects.replace(name, objects.read(name)[:-1] + b"x")
    report = verify(root, None, Trained(), quarantine=True)
    aside = name.replace("shards/", "quarantine/")
    assert report.quarantined == (aside,)
    assert "damaged" in {finding.kind for finding in report.findings}
    assert objects.names(aside) == [aside, f"{aside}.sha256"]
    assert objects.status(name) is None
    listed = list_streams(root, load_declarations(root)).streams
    assert sum(one.rows for one in listed) == ROWS + MORE - 200


@pytest.mark.parametrize(
    "root",
    [SCHEME, *(pytest.param(name, marks=pytest.mark.long) for name in ("folder", "memory"))],
    indirect=True,
)
def test_the_commands_take_its_address(root: Root) -> None:
    """What a root in memory has none of."""
    if isinstance(root, MemoryObjects):
        root = "file:///" + str(Path.cwd() / "root").lstrip("/")
        BanditLog.make(ROWS).write(root)
    run, cli = typer.testing.CliRunner(), _command_line()

    def command(*words: str) -> Any:
        done = run.invoke(cli, [*words, "--root", str(root), "--json"], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout.splitlines()[-1])

    rows = sum(one["rows"] for one in command("ls")["streams"])
    assert rows >= ROWS
    assert command("verify")["in_shards"] == rows
    manifest = command("freeze")["manifest"]
    trained = command("train", "--manifest", manifest)
    assert trained["rows_trained"] > 0
    assert command("evaluate", "latest", "--reward-range", "0", "1")["logs"]
    assert command("publish", "--no-gate")["version"] == 1
    assert command("train", "--seed", "5")["candidate"] != trained["candidate"]
    assert command("publish", "--no-gate")["version"] == 2
    assert command("rollback")["version"] == 3
    assert command("resume")["ended"]
    assert len(command("versions")["versions"]) == 3
    assert len(command("decisions")["decisions"]) == 3
    assert command("report")["steps"] == rows


def test_what_needs_a_local_folder_is_refused_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A collector's journal, and a follower's checkpoints; nothing is made of the address."""
    monkeypatch.setitem(opening.STORES, SCHEME, SqliteObjects)
    monkeypatch.chdir(tmp_path)
    address = f"{SCHEME}://{tmp_path / 'objects.db'}"
    cli = _command_line()
    for words in ("collect --root", "up --root", "token list --root", "pseudonym x --root"):
        done = typer.testing.CliRunner().invoke(cli, [*words.split(), address])
        assert done.exit_code == 2
        assert "expected a root in a local folder" in done.output
    for words in ("demo --root", "import log.csv --declare"):
        done = typer.testing.CliRunner().invoke(cli, [*words.split(), address])
        assert done.exit_code == 2
        assert "expected a root in a local folder" in done.output
    BanditLog.make(5).write(address)
    with pytest.raises(ValueError, match="checkpoint_dir: expected a root in a local folder"):
        follow(address, stop=lambda: True)
    assert [path.name for path in tmp_path.iterdir()] == ["objects.db"]
