"""A store in memory gives the same answers as one in a folder, and does not grow."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from storage.errors import GenerationConflict, PolicyPinned, WeightsNotFound
from storage.objects.memory import MemoryObjects
from storage.weights.lease import Lease
from storage.weights.off_chain import described, mark_off_chain
from storage.weights.store import WeightFolder
from tests.storage.weights.any_weights import NOON, add, any_weights, record, store_in, value_of


def in_memory(objects: MemoryObjects | None = None) -> WeightFolder:
    objects = MemoryObjects() if objects is None else objects
    return WeightFolder(objects, "default", check=any_weights, clock=lambda: NOON)


def history(store: WeightFolder) -> list[object]:
    """What a store answers to publications, rollbacks, a canary, a lease and a removal."""
    told: list[object] = [store.live(), store.candidates()]
    digests = [add(store, float(value), checkpoint="follow") for value in range(5)]

    def ask(call: Callable[[], object]) -> None:
        try:
            told.append(call())
        except (GenerationConflict, PolicyPinned, WeightsNotFound, ValueError) as error:
            told.append((type(error), str(error)))

    ask(store.rollback)
    ask(lambda: store.publish("ffffff"))
    for digest in digests[:3]:
        ask(lambda digest=digest: store.publish(digest))  # type: ignore[misc]
    ask(lambda: store.publish(digests[3], expected_generation=1))
    ask(lambda: store.rollback(by="ada"))
    ask(lambda: store.publish(digests[3]))
    ask(store.resume)
    ask(lambda: store.start_canary(digests[3], 0.5))
    ask(store.promote_canary)
    store.served.write(record("c0ffee", serves=5, wanted=5, served=((1, 5),)))
    ask(lambda: store.served.registered(NOON))
    lease = Lease.take(store.files)
    ask(lambda: lease.fence)
    lease.release()
    ask(lambda: store.publish(digests[4], fence=lease.fence))
    mark_off_chain(store.files, 3, "its checkpoint is lost")
    ask(lambda: [(one["version"], one["off_chain"]) for one in described(store)[0]])
    ask(lambda: [value_of(store, version) for version in store.versions()])
    ask(lambda: store.prune(1, checkpoint="follow"))
    ask(lambda: {number: one.candidate for number, one in store.pruned().items()})
    ask(lambda: store.manifest(1))
    ask(lambda: (store.versions(), store.candidates(), store.next_version, store.restored))
    ask(lambda: store.note_seen(90, 80))
    ask(lambda: store.publish(digests[0]))
    return told


def test_a_store_in_memory_answers_as_one_in_a_folder(tmp_path: Path) -> None:
    assert history(in_memory()) == history(store_in(tmp_path))


def test_a_damaged_pointer_is_recovered_in_memory_too() -> None:
    """Also by a second store on the same objects."""
    objects = MemoryObjects()
    live = in_memory(objects).publish(add(in_memory(objects), 1.0))
    objects.replace("weights/default/live.json", b"{}")
    assert in_memory(objects).mended_live() == live
    assert in_memory(objects).pointer_damage() == {}


def test_two_publishers_of_one_generation_conflict() -> None:
    """The pointer is replaced if it is unchanged: without a common lock the second one fails."""

    class Unlocked(MemoryObjects):
        def replace_if_unchanged(self, name: str, content: bytes, before: bytes | None) -> None:
            if others:
                others.pop()()
            super().replace_if_unchanged(name, content, before)

    objects = Unlocked()
    store, elsewhere = in_memory(objects), in_memory()
    digest = add(store, 1.0)
    elsewhere.publish(add(elsewhere, 2.0))
    live = elsewhere.files.read("live.json")
    others = [lambda: objects.replace("weights/default/live.json", live)]
    with pytest.raises(GenerationConflict, match="another version became live meanwhile"):
        store.publish(digest)


def test_what_is_forgotten_takes_no_memory() -> None:
    """Publishing and pruning with `forget` leaves as many objects as before."""
    objects = MemoryObjects()
    store = in_memory(objects)
    sizes = []
    for value in range(20):
        store.prune(2, checkpoint="embedded", forget=True)
        store.publish(add(store, float(value), checkpoint="embedded"))
        sizes.append(sum(len(data) for data, _ in objects._objects.values()))
    assert len(store.versions()) <= 4
    assert len(set(map(len, map(str, sizes[4:])))) == 1
    assert max(sizes[4:]) - min(sizes[4:]) < 100
