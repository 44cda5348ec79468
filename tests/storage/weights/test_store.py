"""Weights are unchanged since their publication, or raise an error; numbers are never shared.

Also of `storage.weights.folders` and `storage.weights.lineage`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from storage.errors import (
    GenerationConflict,
    PolicyPinned,
    WeightsDamaged,
    WeightsNotFound,
    WeightsRefused,
    WeightStoreError,
)
from storage.experience.range_set import RangeSet
from storage.weights.manifest import (
    Candidate,
    Live,
    Manifest,
    Pin,
    decode_weights,
    encode_weights,
    open_document,
    plain_document,
    seal_document,
    sha256,
)
from storage.weights.store import WeightFolder

REPOSITORY = Path(__file__).parents[3]
LINEAGE = {"c0ffee-5c4e3a": [[0, 9], [12, 20]]}


def add(store: WeightFolder, value: float, **changes: Any) -> str:
    weights = {"pi.weight": np.full((2, 3), value, np.float32), "pi.bias": np.arange(2.0)}
    arguments: dict[str, Any] = {"spec": {"kind": "mlp"}, "metrics": {"v": value}, **changes}
    return store.add_candidate(weights, lineage=LINEAGE, **arguments)


def any_weights(candidate: Candidate, weights: object) -> None:
    """The check of a store whose weights no policy acts with."""


def store_in(root: Path) -> WeightFolder:
    return WeightFolder(root, "default", check=any_weights)


def value_of(store: WeightFolder, version: int) -> float:
    return float(store.load(version)[1]["pi.weight"][0, 0])


@pytest.fixture
def store(tmp_path: Path) -> WeightFolder:
    return WeightFolder(tmp_path, "default", check=any_weights, clock=lambda: 1_700_000_000.25)


def test_a_new_store_is_empty_and_reading_it_writes_nothing(tmp_path: Path) -> None:
    """No candidates, no versions, nothing live, and no file made by asking."""
    store = WeightFolder(tmp_path, "default")
    assert (store.candidates(), store.versions(), store.live()) == ([], [], None)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(WeightsNotFound):
        store.load(1)
    with pytest.raises(WeightsNotFound, match="roll back"):
        store.rollback()


def test_publishing_makes_a_candidate_the_live_version(store: WeightFolder) -> None:
    """add -> publish -> load gives the same arrays, and a manifest that says where from."""
    digest = add(store, 0.5, filter_state={"count": 3}, checkpoint="run/7")
    assert store.publish(digest) == store.live() == Live(generation=1, version=1)
    manifest, weights = store.load(1)
    assert weights["pi.weight"].dtype == np.float32
    np.testing.assert_array_equal(weights["pi.weight"], np.full((2, 3), 0.5, np.float32))
    np.testing.assert_array_equal(weights["pi.bias"], [0.0, 1.0])
    assert (manifest.version, manifest.parent, manifest.copy_of) == (1, None, None)
    assert (manifest.candidate, manifest.store_id) == (digest, store.store_id)
    assert (manifest.spec, manifest.metrics) == ({"kind": "mlp"}, {"v": 0.5})
    assert (manifest.filter_state, manifest.checkpoint) == ({"count": 3}, "run/7")
    assert manifest.created == 1_700_000_000_250_000
    assert store.lineage(1) == {"c0ffee-5c4e3a": RangeSet([(0, 9), (12, 20)])}


def test_the_same_content_is_one_candidate(store: WeightFolder) -> None:
    """A job that is run again adds nothing; another metric is another candidate."""
    assert add(store, 1.0) == add(store, 1.0)
    assert len(store.candidates()) == 1
    add(store, 1.0, metrics={"v": 2})
    assert len(store.candidates()) == 2


def test_publishing_what_is_live_changes_nothing(store: WeightFolder) -> None:
    """A publish job may be tried again."""
    digest = add(store, 1.0)
    assert store.publish(digest) == store.publish(digest)
    assert store.versions() == [1]


def test_promotion_gives_rising_numbers_and_does_not_publish(store: WeightFolder) -> None:
    """Numbers start at 1; what is live changes only by set_live; a digest may be shortened."""
    first = add(store, 1.0)
    assert [store.promote(first), store.promote(add(store, 2.0)[:12])] == [1, 2]
    assert store.live() is None
    assert store.set_live(2).generation == 1
    assert store.promote(first) == 3
    assert store.manifest(3).parent == 2
    with pytest.raises(WeightsNotFound, match="matches 0"):
        store.promote("ffffffff0000")
    with pytest.raises(WeightsNotFound, match=r"6 or more characters .* got 'fffff'"):
        store.promote("fffff")


def test_a_number_is_not_given_again_after_its_directory_went(store: WeightFolder) -> None:
    """The live pointer still names a removed version."""
    store.publish(add(store, 1.0))
    (store.directory / "versions" / "1").rename(store.directory / "elsewhere")
    assert store.promote(add(store, 2.0)) == 2


def test_a_generation_is_compared_and_set(store: WeightFolder) -> None:
    """With expected_generation the pointer moves only from there; generations always rise."""
    for value in (1.0, 2.0):
        store.promote(add(store, value))
    assert store.set_live(1, expected_generation=0).generation == 1
    with pytest.raises(GenerationConflict, match="expected generation 0 to be live, got 1"):
        store.set_live(2, expected_generation=0)
    assert store.set_live(2, expected_generation=1, canary=(1, 0.25)) == Live(
        generation=2, version=2, canary_version=1, canary_share=0.25
    )
    assert store.live() == Live(generation=2, version=2, canary_version=1, canary_share=0.25)
    assert store.set_live(1).generation == 3


def test_only_an_existing_version_goes_live(store: WeightFolder) -> None:
    """Neither a number without a version nor a share outside 0..1 reaches a client."""
    store.publish(add(store, 1.0))
    with pytest.raises(WeightsNotFound):
        store.set_live(2)
    with pytest.raises(WeightsNotFound):
        store.set_live(1, canary=(9, 0.1))
    with pytest.raises(ValueError, match="share of 0 to 1"):
        store.set_live(1, canary=(1, 1.5))
    assert store.live() == Live(generation=1, version=1)


def test_a_rollback_is_a_new_version_with_old_content(store: WeightFolder) -> None:
    """Generations and numbers rise; the content is the old one; twice goes back further."""
    for value in (1.0, 2.0, 3.0):
        store.publish(add(store, value))
    live = store.rollback(by="ada", why="3 is worse")
    pin = Pin(by="ada", when=1_700_000_000_250_000, why="3 is worse")
    assert live == store.live() == Live(generation=4, version=4, pinned=pin)
    assert value_of(store, 4) == 2.0
    manifest = store.manifest(4)
    assert (manifest.parent, manifest.copy_of) == (3, 2)
    assert manifest.candidate == store.manifest(2).candidate
    assert value_of(store, store.rollback().version) == 1.0
    with pytest.raises(WeightsNotFound, match="expected a usable version before"):
        store.rollback()
    assert value_of(store, store.rollback(to=3).version) == 3.0
    assert store.versions() == [1, 2, 3, 4, 5, 6]
    with pytest.raises(WeightsNotFound, match=r"versions 1, .* 6 to judge, got 9"):
        store.require_version(9, "judge")
    with pytest.raises(WeightsNotFound, match=r"versions 1, .* 6 to go back to, got 9"):
        store.rollback(to=9)


def test_a_list_of_the_latest_versions_says_that_there_are_more(store: WeightFolder) -> None:
    for value in range(11):
        store.publish(add(store, float(value)))
    listed = "one of 11 versions, the latest of which are 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, to judge"
    with pytest.raises(WeightsNotFound, match=f"expected {listed}, got 99"):
        store.require_version(99, "judge")


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({}, "one or more arrays"),
        ({"w": np.array([1.0, np.nan])}, r"weights\.w: expected finite"),
        ({"w": np.array([1.0, np.inf])}, r"weights\.w: expected finite"),
        ({"w": np.array([None])}, r"weights\.w: expected numbers"),
        ({"w": np.array(["a"])}, r"weights\.w: expected numbers"),
        ({"w": np.array([1j])}, r"weights\.w: expected numbers"),
    ],
)
def test_weights_that_no_policy_can_use_are_refused(
    store: WeightFolder, weights: dict[str, Any], message: str
) -> None:
    """NaN, infinity and what is not a number never become a candidate; the tensor is named."""
    with pytest.raises(ValueError, match=message):
        store.add_candidate(weights, spec={}, metrics={}, lineage={})
    assert store.candidates() == []


def test_metrics_that_json_cannot_hold_are_refused(store: WeightFolder) -> None:
    """NaN has no JSON form: the caller decides what an unknown metric is."""
    with pytest.raises(ValueError, match="metrics: expected JSON without NaN"):
        add(store, 1.0, metrics={"v": float("nan")})
    with pytest.raises(ValueError, match="spec: expected JSON"):
        add(store, 1.0, spec={"v": object()})


def test_a_rollback_pins_the_policy_until_it_is_resumed(store: WeightFolder) -> None:
    """No job undoes a rollback: what it publishes stays a candidate. `resume` gives the pin, once.

    What is live, and its generation, stay as they are when the pin goes.
    """
    for value in (1.0, 2.0):
        store.publish(add(store, value))
    live, digest = store.rollback(by="ada"), add(store, 3.0)
    for change in (
        lambda: store.publish(digest),
        lambda: store.publish_as(digest, store.next_version),
        lambda: store.set_live(2),
        lambda: store.set_live(3, canary=(2, 0.5)),
    ):
        with pytest.raises(PolicyPinned, match=r"pinned by ada \(rolled back from version 2"):
            change()
    assert store.live() == live
    assert (store.versions(), digest in store.candidates()) == ([1, 2, 3], True)
    assert store.resume() == live.pinned
    assert store.live() == Live(generation=3, version=3)
    assert store.resume() is None
    assert store.publish(digest) == Live(generation=4, version=4)


def test_a_rollback_may_follow_a_rollback(store: WeightFolder) -> None:
    """A further rollback is possible in spite of the pin, and replaces it."""
    for value in (1.0, 2.0, 3.0):
        store.publish(add(store, value))
    store.rollback(by="ada")
    pinned = store.rollback(by="grace").pinned
    assert pinned is not None
    assert (pinned.by, value_of(store, 5)) == ("grace", 1.0)


def test_nothing_is_pinned_where_nothing_is_live(tmp_path: Path) -> None:
    with pytest.raises(WeightsNotFound, match="expected a pinned version"):
        store_in(tmp_path).resume()


def test_a_pin_of_another_form_is_damage(store: WeightFolder) -> None:
    """Without one the pointer does not speak of it."""
    store.publish(add(store, 1.0))
    path = store.directory / "live.json"
    body = open_document("live", path.read_bytes(), path)
    assert set(body) == {"generation", "version", "canary_version", "canary_share"}
    for pinned in ({"by": "ada"}, {"by": "ada", "when": "now", "why": ""}, "ada", True):
        path.write_bytes(seal_document("live", {**body, "pinned": pinned}))
        assert "pinned" in store.pointer_damage()["live.json"]


def test_a_store_without_a_check_takes_nothing_in(store: WeightFolder, tmp_path: Path) -> None:
    """A check that only reads weights cannot show that a policy can act with them."""
    digest = add(store, 1.0)
    reading = WeightFolder(tmp_path, "default")
    for change in (lambda: add(reading, 2.0), lambda: reading.publish(digest)):
        with pytest.raises(WeightStoreError, match="open for reading"):
            change()
    assert (store.candidates(), store.versions()) == ([digest], [])


def test_what_the_check_refuses_gets_no_further(tmp_path: Path) -> None:
    """Weights that the check refuses are not kept and do not go live, by any call, even if they
    were stored before the check."""
    refused: set[float] = set()

    def check(candidate: Candidate, weights: Mapping[str, Any]) -> None:
        if (value := float(weights["pi.weight"][0, 0])) in refused:
            raise WeightsRefused(f"weights: {value}")

    digests = [add(store_in(tmp_path), value) for value in (1.0, 2.0, 3.0)]
    for digest in digests[:2]:
        store_in(tmp_path).publish(digest)
    before = store_in(tmp_path).live()
    refused |= {1.0, 2.0, 3.0, 4.0}
    for change in (
        lambda store: add(store, 4.0),
        lambda store: store.promote(digests[2]),
        lambda store: store.publish(digests[2]),
        lambda store: store.publish_as(digests[2], 3),
        lambda store: store.set_live(1),
        lambda store: store.set_live(2, canary=(1, 0.5)),
        lambda store: store.rollback(),
        lambda store: store.rollback(to=1),
    ):
        with pytest.raises(WeightsRefused, match="weights: "):
            change(WeightFolder(tmp_path, "default", check=check))
    assert (store_in(tmp_path).live(), store_in(tmp_path).versions()) == (before, [1, 2])
    assert store_in(tmp_path).candidates() == sorted(digests)


def test_a_policy_id_is_data_and_never_a_path(tmp_path: Path) -> None:
    """No id leads out of the root."""
    for name in ("", "..", "a/b", "/etc", ".hidden"):
        with pytest.raises(ValueError, match="policy id"):
            WeightFolder(tmp_path, name)


# --- damage ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "versions/1/weights.safetensors",
        "versions/1/manifest.json",
        "versions/1/lineage.json",
        "candidates/{digest}/candidate.json",
        "candidates/{digest}/weights.safetensors",
    ],
)
def test_a_flipped_byte_anywhere_is_an_error(store: WeightFolder, name: str) -> None:
    """Every byte of every file is covered by a digest: damage never becomes other weights."""
    digest = add(store, 0.5)
    store.publish(digest)
    path = store.directory / name.format(digest=digest)
    good = path.read_bytes()

    def read_all() -> list[Any]:
        candidate, weights = store.load_candidate(digest)
        manifest, same = store.load(1)
        arrays = [weights["pi.weight"].tolist(), same["pi.weight"].tolist()]
        return [candidate, manifest, *arrays, store.lineage(1), store.live(), store.store_id]

    expected = read_all()
    for at in range(0, len(good), max(1, len(good) // 60)):
        path.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        try:
            found = read_all()
        except WeightsDamaged:
            continue
        assert found == expected, at
    path.write_bytes(good[: len(good) // 2])
    with pytest.raises(WeightsDamaged):
        read_all()


def test_a_damaged_store_id_is_taken_from_the_versions(store: WeightFolder) -> None:
    """A damaged store id is taken from the versions; without versions the error says what to do."""
    path = store.directory / "store.json"
    digest = add(store, 0.5)
    known = store.store_id
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(WeightsDamaged, match="remove the file to get a new id"):
        store.publish(digest)
    path.unlink()
    store.publish(digest)
    assert store.store_id != known
    known = store.store_id
    path.write_bytes(path.read_bytes()[:-9])
    store.publish(add(store, 0.6))
    assert {store.manifest(version).store_id for version in (1, 2)} == {known}
    assert json.loads(path.read_bytes())["body"]["store_id"] == known


def test_damaged_weights_do_not_go_live(store: WeightFolder) -> None:
    """promote and set_live verify before they point anywhere."""
    digest = add(store, 0.5)
    store.promote(digest)
    for folder in (f"candidates/{digest}", "versions/1"):
        path = store.directory / folder / "weights.safetensors"
        path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    with pytest.raises(WeightsDamaged):
        store.set_live(1)
    with pytest.raises(WeightsDamaged):
        store.promote(digest)
    assert store.live() is None
    assert store.versions() == [1]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=8,
)


@given(
    json_values
    | st.dictionaries(st.sampled_from(["format", "kind", "digest", "body"]), json_values)
)
def test_any_document_is_read_or_damaged(document: Any) -> None:
    """Any JSON in a file raises WeightsDamaged, unless it is a sealed document."""
    with pytest.raises(WeightsDamaged):
        open_document("live", json.dumps(document).encode(), "live.json")
    for kind in (Live, Manifest, Candidate):
        with pytest.raises(WeightsDamaged):
            kind.from_json(document)


@given(st.binary(max_size=200))
def test_any_bytes_are_damaged(data: bytes) -> None:
    """Garbage, right digest or not, raises WeightsDamaged and nothing else."""
    with pytest.raises(WeightsDamaged):
        open_document("live", data, "live.json")
    with pytest.raises(WeightsDamaged):
        decode_weights(data, sha256(data))


def nested(value: Any, depth: int) -> Any:
    for _ in range(depth):
        value = [value]
    return value


@given(
    st.dictionaries(
        st.text(max_size=3),
        st.recursive(
            st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=3) | st.booleans(),
            lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(), inner),
            max_leaves=4,
        ).flatmap(lambda value: st.integers(0, 40).map(lambda depth: nested(value, depth))),
        max_size=2,
    )
)
def test_what_goes_with_weights_can_be_sent_in_both_encodings(document: dict[str, Any]) -> None:
    """A spec, metric or lineage is refused with its place, or is the same after JSON and after
    msgpack."""
    try:
        plain = plain_document(document, "metrics")
    except ValueError as error:
        place = str(error)
    else:
        place = ""
    if place:
        assert place.startswith("metrics")
        return
    assert plain == document
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(plain)) == plain
    assert msgspec.json.decode(msgspec.json.encode(plain)) == plain


@pytest.mark.parametrize(
    ("value", "place"),
    [
        (2**64, "metrics.a"),
        (-(2**63) - 1, "metrics.a"),
        ({"b": [0, 2**70]}, "metrics.a.b[1]"),
        (nested(1, 32), "metrics.a[0]"),
        (nested(1, 100_000), "metrics"),
    ],
)
def test_what_cannot_be_sent_is_not_kept(store: WeightFolder, value: Any, place: str) -> None:
    with pytest.raises(ValueError, match="expected") as caught:
        add(store, 1.0, metrics={"a": value})
    assert str(caught.value).startswith(place)
    assert store.candidates() == []
    add(store, 1.0, metrics={"a": nested([2**64 - 1, -(2**63)], 30)})


@given(st.dictionaries(st.sampled_from("abc"), st.integers() | st.text(max_size=5)))
def test_documents_round_trip(body: dict[str, Any]) -> None:
    """open(seal(body)) is the body, and only under its own kind."""
    data = seal_document("spec", body)
    assert open_document("spec", data, "here") == body
    with pytest.raises(WeightsDamaged, match="expected live"):
        open_document("live", data, "here")


@given(
    hnp.arrays(
        st.sampled_from(["f4", "f8", "f2", ">f4", "i8", "u1", "?"]),
        hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
        elements=st.integers(0, 1),
    ),
    st.booleans(),
)
def test_weights_round_trip(array: Any, transposed: bool) -> None:
    """Values, shape and native dtype survive, for any memory layout and byte order."""
    given_array = array.T if transposed else array
    data = encode_weights({"w": given_array})
    back = decode_weights(data, sha256(data))["w"]
    assert back.dtype == given_array.dtype.newbyteorder("=")
    np.testing.assert_array_equal(back, given_array)


# --- several processes, and kills ------------------------------------------------------------


def run(script: str, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)}, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


PROMOTER = """
import sys
import numpy as np
from storage.errors import GenerationConflict
from storage.weights.store import WeightFolder

