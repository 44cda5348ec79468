"""The laws of reading multi-agent episodes: each step once, and only complete episodes.

Also of `storage.reading.agent_joiner`.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.experience.interfaces import EndOfInput, ReaderError, ReaderState
from storage.experience.multi_agent_batch import MultiAgentBatch
from storage.reading.multi_agent_reader import MultiAgentReader
from storage.reading.shard_reader import ShardReader
from tests.storage.multi_agent_log import COLLECTOR, SPACES, JointLog, Run

HOUR = 3_600_000_000  # us
LONG = 30.0  # s; a limit that only a broken build reaches


@pytest.fixture
def log(tmp_path):
    return JointLog(tmp_path)


def trade(name: str = "e", **changes: Any) -> list[Run]:
    """A seller from the start, a buyer that joins at 2, a scout that leaves before the end."""
    runs = [
        Run(name, "s", "seller", (0, 1, 2, 3), agents=3),
        Run(name, "b", "buyer", (2, 3), "truncated", agents=3),
        Run(name, "c", "scout", (0, 2)),
    ]
    return [replace(run, **changes) for run in runs]


def rows_of(batches: Iterable[MultiAgentBatch]) -> list[tuple[str, str, int]]:
    return [
        (row["eps_id"], row["agent_id"], int(row["env_t"]))
        for batch in batches
        for rows in batch.policy_batches.values()
        for row in rows.rows()
    ]


def steps_of(runs: Iterable[Run]) -> list[tuple[str, str, int]]:
    return sorted(step for run in runs for step in run.steps)


def read_all(root: Path, **options: Any) -> list[MultiAgentBatch]:
    with MultiAgentReader(root, **options) as reader:
        return list(reader)


# --- what a batch is -------------------------------------------------------------------------


def test_tracks_of_three_policies_are_one_episode(log):
    """`env_steps` counts the environment's steps, `agent_steps` those of all agents.

    Each policy has its own spaces; `t` counts an agent's steps, `env_t` the environment's.
    """
    log.write(*trade())
    (batch,) = read_all(log.root)
    assert (batch.env_steps(), batch.agent_steps()) == (4, 8)
    assert sorted(batch.policy_batches) == ["buyer", "scout", "seller"]
    assert batch["buyer"]["obs"].shape == (2, 3)
    assert batch["buyer"]["env_t"].tolist() == [2, 3]
    assert batch["buyer"]["t"].tolist() == [0, 1]
    assert batch["scout"]["env_t"].tolist() == [0, 2]
    assert set(batch["scout"]["policy_id"]) == {"scout"}
    assert "agents" not in batch["buyer"]
    slices = list(batch.timeslices(1))
    assert [piece.agent_steps() for piece in slices] == [2, 1, 3, 2]
    assert [piece.agent_steps() for piece in batch.split_by_episode()] == [8]


def test_two_agents_of_one_policy_stay_apart(log):
    """A policy's rows are ordered by agent and then by t, as learners need them."""
    pair = [Run("e", name, "seller", (0, 1, 2), agents=2) for name in ("b", "a")]
    log.write(*pair)
    (batch,) = read_all(log.root)
    assert (batch.env_steps(), batch.agent_steps()) == (3, 6)
    assert batch["seller"]["agent_id"].tolist() == ["a"] * 3 + ["b"] * 3
    assert batch["seller"]["t"].tolist() == [0, 1, 2] * 2
    assert [one.count for one in batch["seller"].split_by_episode()] == [3, 3]


def test_the_same_id_at_two_collectors_is_two_episodes(log, tmp_path):
    """The collector is part of an episode's identity."""
    JointLog(tmp_path / "other", "b" * 12).write(*trade())
    log.write(*trade())
    (batch,) = read_all([log.root, tmp_path / "other"])
    assert (batch.env_steps(), batch.agent_steps()) == (8, 16)
    assert [piece.env_steps() for piece in batch.split_by_episode()] == [4, 4]


def test_tracks_of_two_collectors_never_make_an_episode(log, tmp_path):
    """Tracks of one collector never complete an episode of another."""
    JointLog(tmp_path / "other", "b" * 12).write(*trade()[2:])
    log.write(*trade()[:2])
    with MultiAgentReader([log.root, tmp_path / "other"]) as reader:
        assert list(reader) == []
        assert reader.stats.waiting == 2


