"""A rollback succeeds during another publication, and skips damaged versions."""

from __future__ import annotations

from pathlib import Path

import pytest

from storage.errors import GenerationConflict, WeightsNotFound
from storage.weights.decisions import load_decisions
from storage.weights.manifest import Live
from storage.weights.store import WeightFolder
from tests.storage.weights.any_weights import NOON, add, any_weights, record, store_in, value_of


class Overtaken(WeightFolder):
    """Another publisher publishes just before each of the first two rollbacks goes live."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, "default", check=any_weights)
        self.theirs = [7.0, 8.0]

    def _point(self, version: int, *, pin: object = None, **given: object) -> Live:
        if pin is not None and self.theirs:
            self.publish(add(self, self.theirs.pop(0)))
        return super()._point(version, pin=pin, **given)  # type: ignore[arg-type]  # passed on


def test_a_trainer_that_publishes_meanwhile_does_not_keep_a_rollback_out(tmp_path: Path) -> None:
    """The intended content is live at the end, under the highest number, and pinned."""
    store = Overtaken(tmp_path)
    for value in (1.0, 2.0):
        store.publish(add(store, value))
    live = store.rollback(by="a person")
    assert store.theirs == []
    assert (value_of(store, live.version), live.version) == (1.0, max(store.versions()))
    assert store.live() == live
    assert live.pinned is not None
    (latest,) = (number for number in store.versions() if value_of(store, number) == 8.0)
    assert live.pinned.why == f"rolled back from version {latest} to the content of 1"


def test_who_says_what_was_live_is_told_that_it_is_not_any_more(tmp_path: Path) -> None:
    """A rollback that expects a generation raises if another publication came between its check and
    its change."""
    store = Overtaken(tmp_path)
    for value in (1.0, 2.0):
        store.publish(add(store, value))
    with pytest.raises(GenerationConflict):
        store.rollback(expected_generation=2)


def store_of(root: Path, *values: float) -> WeightFolder:
    store = store_in(root)
    for value in values:
        store.publish(add(store, value))
    return store


def damage(store: WeightFolder, version: int, name: str = "manifest.json") -> None:
    path = store.directory / "versions" / str(version) / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


FILES = ("manifest.json", "weights.safetensors", "lineage.json")


@pytest.mark.parametrize("name", FILES)
def test_a_rollback_from_a_damaged_version_goes_to_the_one_before(
    tmp_path: Path, name: str
) -> None:
    store = store_of(tmp_path, 1.0, 2.0, 3.0)
    damage(store, 3, name)
    assert value_of(store, store.rollback().version) == 2.0


@pytest.mark.parametrize("name", FILES)
def test_a_rollback_goes_past_damaged_versions(tmp_path: Path, name: str) -> None:
    """A damaged version cannot be made live, whether it was served or not."""
    store = store_of(tmp_path, 1.0, 2.0, 3.0, 4.0)
    store.served.write(record(serves=4, served=((1, 4),)))
    damage(store, 3, name)
    damage(store, 2, name)
    assert value_of(store, store.rollback().version) == 1.0


def test_a_damaged_copy_does_not_bring_back_what_was_rolled_back(tmp_path: Path) -> None:
    """Version 4 is a copy of 2, made by a rollback from 3, and is damaged. The next rollback goes
    to 1, and not to 3."""
    store = store_of(tmp_path, 1.0, 2.0, 3.0)
    store.rollback()
    damage(store, 4)
    assert value_of(store, store.rollback().version) == 1.0


@pytest.mark.parametrize("damaged", [[12], [11], [11, 12]])
def test_pruning_keeps_what_a_rollback_past_damage_needs(
    tmp_path: Path, damaged: list[int]
) -> None:
    """Not just the number before what is live, which is damaged and of no use."""
    store = store_of(tmp_path, *(float(value) for value in range(1, 13)))
    for version in damaged:
        damage(store, version)
    later = store_in(tmp_path, lambda: NOON + 86_400.0 * 40)  # none is kept for its hour
    later.prune(1)
    assert len(later.versions()) < 5
    expected = 11.0 if damaged == [12] else 10.0
    assert value_of(later, later.rollback().version) == expected


def test_a_second_rollback_says_why_what_was_rolled_back_is_passed_over(tmp_path: Path) -> None:
    """Version 3 is version 1 again: before that there was nothing."""
    store = store_of(tmp_path, 1.0, 2.0)
    assert store.rollback().version == 3
    reason = "version 3 has the content of version 1, and what came after that was rolled back"
    with pytest.raises(WeightsNotFound, match=reason):
        store.rollback()


def test_without_anything_whole_a_rollback_says_so(tmp_path: Path) -> None:
    store = store_of(tmp_path, 1.0, 2.0)
    damage(store, 1)
    with pytest.raises(WeightsNotFound, match="expected a usable version before 2"):
        store.rollback()


def test_who_rolled_back_and_why_outlives_the_pin(tmp_path: Path) -> None:
    """The rollback of a version or a canary is recorded as a decision about its candidate, with who
    and why."""
    store = store_of(tmp_path, 1.0, 2.0)
    candidate = store.manifest(1).candidate
    store.rollback(by="ann", why="complaints")
    store.resume()
    store.start_canary(add(store, 9.0), 0.1)
    store.rollback(by="token 7")
    known = load_decisions(tmp_path, "default").known  # at one moment of this store's clock
    first, second = sorted(known, key=lambda one: one["by"])
    assert (first["kind"], first["by"], first["verdict"]) == ("rollback", "ann", None)
    assert (first["candidate"], first["published"], first["version"]) == (candidate, True, 3)
    assert first["reasons"] == ["rolled back from version 2 to the content of 1", "complaints"]
    assert (second["published"], second["version"]) == (False, None)
    assert second["reasons"] == ["rolled back the canary, version 4"]
    assert second["candidate"] == store.manifest(4).candidate


def test_a_rollback_that_cannot_be_recorded_stands(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The rollback matters more than its record; the log reports the missing record."""
    store = store_of(tmp_path, 1.0, 2.0)
    (tmp_path / "decisions").write_text("not a folder")
    assert value_of(store, store.rollback().version) == 1.0
    assert "this is not recorded" in caplog.text