store = WeightFolder(sys.argv[1], "default", check=lambda candidate, weights: None)
name = int(sys.argv[2])
numbers, moved = [], 0
for i in range(8):
    weights = {"w": np.array([name * 100.0 + i])}
    digest = store.add_candidate(weights, spec={}, metrics={}, lineage={})
    version = store.promote(digest)
    assert store.load(version)[1]["w"] == weights["w"]
    numbers.append(version)
    live = store.live()
    try:
        store.set_live(version, expected_generation=live.generation if live else 0)
        moved += 1
    except GenerationConflict:
        pass
print(moved, *numbers)
"""


def test_processes_that_promote_at_once_get_distinct_numbers(tmp_path: Path) -> None:
    """4 processes, 32 promotions: 32 numbers without a gap, one store, a generation per move."""
    children = [run(PROMOTER, tmp_path, name) for name in range(4)]
    outputs = [child.communicate(timeout=60)[0].split() for child in children]
    assert [child.returncode for child in children] == [0] * 4
    numbers = sorted(int(n) for _, *found in outputs for n in found)
    assert numbers == list(range(1, 33))
    store = WeightFolder(tmp_path, "default")
    assert {store.manifest(n).store_id for n in numbers} == {store.store_id}
    live = store.live()
    assert live is not None
    assert live.generation == sum(int(moved) for moved, *_ in outputs)


KILLED_AT_EACH_STEP = """
import os, sys
from pathlib import Path
import numpy as np
from storage.weights.store import WeightFolder

