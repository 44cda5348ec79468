"""The laws of batches of several policies."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.experience.multi_agent_batch import MultiAgentBatch
from storage.experience.sample_batch import BatchError, SampleBatch


def steps(rows: list[tuple[str, int, str]]) -> SampleBatch:
    """A batch of (eps_id, t, agent_id) rows."""
    episode, t, agent = zip(*rows, strict=True) if rows else ([], [], [])
    return SampleBatch(
        eps_id=np.array(episode, object),
        t=np.array(t, np.int64),
        agent_id=np.array(agent, object),
        obs=np.array(t, np.float32).reshape(-1, 1),
    )


@st.composite
def both(draw) -> MultiAgentBatch:
    """Agents a0, a1 by policy "p" and b by policy "q"; episodes interleave, agents come and go."""
    universe = [(e, t, a) for e in ("x", "y", "z") for t in range(4) for a in ("a0", "a1", "b")]
    rows = draw(st.lists(st.sampled_from(universe), unique=True))
    p, q = (steps([row for row in rows if (row[2] == "b") == mine]) for mine in (False, True))
    return MultiAgentBatch({"p": p, "q": q}, len({row[:2] for row in rows}))


def rows_of(batch: MultiAgentBatch) -> dict[str, list[tuple[str, int, str]]]:
    return {
        name: sorted((r["eps_id"], int(r["t"]), r["agent_id"]) for r in rows.rows())
        for name, rows in batch.policy_batches.items()
        if rows
    }


def test_env_steps_and_agent_steps_are_counted_apart():
    """count and len are steps of the environment, agent_steps the sum over agents."""
    batch = MultiAgentBatch({"p": steps([("x", 0, "a0"), ("x", 0, "a1")]), "q": steps([])}, 1)
    assert (batch.count, len(batch), batch.env_steps(), batch.agent_steps()) == (1, 1, 1, 2)
    with pytest.raises(BatchError, match="env_steps: expected 0 or more, got -1"):
        MultiAgentBatch({}, -1)


def test_wrap_as_needed_unwraps_a_lone_default_policy():
    """The same batch object; any other set of policies stays wrapped; `of` wraps again."""
    lone = steps([("x", 0, "a0")])
    assert MultiAgentBatch.wrap_as_needed({"default": lone}, 1) is lone
    assert isinstance(MultiAgentBatch.wrap_as_needed({"p": lone}, 1), MultiAgentBatch)
    assert MultiAgentBatch.of(lone) == MultiAgentBatch({"default": lone}, 1)
    assert MultiAgentBatch.of(MultiAgentBatch.of(lone)) == MultiAgentBatch.of(lone)


@given(st.lists(both(), max_size=4))
def test_concat_adds_rows_by_policy_and_env_steps(batches):
    """No row and no count is lost; policies that only some batches have are kept."""
    whole = MultiAgentBatch.concat_samples(batches)
    assert whole.env_steps() == sum(batch.env_steps() for batch in batches)
    assert whole.agent_steps() == sum(batch.agent_steps() for batch in batches)
    for name, rows in whole.policy_batches.items():
        assert rows["t"].tolist() == [t for b in batches for t in b[name]["t"].tolist()]


def test_concat_takes_batches_of_one_policy_as_the_default_policys():
    """A SampleBatch, as wrap_as_needed returns it for one policy, joins others as a batch of the
    default policy."""
    lone = steps([("x", 0, "a0")])
    whole = MultiAgentBatch.concat_samples([lone, MultiAgentBatch({"p": lone}, 1)])
    assert sorted(whole.policy_batches) == ["default", "p"]
    assert whole.env_steps() == 2


@given(both(), st.integers(1, 5))
def test_timeslices_hold_each_row_once_and_tear_no_step(batch, size):
    """All but the last have `size` env steps; no env step is in two; rows are in order of time."""
    pieces = list(batch.timeslices(size))
    assert [p.env_steps() for p in pieces[:-1]] == [size] * (len(pieces) - 1)
    assert sum(p.env_steps() for p in pieces) == batch.env_steps()
    assert rows_of(MultiAgentBatch.concat_samples(pieces)) == rows_of(batch)
    found = [{row[:2] for rows in rows_of(p).values() for row in rows} for p in pieces]
    assert [len(steps) for steps in found] == [p.env_steps() for p in pieces]
    assert len(set().union(*found)) == batch.env_steps()
    for piece in pieces:
        for rows in piece.policy_batches.values():
            for episode in rows.split_by_episode():
                assert (np.diff(episode["t"]) > 0).all()


@given(both())
def test_split_by_episode_keeps_the_agents_of_an_episode_together(batch):
    """One batch an episode with its own env steps; nothing is lost."""
    pieces = batch.split_by_episode()
    ids = [{r[0] for rows in rows_of(p).values() for r in rows} for p in pieces]
    assert all(len(found) == 1 for found in ids)
    assert len(set().union(*ids)) == len(pieces)
    assert sum(p.env_steps() for p in pieces) == batch.env_steps()
    assert rows_of(MultiAgentBatch.concat_samples(pieces)) == rows_of(batch)


def test_a_batch_without_identity_is_refused_by_policy():
    """timeslices needs to know which rows are one step of the environment."""
    batch = MultiAgentBatch({"p": SampleBatch(t=[0])}, 1)
    with pytest.raises(
        BatchError, match=r"policy 'p': expected the columns .* missing \['eps_id'\]"
    ):
        list(batch.timeslices(1))
    with pytest.raises(BatchError, match="size of 1 or more"):
        list(batch.timeslices(0))


def test_what_holds_for_a_batch_holds_for_each_policy():
    """Copies are their own, compression comes undone, tensors come by policy, a typo is named."""
    batch = MultiAgentBatch({"p": steps([("x", 0, "a0"), ("x", 1, "a0")])}, 2)
    copy = batch.copy()
    copy["p"]["t"][0] = 9
    assert batch["p"]["t"][0] == 0
    shared = batch.copy(shallow=True)
    shared["p"]["more"] = [1, 2]
    assert "more" not in batch["p"]
    assert np.shares_memory(shared["p"]["t"], batch["p"]["t"])
    before = batch.copy()
    batch.compress(bulk=True, codec="zlib")
    assert batch != before
    assert batch.nbytes != before.nbytes
    assert batch.decompress_if_needed() == before
    assert batch.to_torch()["p"]["obs"].tolist() == [[0.0], [1.0]]
    with pytest.raises(KeyError, match=r"no policy 'r'; the policies are \['p'\]"):
        batch["r"]
