"""One damaged file under a root: no command ends without its name, and what is whole is used."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from ingest.access.key_files import kept_key, load_tokens
from ingest.collector.address_file import ADDRESS, LiveAddress, say_address
from policy.algorithms.learner import _read_checkpoint
from policy.data.freeze import load_frozen
from policy.data.run_once import _read
from policy.inference.weight_store import WeightStore
from policy.training.train import declared_spec
from storage.declarations.dropped_steps import dropped_steps
from storage.declarations.held_policies import held_version
from storage.declarations.policy_files import load_declarations
from storage.errors import StorageError
from storage.journal.database import HighWater
from storage.objects.opening import objects_at
from storage.reading.shard_reader import read_position
from storage.weights.decisions import Decisions, load_decisions
from storage.weights.files import PolicyFiles
from storage.weights.highest_numbers import HighestFence, HighestNumbers
from storage.weights.lease import LeaseRecord
from storage.weights.off_chain import off_chain
from storage.weights.retention import PrunedVersions
from storage.weights.served import ServedRecords, ever_served
from storage.weights.store import WeightFolder
from tests.headrace.command import answer, headrace
from tests.headrace.damaged_root import (
    COLLECT,
    DAMAGE,
    EPISODES,
    FOLLOW,
    OPENED,
    STEPS,
    flip,
    folder,
    make_root,
    run,
)
from tests.policy.training import live_log
from tests.storage.shards.test_footers import changed, every, in_name

BAD_STEPS = 20 * STEPS
SOUND_STEPS = EPISODES * STEPS - BAD_STEPS


def read_record(path: Path) -> object:
    return _read(objects_at(path.parent), path.name)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_root(tmp_path_factory.mktemp("whole") / "root")


@pytest.fixture
def fresh(whole: Path, tmp_path: Path) -> Iterator[Callable[[], Path]]:
    """A function that gives a new copy of the root."""
    copy = tmp_path / "root"

    def made() -> Path:
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(whole, copy)
        return copy

    yield made
    shutil.rmtree(copy, ignore_errors=True)


def found(root: Path, pattern: str) -> Path:
    """The first of the files."""
    return min(root.glob(pattern))


# --- shards --------------------------------------------------------------------------------------


def shard(root: Path) -> Path:
    """The second of three."""
    return sorted(root.glob("shards/*/*.parquet"))[1]


def require_the_rest(root: Path, bad: Path) -> None:
    """Every command that reads shards uses all rows of the others, and names the damaged one."""
    trained = headrace("train", "--algorithm", "cql", "--epochs", "1", "--evaluation-share", "0",
                       "--root", root, "--json")  # fmt: skip
    assert answer(trained)["rows_trained"] == SOUND_STEPS
    assert list(answer(trained)["skipped"]) == [str(bad)]
    judged = headrace("evaluate", "--split", "all", "--root", root, "--json")
    (log,) = answer(judged)["logs"]
    assert log["episodes"] + sum(log["excluded"].values()) == SOUND_STEPS // STEPS
    assert list(log["skipped"]) == [str(bad)]
    page = root / "report.html"
    report = headrace("report", "--output", page, "--root", root, "--json")
    assert answer(report)["steps"] == SOUND_STEPS
    assert bad.name in page.read_text()
    verified = headrace("verify", "--root", root, "--json")
    assert [one["where"] for one in answer(verified)["findings"] if one["kind"] == "damaged"] == [
        bad.relative_to(root).as_posix()
    ]
    (listed,) = answer(headrace("ls", "--root", root, "--json"))["streams"]
    assert (listed["rows"], listed["unreadable"]) in (
        (SOUND_STEPS + BAD_STEPS, 0),
        (SOUND_STEPS, 1),
    )
    half = SOUND_STEPS // 2
    result, _ = live_log.run(root, 3, stop_after=30, resume=False, steps_per_update=half)
    assert list(result.excluded_shards) == [str(bad)]
    assert result.rows_read == SOUND_STEPS


def _shard_kinds(content: bytes) -> list[tuple[int, int]]:
    """What Arrow raised other errors for than its own: no UTF-8, no such column."""
    return [in_name(content, "obs"), in_name(content, "policy_id", 0), in_name(content, "ts", 0)]


def test_a_damaged_footer_costs_its_shard_alone(fresh: Callable[[], Path]) -> None:
    """A column's name that is no UTF-8, through each command that reads shards."""
    root = fresh()
    path = shard(root)
    content = path.read_bytes()
    path.write_bytes(changed(content, in_name(content, "obs")))
    require_the_rest(root, path)