def add(store, value):
    weights = {"w": np.array([value])}
    return store.add_candidate(weights, spec={}, metrics={}, lineage={"s-1": [[0, int(value)]]})

def count_down(steps):
    left = [steps]
    def dying(function):
        def step(*arguments, **keywords):
            left[0] -= 1
            if left[0] < 0:
                os._exit(9)
            return function(*arguments, **keywords)
        return step
    for name in ("open", "fsync", "rename", "replace", "mkdir", "link", "unlink", "write"):
        setattr(os, name, dying(getattr(os, name)))

def change(root):
    store = WeightFolder(root, "default", check=lambda candidate, weights: None)
    store.publish(add(store, 2.0))
    store.rollback()

def check(root):
    store = WeightFolder(root, "default", check=lambda candidate, weights: None)
    live = store.live()
    assert live is not None and live.version in store.versions()
    for version in store.versions():
        manifest, weights = store.load(version)
        assert weights["w"] in (1.0, 2.0) and store.lineage(version)
    for digest in store.candidates():
        store.load_candidate(digest)
    assert (live.pinned is not None) == (live.generation == 3)
    store.resume()
    again = store.publish(add(store, 3.0))
    assert store.load(again.version)[1]["w"] == 3.0
    assert again.generation > live.generation and again.version == max(store.versions())
    return live.generation

