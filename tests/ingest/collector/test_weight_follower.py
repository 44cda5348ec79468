"""A collector serves published weights, or refuses them and reports the reason."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest

from ingest.collector.weight_follower import WeightFollower, renew_seconds
from storage.errors import WeightsRefused
from storage.weights.manifest import Live, Manifest
from storage.weights.served import REGISTERED_SECONDS
from storage.weights.store import WeightFolder
from tests.storage.weights.any_weights import NOON, add, store_in


class Times:
    """Both clocks of a follower."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def monotonic(self) -> float:
        return self.seconds

    def wall(self) -> float:
        return NOON + self.seconds


def load(manifest: Manifest, data: bytes) -> str:
    """Loads any version but those of a trainer called bad."""
    if manifest.checkpoint == "bad":
        raise WeightsRefused(f"version {manifest.version} cannot act")
    return f"policy {manifest.version}"


def follower_of(store: WeightFolder, times: Times | None = None) -> WeightFollower[str]:
    times = times or Times()
    found = WeightFollower(store, load, monotonic=times.monotonic, clock=times.wall)
    found.collector_id = "c0ffee"
    return found


def acting(follower: WeightFollower[str]) -> str | None:
    return None if follower.served is None else follower.served.policy


@pytest.fixture
def store(tmp_path: Path) -> WeightFolder:
    return store_in(tmp_path)


def test_each_new_version_is_taken_up_once(store: WeightFolder) -> None:
    follower = follower_of(store)
    assert not follower.look()
    for value in (1.0, 2.0):
        live = store.publish(add(store, value))
        assert follower.look()
        assert (acting(follower), follower.standing.wanted) == (f"policy {live.version}", live)
        assert not follower.look()


def test_what_cannot_act_is_refused_and_the_last_one_stays(
    store: WeightFolder, caplog: pytest.LogCaptureFixture
) -> None:
    """The record that others read holds the reason and the wanted version; the log has it too."""
    follower = follower_of(store)
    store.publish(add(store, 1.0))
    follower.look()
    live = store.publish(add(store, 2.0, "bad"))
    assert follower.look()
    follower.register()
    (record,) = store.served.read()
    assert (acting(follower), record.version, record.wanted_version) == ("policy 1", 1, 2)
    assert record.why == follower.standing.why == "version 2 cannot act"
    assert record.refused == {"2": "version 2 cannot act"}
    assert not record.serves(live)
    assert follower.standing.refused == {"older": 0, "unusable": 1, "unreadable": 0}
    assert "not served (unusable): version 2 cannot act" in caplog.text


def test_what_fails_for_now_is_tried_again(store: WeightFolder) -> None:
    """A version that is still being copied is served once it is whole, without a new pointer."""
    times = Times()
    follower = follower_of(store, times)
    store.publish(add(store, 1.0))
    versions = store.directory / "versions"
    versions.rename(store.directory / "elsewhere")
    assert follower.look()
    assert acting(follower) is None
    (store.directory / "elsewhere").rename(versions)
    assert not follower.look()
    times.seconds += 0.2
    assert follower.look()
    assert (acting(follower), follower.standing.why) == ("policy 1", None)


def test_an_error_that_stays_is_told_once(
    store: WeightFolder, caplog: pytest.LogCaptureFixture
) -> None:
    times = Times()
    follower = follower_of(store, times)
    store.publish(add(store, 1.0, "bad"))
    for _ in range(50):
        follower.look()
        times.seconds += 1.0
    assert caplog.text.count("not served") == 1
    assert follower.standing.refused["unusable"] == 1


def test_an_older_generation_is_refused_and_the_next_one_is_not(
    store: WeightFolder, caplog: pytest.LogCaptureFixture
) -> None:
    """The whole root is restored under a running collector, which keeps the later weights and logs
    it. Numbers continue after those, so that the next publication reaches it.
    """
    root = store.directory.parents[1]
    follower = follower_of(store)
    store.publish(add(store, 1.0))
    shutil.copytree(root, root.parent / "backup")
    for value in (2.0, 3.0):
        store.publish(add(store, value))
    follower.look()
    for name in ("weights", "numbers"):
        shutil.rmtree(root / name)
        shutil.copytree(root.parent / "backup" / name, root / name)
    assert follower.look()
    assert acting(follower) == "policy 3"
    assert follower.standing.refused["older"] == 1
    assert "newer generation than 3 (version 3)" in str(follower.standing.why)
    assert "got 1 (version 1)" in str(follower.standing.why)
    assert "not served (older)" in caplog.text
    assert store.publish(add(store, 4.0)) == Live(generation=4, version=4)
    assert follower.look()
    assert (acting(follower), follower.standing.why) == ("policy 4", None)