@pytest.mark.long
def test_any_damaged_footer_costs_its_shard_alone(fresh: Callable[[], Path]) -> None:
    """One of each kind of error, and 20 drawn from each byte x 0x00, 0x80, 0xff."""
    content = shard(fresh()).read_bytes()
    for damage in [*_shard_kinds(content), *Random(2).sample(every(content), 20)]:
        root = fresh()
        shard(root).write_bytes(changed(content, damage))
        require_the_rest(root, shard(root))


# --- every other file ----------------------------------------------------------------------------


def require_named(root: Path, path: Path, command: str) -> None:
    """The command ends well, or with an error that has the file's path, and never by a bug."""
    status, text = run(command, root)
    assert "Traceback" not in text
    place = path.relative_to(root).as_posix()
    assert status == 0 or place in text, (status, text)
    goes_on = command in (FOLLOW, COLLECT) and place.split("/")[0] not in MUST_BE_WHOLE
    assert status == 0 or not goes_on, text


MUST_BE_WHOLE = ("policies", "keys")
"""What a collector cannot start without; other damage does not stop learning or logging."""


@pytest.mark.parametrize("pattern", OPENED)
def test_a_flipped_bit_is_survived_or_named(fresh: Callable[[], Path], pattern: str) -> None:
    """By the first command that opens the file."""
    root = fresh()
    path = found(root, pattern)
    flip(path)
    require_named(root, path, OPENED[pattern][0])


@pytest.mark.long
@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("pattern", OPENED)
def test_any_damage_is_survived_or_named(
    fresh: Callable[[], Path], pattern: str, damage: Callable[[Path], None]
) -> None:
    """By each command that opens the file."""
    for command in OPENED[pattern]:
        root = fresh()
        path = found(root, pattern)
        damage(path)
        require_named(root, path, command)


def test_no_kind_of_file_is_forgotten(whole: Path) -> None:
    """Each file under the root has its commands, or is a lock, a shard, or only decoded."""

    def kinds(paths: Iterable[Path]) -> set[str]:
        places = (path.relative_to(whole).as_posix() for path in paths if path.is_file())
        return {re.sub(r"[0-9a-f]{12,}|\d+", "N", place) for place in places}

    others = kinds(whole.rglob("*")) - kinds(p for one in OPENED for p in whole.glob(one))
    assert {one for one in others if not one.endswith(("lock", ".parquet"))} == {
        "journal/journal.db",  # tests/faults/damage.py
        "readers/mine.json",
    }


# --- decoders ------------------------------------------------------------------------------------

Decode = Callable[[Path], Any]


def _policy(path: Path) -> object:
    return [declared_spec(path.parents[1], name) for name in load_declarations(path.parents[1])]


def _decisions(path: Path) -> Decisions:
    decided = load_decisions(path.parents[2], "default")
    assert not decided.damaged or list(decided.damaged) == [str(path)]
    return decided


def _version(path: Path) -> object:
    store, number = WeightFolder(path.parents[4], "default"), int(path.parent.name)
    return store.load(number), store.lineage(number), store.untrained(number)


DECODERS: dict[str, Decode] = {
    "policies/*.json": _policy,
    "decisions/default/*.json": _decisions,
    "dropped/*.json": lambda path: dropped_steps(path.parents[1]),
    "flow/*.json": lambda path: held_version(path.parents[1], "default"),
    "keys/tokens.json": lambda path: load_tokens(path.parents[1]),
    "keys/redaction.key": lambda path: kept_key(path.parents[1]),
    "manifests/????????????????.json": load_frozen,
    "manifests/*.train-*.json": read_record,
    "numbers/*.json": lambda path: HighestNumbers(PolicyFiles(path.parents[1], "default")).read(),
    "numbers/*.lease": lambda path: HighestFence(PolicyFiles(path.parents[1], "default")).read(),
    "readers/mine.json": lambda path: read_position(path.parents[1], "mine"),
    "weights/default/candidates/*/candidate.json": lambda path: WeightStore(
        path.parents[4], "default"
    ).candidate(path.parent.name),
    "weights/default/versions/4/manifest.json": _version,
    "weights/default/versions/4/weights.safetensors": _version,
    "weights/default/versions/4/lineage.json": _version,
    "weights/default/versions/*/off_chain.json": lambda path: off_chain(
        PolicyFiles(path.parents[4], "default"), int(path.parent.name)
    ),
    "weights/default/pruned.jsonl": lambda path: PrunedVersions(
        PolicyFiles(path.parents[2], "default")
    ).read(),
    "weights/default/checkpoints/follow.1.safetensors": _read_checkpoint,
    "weights/default/leases/1.json": lambda path: LeaseRecord.read(
        PolicyFiles(path.parents[3], "default"), 1
    ),
    "weights/default/live.json": lambda path: WeightFolder(path.parents[2], "default").live(),
    "weights/default/served/*.json": lambda path: ever_served(
        ServedRecords(PolicyFiles(path.parents[3], "default")).read()
    ),
    "weights/default/store.json": lambda path: WeightFolder(path.parents[2], "default").store_id,
}
VALUES = (0x00, 0x80, 0xFF, ord("x"))
ODD = (b"", b"[]", b"null", b"{}", b"5", b'"x"', b"[" * 100_000, b"\xff\xfe", b'{"a": ' * 100_000)


