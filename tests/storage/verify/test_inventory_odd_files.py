"""Other files under `shards/` stop nothing, are never read as shards, and `verify` lists them."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from storage.reading.shard_reader import ShardReader
from storage.shards.names import next_ordinals, remove_leftovers
from storage.shards.shard import find_shard
from storage.shards.unrecorded_shards import later_shards
from storage.verify.audit import VerifyReport
from storage.verify.inventory import list_streams
from tests.collector_process import CollectorProcess, declare, shard_rows
from tests.headrace.command import answer, headrace
from tests.storage.verify.test_audit import batch, kinds, shards, verified

STEPS = 3


def odd(number: int) -> str:
    """A shard's name far beyond what was written."""
    return f"{number:012}-{number:012}-{'0' * 16}.parquet"


def circle(path: Path) -> None:
    path.symlink_to(path.name)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def link_to_folder(path: Path) -> None:
    path.symlink_to("/tmp")


def link_to_nothing(path: Path) -> None:
    path.symlink_to("nowhere")


ODD: tuple[Callable[[Path], None], ...] = (
    Path.mkdir,
    os.mkfifo,
    device,
    link_to_folder,
    link_to_nothing,
    circle,
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("whole") / "root"
    declare(root, seal_seconds=0.01)
    with CollectorProcess(root) as collector:
        collector.post("/v1/events", batch("a", STEPS, end=True))
        collector.settle(STEPS)
        collector.post("/v1/events", batch("b", STEPS, end=True))
        assert collector.stop() == 0
    return root


@pytest.fixture
def root(whole: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "root"
    shutil.copytree(whole, copy)
    return copy


def stream(root: Path) -> Path:
    return shards(root)[0].parent


def found(report: VerifyReport) -> list[tuple[str, str]]:
    return [(finding.kind, finding.where) for finding in report.findings]


@pytest.mark.parametrize("make", ODD)
def test_what_has_a_shards_name_and_is_no_file_is_damage(
    root: Path, make: Callable[[Path], None]
) -> None:
    """An entry that has a shard's name and is no file is one finding; it is not opened. Readers
    ignore it, except a link that leads nowhere, which may be a shard."""
    path = stream(root) / odd(950)
    make(path)
    report = verified(root)
    assert found(report) == [("damaged", f"shards/{stream(root).name}/{path.name}")]
    (listed,) = list_streams(root, {}).streams
    assert (listed.unreadable, listed.rows) == (1, 2 * STEPS)
    assert next_ordinals(root / "shards", stream(root).name.partition("-")[0]) == {
        stream(root).name: 2
    }
    assert find_shard(root / "shards", stream(root).name, 950, 950) is None
    read, ends = later_shards(root / "shards", {stream(root).name: 0}, 0)
    assert (len(read), ends) == (len(shards(root)) - 1, {stream(root).name: 2})
    with ShardReader(root, batch_size=2 * STEPS) as reader:
        assert [rows.count for rows in reader] == [2 * STEPS]
        found_by_reader = [str(path)] if make in (link_to_nothing, circle) else []
        assert (list(reader.stats.excluded_shards), reader.stats.excluded) == (found_by_reader, {})
    assert verified(root, quarantine=True).quarantined
    assert verified(root).ok


def test_a_collector_among_odd_names_starts_and_is_the_same(root: Path) -> None:
    """No ordinal is read from odd names; otherwise a collector would take its journal for a
    backup."""
    for number, make in enumerate(ODD, 950):
        make(stream(root) / odd(number))
    (stream(root) / f".{0:012}-{0:012}-1.tmp").mkdir()
    (root / "shards" / f"{stream(root).name.partition('-')[0]}-file").touch()
    with CollectorProcess(root) as collector:
        collector.post("/v1/events", batch("c", STEPS, end=True))
        collector.settle(3 * STEPS)
        assert kinds(verified(root)) == ["damaged"]
        assert headrace("ls", "--root", root).returncode == 0
        assert collector.stop() == 0
    report = verified(root)
    assert found(report) == [
        ("damaged", f"shards/{stream(root).name}/{odd(n)}") for n in range(950, 950 + len(ODD))
    ]
    assert report.acknowledged == report.in_shards == 3 * STEPS


def test_names_that_are_no_text_are_told_as_text(root: Path) -> None:
    """No byte of a name acts as a terminal's control code, or stops a listing."""
    strange = os.fsencode(root / "shards") + b"/\xfe-x"
    os.mkdir(strange)
    shutil.copyfile(shards(root)[0], os.path.join(strange, os.fsencode(odd(0))))
    (stream(root) / "a\nb\x1b[31m.parquet").touch()
    (stream(root) / "c\nd").touch()
    listed, checked = headrace("ls", "--root", root), headrace("verify", "--root", root)
    assert (listed.returncode, checked.returncode) == (0, 1)
    assert r"\udcfe-x" in listed.stdout
    name = f"shards/{stream(root).name}"
    lines = checked.stdout.splitlines()
    assert rf"note: {name}/c\nd: not a file of ours" in lines
    (stray,) = (text for text in lines if text.startswith("stray: "))
    assert stray.startswith(rf"stray: {name}/a\nb\x1b[31m.parquet: ")
    (damaged,) = (text for text in lines if text.startswith("damaged: "))
    assert damaged.startswith(rf"damaged: shards/\udcfe-x/{odd(0)}: expected digest ")
    for command in ("ls", "verify"):
        assert answer(headrace(command, "--root", root, "--json"))["streams"]


def test_folders_without_end_are_looked_through(root: Path) -> None:
    """Deeper than Python's stack, and than any path can name."""
    place = os.open(root / "shards", os.O_DIRECTORY)
    for _ in range(2_500):
        os.mkdir("d", dir_fd=place)
        inner = os.open("d", os.O_DIRECTORY, dir_fd=place)
        os.close(place)
        place = inner
    os.close(place)
    try:
        bottom = root / "shards" / "/".join(["d"] * 1_200) / "rows.parquet"
        bottom.touch()
        report = verified(root)
        assert found(report) == [("stray", bottom.relative_to(root).as_posix())]
        assert headrace("verify", "--root", root).returncode == 1
        bottom.unlink()
        assert verified(root).ok
    finally:  # pytest would remove it recursively
        subprocess.run(["rm", "-r", root / "shards" / "d"], check=True)


def test_a_half_written_name_that_is_a_folder_stays(root: Path) -> None:
    """A writer that cleans up after a killed one is not stopped by it."""
    left = stream(root) / f".{0:012}-{0:012}-1.tmp"
    left.mkdir()
    assert remove_leftovers(root / "shards", stream(root).name.partition("-")[0]) == []
    assert left.is_dir()


def test_a_folder_in_the_place_of_a_shard_does_not_stand_for_its_rows(root: Path) -> None:
    """The rows of the shard are lost, also once the folder was moved to the quarantine."""
    shard = shards(root)[0]
    shard.unlink()
    shard.mkdir()
    assert kinds(verified(root, quarantine=True)) == ["count", "damaged"]
    assert kinds(verified(root)) == ["count", "missing"]


@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize(
    "where", ["loose.parquet", "deep/down/rows.parquet", "{stream}/sub/{shard}", "{shard}"]
)
def test_rows_that_other_tools_would_read_are_strays(root: Path, where: str, live: bool) -> None:
    """`shards/**/*.parquet` is what people give to duckdb, polars or pandas."""
    shard = shards(root)[0]
    place = root / "shards" / where.format(stream=shard.parent.name, shard=shard.name)
    place.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(shard, place)
    assert place in root.glob("shards/**/*.parquet")
    if live:
        with CollectorProcess(root):
            report = verified(root)
    else:
        report = verified(root)
    assert found(report) == [("stray", place.relative_to(root).as_posix())]
    assert len(shard_rows(root)) == 2 * STEPS


def test_a_link_to_a_folder_is_a_stray_and_not_followed(root: Path) -> None:
    """Below a stream; a stream may itself be a link, to another disk."""
    (stream(root) / "more").symlink_to(root)
    (root / "shards" / "notes").mkdir()
    (root / "shards" / "notes" / "readme").touch()
    report = verified(root)
    assert found(report) == [("stray", f"shards/{stream(root).name}/more")]
    assert report.notes == ("shards/notes/readme: not a file of ours",)
    (stream(root) / "more").unlink()
    folder, elsewhere = stream(root), root / "elsewhere"
    folder.rename(elsewhere)
    folder.symlink_to(elsewhere)
    assert verified(root).ok
