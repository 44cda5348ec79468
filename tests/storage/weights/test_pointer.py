"""The live version stays known after damage to either file, and no pin is lost."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from storage.errors import PolicyPinned
from storage.weights.manifest import Live, open_document, seal_document
from storage.weights.store import WeightFolder
from tests.storage.weights.any_weights import add, record, store_in

NAMES = ("live.json", "live.copy.json")


@pytest.fixture
def store(tmp_path: Path) -> WeightFolder:
    found = store_in(tmp_path)
    for value in (1.0, 2.0, 3.0):
        found.publish(add(found, value))
    return found


def flip(path: Path, at: int = 40) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:20])


def make_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "content").touch()


DAMAGE = [flip, cut_off, make_fifo, make_folder, Path.unlink]


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_is_live_is_known_while_one_file_is_whole(
    store: WeightFolder, damage: object, caplog: pytest.LogCaptureFixture
) -> None:
    """A damaged live pointer is read from its copy, logged in one line, and rewritten by the next
    publication."""
    live = store.live()
    assert callable(damage)
    damage(store.directory / "live.json")
    assert [store.live(), store.live()] == [live, live]
    assert caplog.text.count("continuing with version 3, generation 3") == 1
    assert list(store.pointer_damage()) == ["live.json"]
    assert store.stamp() is not None  # so that a collector that starts now looks
    assert store.publish(add(store, 4.0)).version == 4
    assert store.pointer_damage() == {}


def test_every_flipped_byte_leaves_the_same_live(store: WeightFolder) -> None:
    store.rollback(by="ada", why="bad")
    live = store.live()
    for name in NAMES:
        path = store.directory / name
        good = path.read_bytes()
        for at in range(len(good)):
            flip(path, at)
            assert store.live() == live, at
            path.write_bytes(good)


def test_both_files_are_written_anew_by_name(store: WeightFolder) -> None:
    """`mended_live` is what trainers and collectors ask; `resume` mends what nothing pins."""
    for name in NAMES:
        flip(store.directory / name)
        live = store.mended_live()
        assert (live, store.pointer_damage()) == (Live(generation=3, version=3), {})
    flip(store.directory / "live.json")
    assert store.resume() is None
    assert store.pointer_damage() == {}


def test_publishing_what_is_live_mends_the_pointer(store: WeightFolder) -> None:
    """The store has nothing else to do then."""
    flip(store.directory / "live.json")
    assert store.publish(add(store, 3.0)) == Live(generation=3, version=3)
    assert store.pointer_damage() == {}


def test_a_pin_outlives_the_damage_of_one_file(store: WeightFolder) -> None:
    store.rollback(by="ada", why="bad")
    flip(store.directory / "live.json")
    with pytest.raises(PolicyPinned, match="pinned by ada"):
        store.publish(add(store, 5.0))
    flip(store.directory / "live.json")
    pin = store.resume()
    assert pin is not None
    assert pin.by == "ada"
    assert store.publish(add(store, 5.0)).version == 5


def test_what_cannot_be_known_is_pinned(store: WeightFolder) -> None:
    """Both are damaged: what collectors were to serve is taken, without one the newest version."""
    store.promote(add(store, 4.0))  # it was never made live
    store.served.write(record(serves=2, wanted=3))
    for name in NAMES:
        flip(store.directory / name)
    live = store.live()
    assert live is not None
    assert (live.generation, live.version) == (3, 3)
    assert live == store.live()
    with pytest.raises(PolicyPinned, match=r"pinned by headrace [(]live[.]json was damaged"):
        store.publish(add(store, 5.0))
    assert store.resume() is not None
    assert store.publish(add(store, 5.0)).generation == 4


def test_the_newest_whole_version_is_taken_where_nobody_says(store: WeightFolder) -> None:
    """The newest whole version goes live under a new generation, since the one before may have been
    another version's."""
    flip(store.directory / "versions" / "3" / "manifest.json")
    for name in NAMES:
        flip(store.directory / name)
    live = store.mended_live()
    assert live is not None
    assert (live.generation, live.version) == (4, 2)
    assert live.pinned is not None
    store.resume()
    assert store.publish(add(store, 5.0)).generation == 5


def test_a_copy_that_is_behind_does_not_hide_a_pin(store: WeightFolder) -> None:
    """A rollback was killed between the two files."""
    copy = store.directory / "live.copy.json"
    before = copy.read_bytes()
    store.rollback(by="ada", why="bad")
    copy.write_bytes(before)
    flip(store.directory / "live.json")
    live = store.live()
    assert live is not None
    assert live.pinned is not None
    assert live.generation > 4


def test_a_copy_that_is_behind_is_brought_up_to_date(store: WeightFolder) -> None:
    """A missing copy of the live pointer is written."""
    copy = store.directory / "live.copy.json"
    copy.unlink()
    assert store.pointer_damage() == {}
    assert store.live() == Live(generation=3, version=3)
    store.mended_live()
    assert copy.read_bytes() == (store.directory / "live.json").read_bytes()


def test_the_pointer_is_a_sealed_document(store: WeightFolder) -> None:
    """The live pointer's document has a pin only while the policy is pinned."""
    path = store.directory / "live.json"
    body = open_document("live", path.read_bytes(), path)
    assert body == {"generation": 3, "version": 3, "canary_version": None, "canary_share": 0.0}
    assert path.read_bytes() == seal_document("live", body)


def test_a_store_of_damaged_versions_can_be_published_to(store: WeightFolder) -> None:
    """If neither file can be read, the policy counts as pinned until a person resumes it."""
    for version in (1, 2, 3):
        flip(store.directory / "versions" / str(version) / "manifest.json")
    for name in NAMES:
        flip(store.directory / name)
    store.resume()
    assert store.publish(add(store, 5.0)).version == 4
