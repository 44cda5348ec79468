"""A damaged file costs a follower the content of that file, and no more."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from policy.inference.weight_store import WeightStore
from policy.training.checkpoint_files import CheckpointFiles
from storage.errors import WeightsDamaged
from storage.weights.off_chain import off_chain
from tests.policy.training.live_log import claimed, declare, part, rows_of, run, write


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two updates are live as version 3, and there are rows for more."""
    declare(tmp_path)
    write(tmp_path, *(part(i) for i in range(40)))
    run(tmp_path, 2)
    return tmp_path


def flip(path: Path, at: int = 60) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(bytes(data))


def checkpoints(root: Path) -> list[Path]:
    """The latest first."""
    return CheckpointFiles(root / "weights" / "default" / "checkpoints", 0).found()


def version(root: Path, number: int) -> Path:
    return root / "weights" / "default" / "versions" / str(number)


def lose_checkpoints(root: Path) -> None:
    for path in checkpoints(root):
        flip(path)


def test_counts_go_on_with_the_live_weights(root: Path) -> None:
    """Without a checkpoint, `rows_trained` of the next version counts the rows in its lineage."""
    lose_checkpoints(root)
    result, _ = run(root, 1)
    store = WeightStore(root, "default")
    counts = [store.manifest(number).metrics["rows_trained"] for number in store.versions()]
    assert counts == [0, 100, 200, 300]
    assert len(claimed(root, 4)) == result.rows_trained == result.rows_read == 300


@pytest.mark.parametrize("file", ["weights.safetensors", "lineage.json", "manifest.json"])
def test_the_version_before_is_taken_where_the_live_one_is_damaged_too(
    root: Path, file: str
) -> None:
    """The damaged version is marked, and the rows of its update are trained on again."""
    lose_checkpoints(root)
    flip(version(root, 3) / file)
    result, _ = run(root, 2)
    store = WeightStore(root, "default")
    assert (result.version, result.rows_trained) == (5, 300)
    assert claimed(root, 4) == rows_of(root, range(20))
    assert (off_chain(store.files, 3) or "").startswith("it is damaged")


def test_with_no_version_left_the_error_says_how_to_begin_anew(root: Path) -> None:
    """A trainer never starts anew by itself: the live version may have cost months."""
    lose_checkpoints(root)
    for number in (1, 2, 3):
        flip(version(root, number) / "manifest.json")
    with pytest.raises(
        WeightsDamaged, match=r"train --follow --no-resume.* starts with new weights"
    ):
        run(root, 1)
    result, _ = run(root, 1, resume=False)
    assert result.version == 5  # 4 are the new initial weights


@pytest.mark.parametrize("both", [False, True])
def test_a_damaged_live_pointer_is_mended(root: Path, both: bool) -> None:
    """It is restored from its copy; with both damaged, publishing waits for `resume`."""
    store = WeightStore(root, "default")
    flip(store.directory / "live.json")
    if both:
        flip(store.directory / "live.copy.json")
    result, _ = run(root, 1)
    assert store.pointer_damage() == {}
    assert (result.version, result.updates) == (3 if both else 4, 3)
    if both:
        store.resume()
        assert run(root, 1)[0].version > 3


def test_a_damaged_manifest_of_what_is_live_is_replaced_by_the_next_update(root: Path) -> None:
    """The checkpoint is intact, so no row is trained on twice."""
    flip(version(root, 3) / "manifest.json")
    result, _ = run(root, 2)
    assert (result.version, result.rows_trained) == (5, 400)
    assert claimed(root, 5) == rows_of(root, range(40))


def test_a_damaged_manifest_of_long_ago_stops_no_pruning(root: Path) -> None:
    """It stays for `verify` to name; other old versions are removed."""
    write(root, *(part(40 + i) for i in range(40)))
    flip(version(root, 1) / "manifest.json")
    result, _ = run(root, 6, keep_versions=2, checkpoint_every=1)
    assert result.version == 9
    assert WeightStore(root, "default").versions() == [1, 8, 9]


def _directory(path: Path) -> None:
    path.mkdir()


@pytest.mark.parametrize(
    "put", [_directory, os.mkfifo, lambda path: path.symlink_to("nowhere"), Path.touch]
)
def test_what_is_no_file_in_a_checkpoint_s_place_is_set_aside(
    root: Path, put: Callable[[Path], None]
) -> None:
    """For a folder, a FIFO, a dangling link or an empty file, the checkpoint before is used."""
    latest = checkpoints(root)[0]
    latest.unlink()
    put(latest)
    result, _ = run(root, 1)
    assert (result.version, result.updates) == (4, 2)
    assert os.path.lexists(latest.with_name(f"{latest.name}.damaged-1"))


@pytest.mark.parametrize("resume", [True, False])
def test_a_folder_in_the_place_of_an_old_checkpoint_is_set_aside(root: Path, resume: bool) -> None:
    """It is removed with the checkpoints that are no longer needed, and nothing waits for that."""
    _, before = checkpoints(root)
    before.unlink()
    before.mkdir()
    result, _ = run(root, 2, resume=resume, checkpoint_every=1)
    assert result.updates == (4 if resume else 2)
    assert before.with_name(f"{before.name}.damaged-1").is_dir()


def test_a_stop_ends_a_wait_for_a_lease_that_cannot_be_written(tmp_path: Path) -> None:
    """The job ends as any stopped job, although its disk refuses the lease."""
    declare(tmp_path)
    (tmp_path / "weights" / "default").mkdir(parents=True)
    (tmp_path / "weights" / "default" / "leases").write_text("in the way")
    result, _ = run(tmp_path, 1, stop_after=3)
    assert (result.ended, result.version) == ("stopped", -1)
