"""A frozen data set and the jobs on it: the same inputs give one file and one effect."""

import json
import threading
from dataclasses import replace

import pytest

from policy.algorithms.bandit import BanditConfig
from policy.data.freeze import FrozenDataError, NothingToFreeze, freeze, load_frozen
from policy.data.run_once import DataIncomplete, once
from policy.inference.weight_store import WeightStore
from policy.judging.gate import _key, evaluate_once, publish
from policy.judging.settings import EvaluationSettings, Gate
from policy.training.settings import TrainSettings
from policy.training.train import train_once
from storage.errors import NewerFormat, NothingYet
from storage.objects.memory import MemoryObjects
from storage.shards.shard import read_shard
from storage.system.files import FileLock

CONFIG = BanditConfig(objective="ips", epochs=2)
OPEN = None  # without a gate
CLOSED = Gate(min_ess=1e9)


def shards(root):
    return sorted((root / "shards").glob("*/*.parquet"))


def records(root, job):
    return sorted((root / "manifests").glob(f"*.{job}-*.json"))


# --- freezing --------------------------------------------------------------------------------


def test_a_manifest_names_every_ordinal_at_rest(bandit_log, tmp_path):
    """Ranges and rows are those of the shards; what was written reads back equal."""
    bandit_log(300).write(tmp_path, shard_rows=100)
    frozen = freeze(tmp_path, clock=lambda: 5.0)
    stream = shards(tmp_path)[0].parent.name
    assert frozen.streams == {stream: [[0, 299]]}
    assert (frozen.rows, frozen.parts, frozen.created) == (300, 300, 5_000_000)
    assert frozen.path == tmp_path / "manifests" / f"{frozen.hash}.json"
    assert not frozen.unchanged
    assert load_frozen(frozen.path) == frozen
    json.dumps(frozen.to_dict(), allow_nan=False)


def test_the_same_shards_give_the_same_file(bandit_log, tmp_path):
    """The file does not depend on the cuts of the shards or the time, and is written once."""
    log = bandit_log(90)
    log.write(tmp_path / "one", shard_rows=90)
    log.write(tmp_path / "two", shard_rows=20)
    first = freeze(tmp_path / "one", clock=lambda: 5.0)
    content = first.path.read_bytes()
    again = freeze(tmp_path / "one", clock=lambda: 9.0)
    assert again.unchanged
    assert (again.hash, again.created) == (first.hash, 5_000_000)
    assert first.path.read_bytes() == content
    assert freeze(tmp_path / "two").hash == first.hash


def test_a_new_shard_gives_a_new_manifest(bandit_log, tmp_path):
    """The old manifest is unchanged."""
    bandit_log(80).write(tmp_path, shard_rows=40)
    spare = shards(tmp_path)[1]
    content = spare.read_bytes()
    spare.unlink()
    first = freeze(tmp_path)
    spare.write_bytes(content)
    second = freeze(tmp_path)
    assert second.hash != first.hash
    assert [one.rows for one in (load_frozen(first.path), second)] == [40, 80]


def test_later_shards_do_not_change_a_manifest_up_to_an_ordinal(bandit_log, tmp_path):
    """The ordinals of an event give one manifest, however late it is made."""
    bandit_log(80).write(tmp_path, shard_rows=40)
    (stream,) = {path.parent.name for path in shards(tmp_path)}
    early = freeze(tmp_path, up_to={stream: 39})
    assert (early.streams, early.rows) == ({stream: [[0, 39]]}, 40)
    assert freeze(tmp_path, up_to={stream: 39, "other": 7}).unchanged
    assert freeze(tmp_path, up_to={stream: 20}).streams == {stream: [[0, 20]]}
    with pytest.raises(NothingYet):
        freeze(tmp_path, up_to={"other": 7})


def test_only_whole_shards_are_frozen(bandit_log, tmp_path):
    """A temporary file is ignored; a shard with a damaged footer is left out and named."""
    bandit_log(80).write(tmp_path, shard_rows=40)
    whole, cut = shards(tmp_path)
    whole.with_name(".000000000080-000000000119-1.tmp").write_bytes(whole.read_bytes())
    cut.write_bytes(cut.read_bytes()[:-9])
    frozen = freeze(tmp_path)
    assert list(frozen.streams.values()) == [[[0, 39]]]
    assert list(frozen.skipped) == [f"{cut.parent.name}/{cut.name}"]