def test_an_id_that_is_used_again_is_another_episode(log):
    """The rows of both are returned, and neither episode takes an agent of the other."""
    log.write(*trade(), *trade())
    batches = read_all(log.root, batch_size=1)
    assert [batch.env_steps() for batch in batches] == [4, 4]
    assert [batch.agent_steps() for batch in batches] == [8, 8]


def test_a_single_agent_episode_acts_in_every_step(log):
    """An episode without `env_t` is returned at once, with `t` instead."""
    alone = Run("alone", "agent0", "buyer", (0, 1, 2), more={"env_t": b""})
    log.write(alone, *trade())
    batches = read_all(log.root, batch_size=1)
    assert sorted(batch.env_steps() for batch in batches) == [3, 4]
    assert sorted(rows_of(batches)) == steps_of([alone, *trade()])


# --- what waits ------------------------------------------------------------------------------


@pytest.mark.parametrize("late", [0, 1, 2])
def test_an_episode_waits_for_the_shard_that_comes_much_later(log, late):
    """No part of the episode is returned before its last track; other episodes are.

    Any track may be the late one, also one without the number of agents.
    """
    runs = trade()
    last = runs.pop(late)
    log.write(*runs, *trade("whole"))
    reader = MultiAgentReader(log.root, follow=True, eager=True, poll_interval=0.05)
    with reader:
        first = reader.next(LONG)
        assert {step[0] for step in rows_of([first])} == {"whole"}
        assert reader.next(0.1).env_steps() == 0
        assert reader.stats.waiting == 1
        log.write(last)
        second = reader.next(LONG)
        assert sorted(rows_of([second])) == steps_of(trade())
        assert (second.env_steps(), reader.stats.waiting) == (4, 0)
        assert reader.stats.partial == {}


@pytest.mark.parametrize("ended", ["abandoned", "broken"])
def test_a_stopped_episode_blocks_nothing_and_comes_after_the_patience(log, ended):
    """An episode without a number of agents is returned after a pause, and counted."""
    lost = trade("lost", ended=ended, agents=-1)
    log.write(*lost, *trade("whole"))
    options = {"follow": True, "eager": True, "poll_interval": 0.05, "patience": 0.2}
    with MultiAgentReader(log.root, **options) as reader:
        assert {step[0] for step in rows_of([reader.next(LONG)])} == {"whole"}
        found = reader.next(LONG)
        assert sorted(rows_of([found])) == steps_of(lost)
        assert (found.env_steps(), reader.stats.partial) == (4, {"stopped": 1})
        assert reader.next(0.3).env_steps() == 0


def test_a_finite_reading_takes_abandoned_episodes_that_are_old_enough(log):
    """A recent incomplete episode stays in the position for the next reader."""
    lost = trade("lost", ended="abandoned", agents=-1)
    log.write(*lost)
    with MultiAgentReader(log.root, clock=lambda: 59_000_000) as reader:
        with pytest.raises(EndOfInput):
            reader.next()
        state = json.loads(json.dumps(reader.state_dict()))
    with MultiAgentReader(log.root, state=state, clock=lambda: HOUR) as reader:
        assert sorted(rows_of(reader)) == steps_of(lost)
        assert reader.stats.partial == {"stopped": 1}


def test_agents_that_left_early_wait_for_those_who_stay(log):
    """An agent that leaves early does not make its episode count as abandoned."""
    log.write(*trade()[2:])
    with MultiAgentReader(log.root, clock=lambda: HOUR, patience=0.0) as reader:
        assert list(reader) == []
        assert reader.stats.waiting == 1
    with MultiAgentReader(log.root, incomplete=True) as reader:
        assert sorted(rows_of(reader)) == steps_of(trade()[2:])
        assert reader.stats.partial == {"end": 1}


def test_what_waits_is_bounded_and_the_longest_waiting_is_handed_over(log):
    """At most the limit waits, even if episodes stay incomplete, and nothing is lost."""
    early = [run for i in range(40) for run in trade(f"e{i:02}")[2:]]
    for run in early:
        log.write(run)
    with MultiAgentReader(log.root, follow=True, eager=True, most_waiting_bytes=2_000) as reader:
        found, held = [], []
        while len(found) < 25:
            found.append(reader.next(5.0))
            assert found[-1].env_steps()
            held.append(reader.stats.waiting_bytes)
        assert 0 < max(held) <= 2_000
        assert reader.stats.partial["memory"] >= 25
        names = [step[0] for step in rows_of(found)]
        assert names == sorted(names)