def require_decoded_or_named(path: Path, decode: Decode, step: int) -> None:
    """Change every `step`-th byte, cut the file, replace it by other documents and by a folder."""
    content = path.read_bytes()
    decode(path)
    bytes_changed = range(0, len(content), step)
    cases = [changed(content, (at, value)) for at in bytes_changed for value in VALUES]
    for data in [*cases, *ODD, content[: len(content) // 2]]:
        path.write_bytes(data)
        _decode_or_name(path, decode)
    folder(path)
    _decode_or_name(path, decode)


def _decode_or_name(path: Path, decode: Decode) -> None:
    refused = str(path)
    try:
        decode(path)
    except (StorageError, ValueError, OSError) as error:
        refused = str(error)
    assert path.name in refused


@pytest.mark.parametrize("pattern", DECODERS)
def test_a_decoder_names_what_it_refuses(fresh: Callable[[], Path], pattern: str) -> None:
    """Bytes with other values, and documents of another form: decoded, or named."""
    path = found(fresh(), pattern)
    require_decoded_or_named(path, DECODERS[pattern], 1 + path.stat().st_size // 50)


@pytest.mark.long
@pytest.mark.parametrize("pattern", DECODERS)
def test_a_decoder_names_whatever_byte_it_refuses(fresh: Callable[[], Path], pattern: str) -> None:
    """Each byte with other values."""
    require_decoded_or_named(found(fresh(), pattern), DECODERS[pattern], 1)


def test_a_damaged_address_is_an_address_or_none(tmp_path: Path) -> None:
    """Each byte of a locked file with other values; none leaves the file open."""
    lock = say_address(tmp_path, "http://127.0.0.1:8642")
    assert lock is not None
    path = tmp_path / ADDRESS
    content = path.read_bytes()
    files = len(os.listdir("/proc/self/fd"))
    with path.open("r+b", buffering=0) as file:
        for damage in [(at, value) for at in range(len(content)) for value in VALUES]:
            file.seek(0)
            file.write(changed(content, damage))
            if (live := LiveAddress.of(tmp_path)) is not None:
                live.private()
                live.close()
    assert len(os.listdir("/proc/self/fd")) == files
    lock.release()


def test_a_damaged_high_water_mark_is_0(tmp_path: Path) -> None:
    """Each byte with other values: the mark, if only its end is another one, or 0."""
    path = tmp_path / "high-water"
    mark = HighWater(path)
    mark.write(1234)
    content = path.read_bytes()
    for damage in [(at, value) for at in range(len(content)) for value in VALUES]:
        path.write_bytes(changed(content, damage))
        assert mark.read() == 0 or damage[0] == len(content) - 1
    mark.close()


@pytest.mark.parametrize(
    ("pattern", "refused"),
    [
        ("decisions/default/*.json", lambda path: not _decisions(path).known),
        ("manifests/*.train-*.json", lambda path: read_record(path) is None),
    ],
)
def test_no_other_number_is_believed(
    fresh: Callable[[], Path], pattern: str, refused: Callable[[Path], bool]
) -> None:
    """Each digit of a document of ours, replaced by another one."""
    path = found(fresh(), pattern)
    content = path.read_bytes()
    assert not refused(path)
    key = content.index(b'"sha256"')  # under another key, it would be a field without a meaning
    for at in (match.start() for match in re.finditer(rb"\d", content)):
        if key < at < key + len(b'"sha256"'):
            continue
        path.write_bytes(changed(content, (at, content[at] ^ 1)))
        assert refused(path), content[at - 20 : at + 5]


def test_a_decision_of_0_1_0_without_a_field_is_damaged(fresh: Callable[[], Path]) -> None:
    """It has no digest, so that only its fields can be checked."""
    path = found(fresh(), "decisions/default/*.json")
    document = json.loads(path.read_text())
    del document["sha256"]
    path.write_text(json.dumps(document))
    assert len(load_decisions(path.parents[2], "default").known) == 1
    path.write_text(json.dumps(document).replace("verdict", "verdicr"))
    decided = load_decisions(path.parents[2], "default")
    assert (decided.known, list(decided.damaged)) == ((), [str(path)])