steps, seen = 0, set()
while True:
    root = Path(sys.argv[1]) / str(steps)
    store = WeightFolder(root, "default", check=lambda candidate, weights: None)
    store.publish(add(store, 1.0))
    child = os.fork()
    if not child:
        count_down(steps)
        change(root)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    seen.add(check(root))
    if status == 0:
        break
    assert status == 9, status
    steps += 1
print(steps, *sorted(seen))
"""


def test_a_kill_between_any_two_steps_leaves_the_store_whole(tmp_path: Path) -> None:
    """publish and rollback, dying before each file operation in turn.

    What is live is a whole version, every number that exists can be loaded, the next publish works.
    """
    child = run(KILLED_AT_EACH_STEP, tmp_path)
    output, _ = child.communicate(timeout=60)
    assert child.returncode == 0
    steps, *generations = map(int, output.split())
    assert steps > 30
    assert generations == [1, 2, 3]


def test_what_a_killed_process_left_goes_later(store: WeightFolder) -> None:
    """A temporary directory is not a candidate; an old one is removed, a young one is not."""
    add(store, 1.0)
    folder = store.directory / "candidates"
    for name, age in ((".old.tmp", 1), (".young.tmp", 10**10)):
        (folder / name).mkdir()
        os.utime(folder / name, (age, age))
    add(store, 2.0)
    assert len(store.candidates()) == 2
    assert not (folder / ".old.tmp").exists()
    assert (folder / ".young.tmp").exists()


def test_pruning_keeps_the_newest_what_is_live_and_the_way_back(store: WeightFolder) -> None:
    """Never what is live or a canary, nor what a rollback of it needs; numbers go on rising."""
    digests = [add(store, float(i)) for i in range(8)]
    for digest in digests[:5]:
        store.publish(digest)
    for digest in digests[5:]:
        store.promote(digest)
    waiting = add(store, 99.0)  # never promoted: it may be under judgement
    store.set_live(3, canary=(5, 0.1))
    assert store.prune(1) == [1, 6, 7]
    assert store.versions() == [2, 3, 4, 5, 8]
    assert store.candidates() == sorted([waiting, *digests[1:5], digests[7]])
    assert store.prune(1) == []
    assert store.rollback().version == 3  # the canary ends
    assert store.rollback().version == 9
    assert value_of(store, 9) == value_of(store, 2)
    store.resume()
    assert store.publish(add(store, 10.0)).version == 10
    with pytest.raises(ValueError, match="keep: expected 1 or more"):
        store.prune(0)


def test_a_rollback_can_go_further_back_after_pruning(store: WeightFolder) -> None:
    """When a rollback's copy is live, pruning keeps its original and the version before that."""
    for i in range(4):
        store.publish(add(store, float(i)))
    store.rollback()  # 5 is a copy of 3
    assert store.prune(1) == [1]
    assert store.rollback().version == 6
    assert value_of(store, 6) == value_of(store, 2)


def test_a_version_that_was_pruned_does_not_go_live(store: WeightFolder) -> None:
    """Making a pruned version live raises, and the live version stays."""
    for i in range(4):
        store.publish(add(store, float(i)))
    store.prune(1)
    with pytest.raises(WeightsNotFound):
        store.set_live(1)
    assert store.live() == Live(generation=4, version=4)