def test_nothing_to_freeze_says_where_it_looked(tmp_path):
    """An empty root raises an error with the path, and no manifest is written."""
    with pytest.raises(NothingYet, match="shards"):
        freeze(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_log_with_only_damaged_shards_is_not_frozen(bandit_log, tmp_path):
    """The error is final, because another try would find them damaged again."""
    bandit_log(40).write(tmp_path, shard_rows=40)
    (only,) = shards(tmp_path)
    only.write_bytes(only.read_bytes()[:-9])
    with pytest.raises(NothingToFreeze, match="1 damaged"):
        freeze(tmp_path)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda d: d | {"format": 0},
        lambda d: d | {"streams": {s: [[0, 3]] for s in d["streams"]}},
        lambda d: d | {"streams": {"../x": [[0, 3]]}},
        lambda d: {},
        lambda d: [],
    ],
)
def test_a_spoilt_manifest_is_refused(bandit_log, tmp_path, spoil):
    """The error names a file whose content does not fit its name and hash."""
    bandit_log(20).write(tmp_path)
    path = freeze(tmp_path).path
    path.write_text(json.dumps(spoil(json.loads(path.read_text()))))
    with pytest.raises(FrozenDataError, match=str(path)):
        load_frozen(path)


def test_a_later_builds_manifest_is_refused(bandit_log, tmp_path):
    """It is no damage: the error names the file and what to do."""
    bandit_log(20).write(tmp_path)
    path = freeze(tmp_path).path
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 2}))
    with pytest.raises(NewerFormat, match=f"{path}: format: expected 1, got 2: a later release"):
        load_frozen(path)


# --- jobs, each done once --------------------------------------------------------------------


def test_a_record_of_the_first_release_names_the_same_job():
    """Its settings were these; a setting that came later counts only if it is given."""
    judged = {"gamma": 1.0, "confidence": 0.95, "reward_range": None, "min_ess": 100.0}
    judged |= {"cluster": None, "since": None, "until": None}
    informing = {"split": "held_out", "estimators": None, "interval": "student", "seed": 0}
    assert _key(EvaluationSettings(retry_for=1.0)) == {**judged, **informing}
    assert _key(Gate()) == judged
    assert _key(Gate(margin="1%", alpha_budget=0.1)).keys() - judged == {"margin", "alpha_budget"}


def test_training_twice_trains_once(bandit_log, tmp_path):
    """The second run finds the candidate; other settings are another run."""
    bandit_log(200).write(tmp_path)
    frozen = freeze(tmp_path)
    first = train_once(tmp_path, "default", CONFIG, frozen, settings=TrainSettings(seed=1))
    (record,) = records(tmp_path, "train")
    written = record.stat().st_mtime_ns
    again = train_once(tmp_path, "default", CONFIG, frozen, settings=TrainSettings(seed=1))
    assert (first["unchanged"], again["unchanged"]) == (False, True)
    assert again == first | {"unchanged": True}
    assert record.stat().st_mtime_ns == written
    assert record.name.startswith(f"{frozen.hash}.train-")
    other = train_once(tmp_path, "default", CONFIG, frozen, settings=TrainSettings(seed=2))
    assert (other["unchanged"], len(records(tmp_path, "train"))) == (False, 2)


def test_training_reads_the_manifest_alone(bandit_log, tmp_path):
    """Shards that came later change nothing about a frozen run."""
    bandit_log(200).write(tmp_path, shard_rows=100)
    late = shards(tmp_path)[1]
    content = late.read_bytes()
    late.unlink()
    frozen = freeze(tmp_path)
    late.write_bytes(content)
    done = train_once(tmp_path, "default", CONFIG, frozen)
    assert done["rows_read"] + done["rows_held_out"] == 100
    judged = evaluate_once(tmp_path, "default", done["candidate"], frozen)
    assert judged["logs"][0]["episodes"] == done["rows_held_out"]


def test_a_lost_candidate_is_trained_again(bandit_log, tmp_path):
    """A record counts only while its candidate is there."""
    bandit_log(100).write(tmp_path)
    frozen = freeze(tmp_path)
    first = train_once(tmp_path, "default", CONFIG, frozen)
    folder = WeightStore(tmp_path, "default").directory / "candidates" / first["candidate"]
    (folder / "weights.safetensors").write_bytes(b"gone")
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    again = train_once(tmp_path, "default", CONFIG, frozen)
    assert again == first


def test_a_damaged_shard_is_no_success(bandit_log, tmp_path):
    """An unreadable shard is an error that a retry may resolve, and is not recorded."""
    bandit_log(100).write(tmp_path, shard_rows=50)
    frozen = freeze(tmp_path)
    path = shards(tmp_path)[1]
    content = path.read_bytes()
    path.write_bytes(content[:900] + bytes(8) + content[908:])
    with pytest.raises(DataIncomplete, match=path.name):
        train_once(tmp_path, "default", CONFIG, frozen)
    assert records(tmp_path, "train") == []
    path.write_bytes(content)
    assert read_shard(path).num_rows == 50
    assert not train_once(tmp_path, "default", CONFIG, frozen)["unchanged"]