def test_a_rollback_to_the_live_version_changes_nothing(tmp_path: Path) -> None:
    """It is refused with the command that pins the live version, or ends its canary."""
    store = store_of(tmp_path, 1.0, 2.0)
    before = store.live()
    with pytest.raises(ValueError, match=r"than the live one .* got 2; `headrace pause` pins"):
        store.rollback(2)
    assert (store.live(), store.versions()) == (before, [1, 2])
    before = store.start_canary(add(store, 3.0), 0.1)
    ends = r"got 2; `headrace rollback` without --to ends the canary, version 3"
    with pytest.raises(ValueError, match=ends):
        store.rollback(2)
    assert store.live() == before
    assert value_of(store, store.rollback(3).version) == 3.0, "the canary is not live"


def test_a_repeated_rollback_to_a_version_is_made_again(tmp_path: Path) -> None:
    """The live version is then a copy of it, under another number. A repetition that names the
    generation is a conflict, even if it names the version that is live now."""
    store = store_of(tmp_path, 1.0, 2.0)
    made = store.rollback(1, expected_generation=2)
    with pytest.raises(GenerationConflict):
        store.rollback(made.version, expected_generation=2)
    assert [value_of(store, store.rollback(1).version) for _ in range(2)] == [1.0, 1.0]


def test_after_a_restore_a_rollback_to_the_live_version_gives_it_a_new_number(
    tmp_path: Path,
) -> None:
    """Clients that have seen later numbers refuse the restored version under its old one."""
    store = store_of(tmp_path, 1.0, 2.0)
    store.note_seen(9, 7)
    live = store.rollback(2)
    assert (live.version, live.generation, value_of(store, live.version)) == (10, 8, 2.0)