# --- each step once --------------------------------------------------------------------------


@st.composite
def histories(draw: st.DrawFn) -> list[Run]:
    """Episodes whose agents come late, leave early, take turns, are cut in parts or abandoned."""
    runs = []
    for number in range(draw(st.integers(1, 5))):
        length = draw(st.integers(1, 6))
        abandoned = draw(st.integers(0, 5)) == 0
        count = draw(st.integers(1, 4))
        stays = draw(st.integers(0, count - 1))  # at least one agent is present at the end
        for agent in range(count):
            acted = draw(st.sets(st.integers(0, length - 1), min_size=1))
            over = agent == stays or draw(st.booleans())
            ended = "abandoned" if abandoned and over else "terminated"
            runs.append(
                Run(
                    f"e{number}",
                    f"a{agent}",
                    draw(st.sampled_from(sorted(SPACES))),
                    tuple(sorted(acted)),
                    ended,
                    count if over and not abandoned else -1,
                    tuple(draw(st.lists(st.integers(1, 5), max_size=2))),
                )
            )
    return runs


def scatter(root: Path, runs: list[Run], rnd: Any) -> None:
    """Seal the runs in any order, and write the parts of each stream in shards of any size."""
    log = JointLog(root)
    shuffled = list(runs)
    rnd.shuffle(shuffled)
    for canonical, sealed in log.seal(shuffled).items():
        parts = [part for found in sealed for part in found]
        while parts:
            size = rnd.randint(1, 4)
            log.shard(canonical, parts[:size])
            parts = parts[size:]


@settings(max_examples=40, deadline=None)
@given(histories(), st.integers(1, 12), st.randoms(use_true_random=False), st.booleans())
def test_every_step_comes_once_and_every_env_step_is_counted_once(runs, size, rnd, shuffled):
    """Each step and each episode is in one batch, for any batch size and any shards.

    `env_steps` add up to the environment's steps.
    """
    with tempfile.TemporaryDirectory() as folder:
        scatter(Path(folder), runs, rnd)
        batches = read_all(Path(folder), batch_size=size, shuffle=3 * shuffled, seed=1)
    assert sorted(rows_of(batches)) == steps_of(runs)
    assert sum(b.env_steps() for b in batches) == len(
        {(r.episode_id, t) for r in runs for t in r.env_t}
    )
    names = [{step[0] for step in rows_of([batch])} for batch in batches]
    assert max(Counter(name for found in names for name in found).values()) == 1
    for batch in batches:
        assert sum(piece.env_steps() for piece in batch.timeslices(2)) == batch.env_steps()
        assert sum(p.agent_steps() for p in batch.split_by_episode()) == batch.agent_steps()
        for rows in batch.policy_batches.values():
            for one in rows.split_by_episode():
                assert one["t"].tolist() == list(range(one.count))
                assert all(a < b for a, b in pairwise(one["env_t"].tolist()))
    assert all(batch.env_steps() >= size for batch in batches[:-1])


@settings(max_examples=30, deadline=None)
@given(
    histories(),
    st.integers(1, 6),
    st.lists(st.integers(0, 3), min_size=1, max_size=4),
    st.randoms(use_true_random=False),
    st.booleans(),
)
def test_a_reading_that_stops_and_goes_on_is_the_same_reading(runs, size, stops, rnd, shuffled):
    """Resuming from any position, saved as JSON, gives the batches of one uninterrupted reading.

    No row is lost or repeated, and the order is the same.
    """
    options: dict[str, Any] = {"batch_size": size, "shuffle": 4 * shuffled, "seed": 3}
    with tempfile.TemporaryDirectory() as folder:
        scatter(Path(folder), runs, rnd)
        whole = [rows_of([batch]) for batch in read_all(Path(folder), **options)]
        found, state = [], None
        for stop in [*stops, 99]:
            with MultiAgentReader(Path(folder), state=state, **options) as reader:
                for _ in range(stop):
                    try:
                        found.append(rows_of([reader.next()]))
                    except EndOfInput:
                        break
                state = json.loads(json.dumps(reader.state_dict()))
    assert found == whole