def test_of_two_at_once_the_second_waits_and_does_nothing(bandit_log, tmp_path):
    """The lock is held while a job works, so that no second trainer runs beside the first."""
    bandit_log(100).write(tmp_path)
    frozen = freeze(tmp_path)
    inside, locked = [], []
    answers = []

    def watch(what, done, total):
        inside.append(what)
        (lock,) = (tmp_path / "manifests").glob("*.lock")
        locked.append(FileLock(lock).acquire(blocking=False))

    def run():
        answers.append(train_once(tmp_path, "default", CONFIG, frozen, on_progress=watch))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert inside
    assert not any(locked)
    assert sorted(answer["unchanged"] for answer in answers) == [False, True]
    assert answers[0]["candidate"] == answers[1]["candidate"]


def test_evaluating_twice_judges_once(bandit_log, tmp_path):
    """The answer is stored; another setting gives another answer."""
    bandit_log(200).write(tmp_path)
    frozen = freeze(tmp_path)
    digest = train_once(tmp_path, "default", CONFIG, frozen)["candidate"]
    first = evaluate_once(
        tmp_path, "default", digest, frozen, settings=EvaluationSettings(gamma=0.9)
    )
    again = evaluate_once(
        tmp_path, "default", digest[:12], frozen, settings=EvaluationSettings(gamma=0.9)
    )
    assert again == first | {"unchanged": True}
    assert not evaluate_once(tmp_path, "default", digest, frozen)["unchanged"]
    assert len(records(tmp_path, "evaluate")) == 2


def test_publishing_twice_is_one_version(bandit_log, tmp_path):
    """The second answer is the first; version and generation stay."""
    bandit_log(200).write(tmp_path)
    frozen, store = freeze(tmp_path), WeightStore(tmp_path, "default")
    digest = train_once(tmp_path, "default", CONFIG, frozen)["candidate"]
    first = publish(tmp_path, "default", digest, OPEN, frozen=frozen)
    again = publish(tmp_path, "default", digest, OPEN, frozen=frozen)
    assert (first["published"], first["version"], first["generation"]) == (True, 1, 1)
    assert again == first | {"unchanged": True}
    assert (store.versions(), store.live().generation) == ([1], 1)


def test_a_late_retry_does_not_bring_back_an_old_version(bandit_log, tmp_path):
    """A decision that was followed by another version does not apply again."""
    bandit_log(200).write(tmp_path)
    frozen, store = freeze(tmp_path), WeightStore(tmp_path, "default")
    old, new = (
        train_once(tmp_path, "default", CONFIG, frozen, settings=TrainSettings(seed=seed))[
            "candidate"
        ]
        for seed in (1, 2)
    )
    for digest in (old, new, old):
        answer = publish(tmp_path, "default", digest, OPEN, frozen=frozen)
    assert (answer["unchanged"], answer["version"]) == (True, 1)
    assert store.live().version == 2


def test_a_closed_gate_is_recorded_and_publishes_nothing(bandit_log, tmp_path):
    """The reasons are stored, a second run does not judge again, and another gate may open."""
    bandit_log(200).write(tmp_path)
    frozen, store = freeze(tmp_path), WeightStore(tmp_path, "default")
    digest = train_once(tmp_path, "default", CONFIG, frozen)["candidate"]
    first = publish(tmp_path, "default", digest, CLOSED, frozen=frozen)
    assert not first["published"]
    assert "effective sample size" in first["gate"]["reasons"][0]
    (record,) = records(tmp_path, "publish")
    assert json.loads(record.read_text())["gate"] == first["gate"]
    assert publish(tmp_path, "default", digest, CLOSED, frozen=frozen)["unchanged"]
    assert store.live() is None
    assert publish(tmp_path, "default", digest, OPEN, frozen=frozen)["published"]


def test_a_job_waits_however_long_another_one_works(bandit_log, tmp_path):
    """A lock that is refused after a while is asked for again."""

    class Held(MemoryObjects):
        refused = 0

        def exclusive(self, name):
            if self.refused < 3:
                self.refused += 1
                raise BlockingIOError(f"{name} is held")
            return super().exclusive(name)

    bandit_log(5).write(tmp_path)
    frozen = replace(freeze(tmp_path), folder=Held())
    done = once(frozen, "job", {}, lambda: {"done": True})
    assert (done["done"], done["unchanged"]) == (True, False)
    assert once(frozen, "job", {}, lambda: {"done": False})["unchanged"]
