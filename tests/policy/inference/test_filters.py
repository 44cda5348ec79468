"""The observation filters."""

import json
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy.inference.filters import ConcurrentMeanStdFilter, MeanStdFilter, NoFilter, make_filter

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "losses.json").read_text())[
    "mean_std_filter"
]


def filter_that_saw(rows, size=1):
    made = MeanStdFilter(size)
    made.push(np.asarray(rows, np.float64).reshape(-1, size))
    return made


def test_golden_numbers_of_pushing_and_merging():
    """Pushing 1, 2 and merging a filter that saw 10 gives the recorded counts and means."""
    made = MeanStdFilter(1)
    for x in GOLDEN["pushed"]:
        made.push([[x]])
    assert (made.stats.n, made.stats.mean[0]) == (GOLDEN["n"], GOLDEN["mean"])
    made.apply_changes(filter_that_saw([GOLDEN["after_merging_a_filter_that_saw"]]))
    assert made.stats.n == GOLDEN["merged_n"]
    assert made.stats.mean[0] == pytest.approx(GOLDEN["merged_mean"], rel=1e-15)


def test_one_sample_has_the_variance_of_its_square():
    """n = 1: var = mean^2; an empty filter changes nothing."""
    made = filter_that_saw([3.0])
    assert made.stats.var[0] == 9.0
    flat = np.array([[5.0]], np.float32)
    np.testing.assert_array_equal(MeanStdFilter(1)(flat), flat)


@given(st.integers(0, 2**32), st.integers(1, 5), st.integers(1, 4))
def test_workers_that_merge_equal_one_filter_over_all_data(seed, workers, rounds):
    """N workers, synced and merged over several rounds, give the statistics of one pass (1e-9)."""
    rng = np.random.default_rng(seed)
    driver, seen = MeanStdFilter(3), []
    for _ in range(rounds):
        for _ in range(workers):
            worker = driver.copy()
            worker.clear_buffer()
            rows = rng.normal(5.0, 2.0, size=(int(rng.integers(0, 9)), 3))
            worker.push(rows)
            driver.apply_changes(worker)
            seen.append(rows)
    data = np.concatenate(seen)
    assert driver.stats.n == len(data)
    if len(data) > 1:
        np.testing.assert_allclose(driver.stats.mean, data.mean(axis=0), rtol=1e-9)
        np.testing.assert_allclose(driver.stats.var, data.var(axis=0, ddof=1), rtol=1e-9)


def test_filtered_observations_are_standardised_and_clipped():
    """x -> (x - mean) / (std + 1e-8), in float32, clipped when asked."""
    rows = np.random.default_rng(1).normal([10, -3], [2, 5], size=(500, 2))
    made = MeanStdFilter(2, clip=1.5)
    made.push(rows)
    expected = (rows - rows.mean(axis=0)) / (rows.std(axis=0, ddof=1) + 1e-8)
    out = made(rows.astype(np.float32))
    assert out.dtype == np.float32
    np.testing.assert_allclose(out, np.clip(expected, -1.5, 1.5), atol=1e-5)


def test_a_feature_that_never_changed_is_not_enlarged():
    """Its first other value stays what it is; others are standardised."""
    made = MeanStdFilter(3)
    made.push(np.float32([[0, 0.1, 1], [0, 0.1, 3], [0, 0.1, 5]]))
    out = made(np.float32([[1, 0.6, 5]]))
    np.testing.assert_allclose(out, [[1, 0.5, 1]], rtol=1e-5)


def test_a_buffer_is_merged_once_and_handed_over_when_asked():
    """sync copies statistics and buffer; clear_buffer empties the buffer alone."""
    worker = filter_that_saw([1.0, 3.0])
    driver = MeanStdFilter(1)
    driver.apply_changes(worker, with_buffer=True)
    assert driver.buffer.n == 2
    worker.sync(driver)
    worker.clear_buffer()
    driver.apply_changes(worker)
    assert (driver.stats.n, worker.stats.n, worker.buffer.n) == (2, 2, 0)


def test_state_survives_json():
    """A filter made from another's state filters alike."""
    made = filter_that_saw([[1.0, 2.0], [4.0, 0.0]], 2)
    state = json.loads(json.dumps(made.to_json()))
    flat = np.array([[2.0, 2.0]], np.float32)
    np.testing.assert_array_equal(make_filter("MeanStdFilter", 2, state)(flat), made(flat))
    assert NoFilter(2).to_json() is None
    assert make_filter("NoFilter", 2)(flat) is flat


@pytest.mark.parametrize(
    "state",
    [
        [],
        {"kind": "MeanStdFilter"},
        {"kind": "Other", "clip": None, "stats": {"n": 1, "mean": [0.0], "s": [0.0]}},
        {"kind": "MeanStdFilter", "clip": "x", "stats": {"n": 1, "mean": [0.0], "s": [0.0]}},
        {"kind": "MeanStdFilter", "clip": None, "stats": {"n": -1, "mean": [0.0], "s": [0.0]}},
        {"kind": "MeanStdFilter", "clip": None, "stats": {"n": 1, "mean": [0.0, 1.0], "s": [0.0]}},
        {"kind": "MeanStdFilter", "clip": None, "stats": {"n": 1, "mean": [0.0], "s": [-1.0]}},
    ],
)
def test_a_strange_state_is_refused(state):
    """Wrong kinds, sizes and signs raise ValueError."""
    with pytest.raises(ValueError, match="expected"):
        make_filter("MeanStdFilter", 1, state)


@pytest.mark.parametrize("rows", [[[np.nan]], [[np.inf]], [[1.0, 2.0]], [1.0]])
def test_bad_rows_are_refused_and_leave_the_statistics(rows):
    """A NaN would spoil the mean for ever."""
    made = filter_that_saw([1.0])
    with pytest.raises(ValueError, match="filter: expected"):
        made.push(rows)
    assert (made.stats.n, made.stats.mean[0]) == (1, 1.0)


def test_a_concurrent_filter_filters_alike_and_loses_nothing_between_threads():
    """Threads push while others read, merge and take its buffer: the rows taken and left add up to
    all rows, and its state is a MeanStdFilter's.

    Row: observation_filter NoFilter / MeanStdFilter / ConcurrentMeanStdFilter
    """
    made, taken = ConcurrentMeanStdFilter(1), []

    def push(value):
        for _ in range(200):
            made.push([[value]])
            made(np.ones((1, 1), np.float32))

    threads = [threading.Thread(target=push, args=(float(i),)) for i in range(4)]
    for one in threads:
        one.start()
    while any(one.is_alive() for one in threads):
        taken.append(made.take_buffer())
    driver = MeanStdFilter(1)
    for one in [*taken, made]:
        driver.apply_changes(one)
    assert driver.stats.n == made.stats.n == 800
    assert driver.stats.mean[0] == pytest.approx(1.5)
    assert driver.stats.var[0] == pytest.approx(made.stats.var[0])
    same = make_filter("MeanStdFilter", 1, made.to_json())
    flat = np.array([[2.0]], np.float32)
    np.testing.assert_array_equal(same(flat), made(flat))
    twin = made.copy()
    twin.apply_changes(filter_that_saw([1.0]))
    assert (type(twin), twin.stats.n, made.stats.n) == (ConcurrentMeanStdFilter, 801, 800)
    assert type(made.as_serialisable()) is MeanStdFilter
