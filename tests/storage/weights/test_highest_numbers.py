"""A number always names one content, even if a backup does not know it."""

from __future__ import annotations

import contextlib
import logging
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from storage.errors import PolicyPinned, WeightsNotFound
from storage.weights.store import WeightFolder
from tests.storage.weights.any_weights import add, store_in


def publish(store: WeightFolder, *values: float) -> None:
    for value in values:
        store.publish(add(store, value))


def test_numbers_go_on_after_a_restore_of_the_weights(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Publishing after a restore of `weights/` gives unused numbers and generations."""
    store = store_in(tmp_path)
    publish(store, 1.0, 2.0)
    shutil.copytree(tmp_path / "weights", tmp_path / "backup")
    publish(store, 3.0, 4.0)
    shutil.rmtree(tmp_path / "weights")
    (tmp_path / "backup").rename(tmp_path / "weights")
    restored = store_in(tmp_path)
    assert "version 4 and generation 4 were given" in str(restored.restored)
    assert restored.next_version == 5
    live = restored.publish(add(restored, 5.0))
    assert (live.version, live.generation) == (5, 5)
    assert "restored from a backup" in caplog.text
    assert restored.restored is None


@pytest.mark.parametrize("canary", [True, False])
def test_a_number_beside_the_live_one_is_not_given_again(tmp_path: Path, canary: bool) -> None:
    """A canary acts under its number, and a promotion returns one, without being live."""
    store = store_in(tmp_path)
    publish(store, 1.0)
    shutil.copytree(tmp_path / "weights", tmp_path / "backup")
    if canary:
        assert store.start_canary(add(store, 2.0), 0.5).canary_version == 2
    else:
        assert store.promote(add(store, 2.0)) == 2
    shutil.rmtree(tmp_path / "weights")
    (tmp_path / "backup").rename(tmp_path / "weights")
    restored = store_in(tmp_path)
    assert restored.publish(add(restored, 3.0)).version == 3


def test_weights_that_were_deleted_do_not_begin_again(tmp_path: Path) -> None:
    publish(store_in(tmp_path), 1.0, 2.0)
    shutil.rmtree(tmp_path / "weights")
    publish(store_in(tmp_path), 3.0)
    assert store_in(tmp_path).versions() == [3]


def test_a_folder_in_the_place_of_the_numbers_is_set_aside(tmp_path: Path) -> None:
    """A publication goes on, and keeps the numbers again."""
    store = store_in(tmp_path)
    publish(store, 1.0)
    (tmp_path / "numbers" / "default.json").unlink()
    (tmp_path / "numbers" / "default.json").mkdir()
    publish(store, 2.0)
    assert (tmp_path / "numbers" / "default.json.damaged").is_dir()
    shutil.rmtree(tmp_path / "weights")
    publish(store_in(tmp_path), 3.0)
    assert store_in(tmp_path).versions() == [3]


def test_numbers_go_on_after_what_somebody_saw(tmp_path: Path) -> None:
    """After a restore of the whole root only clients and collectors know; they never lower it."""
    store = store_in(tmp_path)
    publish(store, 1.0)
    store.note_seen(9, 7)
    store.note_seen(2, 2)
    live = store.publish(add(store, 2.0))
    assert (live.version, live.generation) == (10, 8)


@pytest.mark.parametrize("content", [b"", b"{}", b"\x00" * 64])
def test_a_damaged_file_of_numbers_stops_no_publication(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    """The store's own numbers still count, and the damage is logged."""
    store = store_in(tmp_path)
    publish(store, 1.0)
    (tmp_path / "numbers" / "default.json").write_bytes(content)
    with caplog.at_level(logging.WARNING):
        publish(store_in(tmp_path), 2.0)
    assert store.versions() == [1, 2]
    assert "a restore may go unnoticed" in caplog.text


class Numbers(RuleBasedStateMachine):
    """Publishing, pruning and restoring in any order; `seen`: number -> the content it named."""

    @initialize()
    def begin(self) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="headrace-numbers-"))
        self.now = 1_700_000_000.0
        self.value = 0.0
        self.seen: dict[int, str] = {}
        self.generations: dict[int, int] = {}

    @property
    def store(self) -> WeightFolder:
        return store_in(self.root, lambda: self.now)

    def fresh(self) -> str:
        self.value += 1.0
        return add(self.store, self.value)

    @rule()
    def publish(self) -> None:
        try:
            self.store.publish(self.fresh())
        except PolicyPinned:
            self.store.resume()

    @rule()
    def promote(self) -> None:
        self.store.promote(self.fresh())

    @rule()
    def start_canary(self) -> None:
        with contextlib.suppress(WeightsNotFound, PolicyPinned):  # nothing is live, or one is on
            self.store.start_canary(self.fresh(), 0.5)

    @rule()
    def roll_back(self) -> None:
        with contextlib.suppress(WeightsNotFound):  # nothing is live, or nothing was before
            self.store.rollback()

    @rule(hours=st.integers(0, 24 * 40))
    def prune(self, hours: int) -> None:
        self.now += hours * 3600
        self.store.prune(1)

    @rule()
    def back_up(self) -> None:
        shutil.rmtree(self.root / "backup", ignore_errors=True)
        if (self.root / "weights").exists():
            shutil.copytree(self.root / "weights", self.root / "backup")

    @precondition(lambda self: (self.root / "backup").exists())
    @rule()
    def restore(self) -> None:
        shutil.rmtree(self.root / "weights", ignore_errors=True)
        shutil.copytree(self.root / "backup", self.root / "weights")

    @invariant()
    def each_number_names_one_content(self) -> None:
        """Neither a version nor a generation ever becomes another one's."""
        store = self.store
        named = {n: store.manifest(n).candidate for n in store.versions()}
        named |= {n: one.candidate for n, one in store.pruned().items()}
        for number, candidate in named.items():
            assert self.seen.setdefault(number, candidate) == candidate, number
        live = store.live()
        if live is not None:
            assert self.generations.setdefault(live.generation, live.version) == live.version

    def teardown(self) -> None:
        if hasattr(self, "root"):
            shutil.rmtree(self.root)


TestNumbers = Numbers.TestCase
TestNumbers.settings = settings(max_examples=12, stateful_step_count=14, deadline=None)