def test_a_shuffled_reading_goes_on_with_its_own_random_numbers(log):
    """The seed decides the order, also after resuming; another seed gives another order."""
    log.write(*(run for i in range(40) for run in trade(f"e{i:02}")))

    def order(seed: int, stop: int) -> list[str]:
        options: dict[str, Any] = {"batch_size": 4, "shuffle": 40, "seed": seed}
        with MultiAgentReader(log.root, **options) as reader:
            found = [reader.next()["buyer"]["eps_id"][0] for _ in range(stop)]
            state = json.loads(json.dumps(reader.state_dict()))
        with MultiAgentReader(log.root, state=state, **options) as reader:
            return found + [batch["buyer"]["eps_id"][0] for batch in reader]

    assert order(1, 7) == order(1, 0) == order(1, 25)
    assert sorted(order(1, 7)) == [f"e{i:02}" for i in range(40)]
    assert order(1, 0) != order(2, 0) != sorted(order(2, 0))


@settings(max_examples=15, deadline=None)
@given(histories(), st.integers(1, 6), st.randoms(use_true_random=False))
def test_a_root_that_grows_between_readings_gives_each_step_once(runs, size, rnd):
    """Tracks that wait for others stay in the position until the others arrive."""
    lost = {run.episode_id for run in runs if run.ended == "abandoned"}
    runs = [run for run in runs if run.episode_id not in lost]
    found: list[tuple[str, str, int]] = []
    steps, state = 0, None
    with tempfile.TemporaryDirectory() as folder:
        log = JointLog(Path(folder))
        rnd.shuffle(runs)
        for run in runs:
            log.write(run)
            options = {"batch_size": size, "state": state}
            with MultiAgentReader(Path(folder), **options) as reader:
                for batch in reader:
                    steps += batch.env_steps()
                    found += rows_of([batch])
                state = json.loads(json.dumps(reader.state_dict()))
    assert sorted(found) == steps_of(runs)
    assert steps == len({(run.episode_id, t) for run in runs for t in run.env_t})


def test_a_position_taken_while_following_names_what_waits(log):
    """Waiting tracks and complete episodes not yet returned are read again, once."""
    runs = trade("later")
    log.write(*trade("one"), *trade("two"), runs[0])
    options: dict[str, Any] = {"follow": True, "batch_size": 4, "poll_interval": 0.05}
    with MultiAgentReader(log.root, **options) as reader:
        first = reader.next(LONG)
        state = json.loads(json.dumps(reader.state_dict()))
        assert (len(state["ready"]), len(state["waiting"])) == (1, 1)
    log.write(*runs[1:])
    with MultiAgentReader(log.root, state=state, **options) as reader:
        rest = [reader.next(LONG), reader.next(LONG)]
        assert reader.next(0.1).env_steps() == 0
    assert sorted(rows_of([first, *rest])) == steps_of([*trade("one"), *trade("two"), *runs])


# --- choosing --------------------------------------------------------------------------------


def test_episodes_that_are_not_for_training_are_passed_over_whole(log):
    """`training_enabled=False`, tags and `select` exclude all tracks of an episode alike."""
    hidden = trade("hidden", more={"training_enabled": False})
    tagged = trade("tagged", more={"tags": '{"tenant":"x"}'})
    log.write(*hidden, *tagged, *trade("plain"))

    def names(**options: Any) -> set[str]:
        return {step[0] for step in rows_of(read_all(log.root, **options))}

    assert names() == {"tagged", "plain"}
    assert names(training_disabled=True) == {"hidden", "tagged", "plain"}
    assert names(tags={"tenant": "x"}) == {"tagged"}
    assert names(select=lambda batch: batch["eps_id"] == "plain") == {"plain"}
    with MultiAgentReader(log.root, tags={"tenant": "x"}) as reader:
        assert sum(batch.agent_steps() for batch in reader) == 8
        left_out = reader.stats.readers["buyer"].excluded
        assert left_out == {"training_disabled": 2, "tags": 2}
        assert reader.stats.waiting == 0