def test_a_canarys_number_is_not_given_again_after_a_restore(store: WeightFolder) -> None:
    """The canary has acted under its number, which a collector and its clients remember."""
    root, names = store.directory.parents[1], ("weights", "numbers")
    follower = follower_of(store)
    store.publish(add(store, 1.0))
    for name in names:
        shutil.copytree(root / name, root / "backup" / name)
    store.start_canary(add(store, 2.0), 0.5)
    follower.look()
    assert follower.served
    assert (follower.served.generation, follower.served.highest) == (2, 2)
    for name in names:
        shutil.rmtree(root / name)
        shutil.copytree(root / "backup" / name, root / name)
    assert follower.look()
    assert store.publish(add(store, 3.0)) == Live(generation=3, version=3)


def test_a_pin_is_seen_without_a_new_generation(store: WeightFolder) -> None:
    """`resume` does not change what is served."""
    follower = follower_of(store)
    for value in (1.0, 2.0):
        store.publish(add(store, value))
    store.rollback(by="ada")
    follower.look()
    served = follower.served
    assert follower.standing.wanted is not None
    assert follower.standing.wanted.pinned is not None
    store.resume()
    assert follower.look()
    assert follower.standing.wanted is not None
    assert follower.standing.wanted.pinned is None
    assert follower.served is served


@pytest.mark.parametrize(("policies", "seconds"), [(1, 10), (500, 10), (700, 14), (9_000, 20)])
def test_a_registration_is_renewed_while_the_collector_lives(
    store: WeightFolder, policies: int, seconds: int
) -> None:
    """A registration never lapses between two looks of the follower, and does once the follower has
    ended. Those of many policies are renewed less often: 50 a second, but none later than 20 s.
    """
    times, renewed = Times(), set()
    store.publish(add(store, 1.0))
    follower = follower_of(store, times)
    for _ in range(300):
        follower.register(renew=renew_seconds(policies))
        (record,) = store.served.registered(times.wall())
        renewed.add(record.until)
        times.seconds += 0.5
    assert len(renewed) == math.ceil(150 / seconds)
    times.seconds += REGISTERED_SECONDS
    assert store.served.registered(times.wall()) == []


def test_nothing_is_written_where_nothing_was_published(store: WeightFolder) -> None:
    """The publisher creates the folder, perhaps under another account than the collector's."""
    follower_of(store).register()
    assert not store.directory.exists()


def test_a_collector_that_ends_withdraws(store: WeightFolder) -> None:
    store.publish(add(store, 1.0))
    follower = follower_of(store)
    follower.register()
    follower.register(seconds=0.0)
    assert store.served.registered(NOON) == []
    assert len(store.served.read()) == 1


def test_what_was_served_outlives_a_restart(store: WeightFolder) -> None:
    """A rollback must find the version that was served before the collector restarted."""
    for value in (1.0, 2.0):
        store.publish(add(store, value))
        follower = follower_of(store)
        follower.look()
        follower.register()
    assert store.served.read()[0].served == [[1, 2]]


@pytest.mark.parametrize("is_taken", [False, True])
def test_a_folder_that_takes_no_record_is_said_once(
    store: WeightFolder, caplog: pytest.LogCaptureFixture, is_taken: bool
) -> None:
    """`weights/` may be read-only; following goes on. Each try names another temporary file."""
    times = Times()
    follower = follower_of(store, times)
    store.publish(add(store, 1.0))
    if is_taken:
        (store.directory / "served").write_text("")
    else:
        follower.collector_id = "c" * 240  # no room for the temporary name
    follower.look()
    for _ in range(5):
        follower.register()
        times.seconds += REGISTERED_SECONDS
    assert caplog.text.count("cannot register the version that it serves") == 1
    assert acting(follower) == "policy 1"


@pytest.mark.parametrize("lost", [False, True])
def test_a_collector_starts_and_goes_on_beside_a_damaged_pointer(
    store: WeightFolder, lost: bool
) -> None:
    """The live version is served, and live.json is rewritten."""
    running = follower_of(store)
    live = store.publish(add(store, 1.0))
    running.look()
    path = store.directory / "live.json"
    for follower in (running, follower_of(store)):
        path.write_bytes(path.read_bytes()[:-9])
        if lost:
            path.unlink()
        follower.look()
        assert (acting(follower), follower.standing.wanted) == ("policy 1", live)
        assert follower.standing.why is None
        assert store.pointer_damage() == {}