@pytest.mark.parametrize("policy_id", sorted(SPACES))
def test_a_single_policys_reader_gives_its_tracks_alone(log, policy_id):
    """Each row of the policy is returned once, also after resuming.

    Another policy's rows in the same stream are counted as excluded.
    """
    runs = [run for i in range(6) for run in trade(f"e{i}")]
    for i in range(0, len(runs), 5):
        log.write(*runs[i : i + 5])
    mine = [run for run in runs if run.policy_id == policy_id]
    found, state = [], None
    for _ in range(20):
        with ShardReader(log.root, policy_id=policy_id, batch_size=3, state=state) as reader:
            try:
                batch = reader.next()
            except EndOfInput:
                break
            assert set(batch["policy_id"]) == {policy_id}
            found += zip(
                batch["eps_id"].tolist(),
                batch["agent_id"].tolist(),
                batch["t"].tolist(),
                strict=True,
            )
            state = json.loads(json.dumps(reader.state_dict()))
    expected = [(r.episode_id, r.agent_id, t) for r in mine for t in range(len(r.env_t))]
    assert sorted(found) == sorted(expected)
    with ShardReader(log.root, policy_id=policy_id) as reader:
        assert sum(batch.count for batch in reader) == len(expected)
        others = sum(len(run.env_t) for run in runs) - len(expected)
        assert sum(reader.stats.excluded.values()) == others


def test_columns_can_be_chosen_and_identity_stays(log):
    """The columns that identify a row's step are always included."""
    log.write(*trade())
    (batch,) = read_all(log.root, columns=("rewards", "agents"))
    identity = {"eps_id", "agent_id", "stream", "ordinal", "episode_ordinal", "t", "env_t"}
    assert set(batch["buyer"]) == {"rewards", "agents", *identity}
    assert batch["buyer"]["agents"].tolist() == [-1, 3]
    assert batch["buyer"]["stream"][0].startswith(COLLECTOR)


def test_names_stand_for_codes_if_asked_for(log):
    """Names are as in a single policy's reader, also after a restart; other spaces keep codes."""
    log.write(*trade(), *trade("f"))
    (batch,) = read_all(log.root)
    assert batch["buyer"]["actions"].tolist() == [0, 1, 0, 1]
    with MultiAgentReader(log.root, names=True, batch_size=1) as reader:
        first, state = reader.next(), reader.state_dict()
    with MultiAgentReader(log.root, names=True, state=state) as reader:
        for batch in (first, *reader):
            assert batch["buyer"]["actions"].tolist() == ["pass", "buy"]
            assert batch["seller"]["actions"].tolist() == [0, 1, 0, 1]


def test_settings_and_positions_that_do_not_fit_are_refused(log, tmp_path):
    """The text names what was expected; a reader of other policies' positions refuses."""
    with pytest.raises(ValueError, match=r"policies: expected some of .*got .'nobody'"):
        MultiAgentReader(log.root, policies=["nobody"])
    with pytest.raises(ValueError, match="none declared under"):
        MultiAgentReader(tmp_path / "empty")
    with pytest.raises(ReaderError, match="batch_size: expected 1 or more, got 0"):
        MultiAgentReader(log.root, batch_size=0)
    with MultiAgentReader(log.root, policies=["buyer"]) as reader:
        state = reader.state_dict()
    for wrong in (
        state,
        {**state, "version": 0},
        {**state, "more": 1},
        [],
        {**state, "ready": [[1]]},
    ):
        reader = MultiAgentReader(log.root)
        with pytest.raises(ReaderState, match="position"), reader:
            reader.load_state_dict(wrong)
    reader = MultiAgentReader(log.root)
    reader.close()
    with pytest.raises(ReaderError, match="closed"):
        reader.next()


def test_rows_are_what_they_were(log):
    """Values, rewards and next observations are those of the agent's own steps."""
    log.write(*trade(cuts=(1,)))
    (batch,) = read_all(log.root)
    seller = batch["seller"]
    assert seller["rewards"].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert seller["obs"][:, 0].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert seller["has_new_obs"].tolist() == [False, True, True, True]  # the part ends at row 0
    assert seller["new_obs"][1:3, 0].tolist() == [2.0, 3.0]
    assert seller["terminateds"].tolist() == [False] * 3 + [True]
    assert np.isfinite(seller["action_logp"]).all()
