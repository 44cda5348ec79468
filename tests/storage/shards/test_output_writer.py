"""Writing sampled batches as shards."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from storage.declarations.declaration import PolicyDeclaration
from storage.declarations.policy_files import load_declarations
from storage.errors import StorageError
from storage.experience.multi_agent_batch import MultiAgentBatch
from storage.experience.sample_batch import BatchError, SampleBatch
from storage.reading.multi_agent_reader import MultiAgentReader
from storage.reading.shard_reader import ShardReader
from storage.shards.output_writer import ParquetOutputWriter
from storage.spaces.descriptors import Box, Dict, Discrete, Text

SPACES = {"default": (Box((2,)), Discrete(3))}


def rows(episode, t, *, ended=None, cut=0, **more):
    """Steps `t` of one episode; the last one ends it as `ended` says."""
    count = len(t)
    last = np.arange(count) == count - 1
    values = np.asarray(t, np.float32)
    columns = {
        "obs": np.stack([values, values], axis=1),
        "new_obs": np.stack([values + 1, values + 1], axis=1),
        "actions": np.asarray(t, np.int64) % 3,
        "rewards": np.asarray(t, np.float64),
        "terminateds": last & (ended == "terminated"),
        "truncateds": last & (ended == "truncated"),
        "cut": np.where(last, cut, 0).astype(np.uint8),
        "has_new_obs": np.ones(count, np.bool_),
        "eps_id": np.full(count, episode, object),
        "t": np.asarray(t, np.int64),
        "action_logp": np.full(count, -1.0),
    }
    return SampleBatch({**columns, **more})


def read(root, **arguments):
    with ShardReader(root, mode="episodes", **arguments) as reader:
        return {(one.episode_id, one.agent_id): one for one in reader.episodes()}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=15)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=5))
def test_fragments_become_episodes_again(tmp_path_factory, sizes):
    """An episode that is written in any number of batches is read as one, from its first step to
    its ending."""
    root = tmp_path_factory.mktemp("shards")
    writer = ParquetOutputWriter(root, SPACES)
    at = 0
    for number, size in enumerate(sizes):
        ended = "terminated" if number == len(sizes) - 1 else None
        writer.write(rows("e", range(at, at + size), ended=ended))
        at += size
    [episode] = read(root).values()
    assert (episode.complete, episode.ended, len(episode)) == (True, "terminated", at)
    assert episode.columns["rewards"].tolist() == list(range(at))
    assert episode.final_obs[""].tolist() == [at, at]


def test_interleaved_episodes_and_their_endings(tmp_path):
    """Truncations, soft horizons and ends that are not recorded as done all end an episode; a cut
    fragment does not."""
    writer = ParquetOutputWriter(tmp_path, SPACES)
    writer.write(rows("whole", range(3), ended="truncated"))
    writer.write(rows("soft", range(2), cut=5))
    writer.write(rows("quiet", range(2), cut=2))
    writer.write(rows("open", range(2), cut=1))
    with ShardReader(tmp_path, mode="episodes", incomplete=True) as reader:
        ended = {one.episode_id: one.ended for one in reader.episodes()}
    assert ended == {"whole": "truncated", "soft": "truncated", "quiet": "truncated", "open": None}


def test_what_a_row_says_is_kept(tmp_path):
    """Raw rewards, sources, versions, known distributions, and the infos that are JSON."""
    infos = np.array([{"a": 1, "odd": object()}, {"b": float("nan")}, {}], object)
    dist = np.array([[0.0, 1.0, 2.0], [np.nan] * 3, [3.0, 4.0, 5.0]], np.float32)
    batch = rows(
        "e",
        range(3),
        ended="terminated",
        raw_rewards=np.array([10.0, 20.0, 30.0]),
        infos=infos,
        action_dist_inputs=dist,
        policy_version=np.array([1, -1, 2]),
        source=np.array(["on_policy", "logged", "on_policy"], object),
    )
    ParquetOutputWriter(tmp_path, SPACES, clock=lambda: 7).write(batch)
    names = ("rewards", "policy_version", "source", "infos", "ts", "action_logp", "t", "obs")
    with ShardReader(tmp_path, columns=names) as reader:
        back = reader.next()
    assert back["rewards"].tolist() == [10, 20, 30]
    assert back["policy_version"].tolist() == [1, -1, 2]
    assert back["source"].tolist() == ["on_policy", "logged", "on_policy"]
    assert back["ts"].tolist() == [7, 7, 7]
    assert [one or None for one in back["infos"]] == ['{"a": 1}', '{"b": null}', None]


def test_policies_with_spaces_of_their_own_have_streams_of_their_own(tmp_path):
    """A MultiAgentBatch is written by policy, and each is read by its id; agents of one episode
    stay apart. Declarations say the spaces."""
    spaces = {"a": SPACES["default"], "b": SPACES["default"]}
    writer = ParquetOutputWriter(tmp_path, spaces)
    two = [np.array(["x"] * 2, object), np.array(["y"] * 2, object)]
    batch = MultiAgentBatch(
        {
            "a": rows("e", range(2), ended="terminated", agent_id=two[0]),
            "b": rows("e", range(2), ended="terminated", agent_id=two[1]),
        },
        2,
    )
    writer.write(batch)
    assert set(load_declarations(tmp_path)) == {"a", "b"}
    assert isinstance(load_declarations(tmp_path)["a"], PolicyDeclaration)
    assert set(read(tmp_path, policy_id="a")) == {("e", "x")}
    assert set(read(tmp_path, policy_id="b")) == {("e", "y")}
    with pytest.raises(BatchError, match=r"expected rows of the policies \['a', 'b'\], got 'c'"):
        writer.write(MultiAgentBatch({"c": rows("e", range(2))}, 2))


def test_composite_spaces_and_texts(tmp_path):
    """A column a leaf, texts of any length."""
    space = Dict((("n", Discrete(5)), ("word", Text(8))))
    batch = rows("e", range(2), ended="terminated")
    for name in ("obs", "new_obs"):
        del batch[name]
        batch[f"{name}.n"] = np.array([1, 2])
        batch[f"{name}.word"] = np.array(["a", "longer"], object)
    ParquetOutputWriter(tmp_path, {"default": (space, Discrete(3))}).write(batch)
    [episode] = read(tmp_path).values()
    assert episode.columns["obs.word"].tolist() == ["a", "longer"]


def test_a_write_that_fails_may_be_tried_again(tmp_path):
    """Nothing is in the shards, and the next try gets the same ordinals: none is missing."""
    writer = ParquetOutputWriter(tmp_path, SPACES)
    (tmp_path / "shards").write_text("in the way")
    with pytest.raises((StorageError, OSError)):
        writer.write(rows("e", range(2)))
    (tmp_path / "shards").unlink()
    writer.write(rows("e", range(2)))
    writer.write(rows("e", range(2, 4), ended="terminated"))
    writer.write(SampleBatch())
    [episode] = read(tmp_path).values()
    assert (episode.complete, len(episode)) == (True, 4)
    with ShardReader(tmp_path) as reader:
        reader.next()
        assert list(reader.ledger.values()) == [[[0, 1]]]


def track(agent, env_t, *, agents=-1, **more):
    """One agent's rows in episode "e" at those steps of the environment, to its end."""
    count = len(env_t)
    column = np.full(count, -1, np.int32)
    column[-1] = agents
    return rows(
        "e",
        range(count),
        ended="terminated",
        agent_id=np.full(count, agent, object),
        env_t=np.asarray(env_t, np.int64),
        agents=column,
        **more,
    )


def test_tracks_of_one_episode_are_joined_again(tmp_path):
    """One writer is one collector: policies of equal spaces share a stream and its ordinals, others
    have one of their own, and the reader puts the agents of an episode together by `env_t`."""
    spaces = {"p": SPACES["default"], "q": SPACES["default"], "r": (Box((2,)), Discrete(9))}
    policies = {
        "p": track("x", [0, 1, 2], agents=3),
        "q": track("y", [1, 2], agents=3),
        "r": track("z", [0, 3]),
    }
    ParquetOutputWriter(tmp_path, spaces).write(MultiAgentBatch(policies, 4))
    with MultiAgentReader(tmp_path) as reader:
        [batch] = reader
        assert reader.stats.partial == {}
    assert (batch.env_steps(), batch.agent_steps()) == (4, 7)
    for name, written in policies.items():
        assert batch[name]["env_t"].tolist() == written["env_t"].tolist()
        assert batch[name]["t"].tolist() == written["t"].tolist()
    streams = {name: set(batch[name]["stream"]) for name in spaces}
    assert streams["p"] == streams["q"] != streams["r"]
    assert len({one.rpartition("-")[0] for found in streams.values() for one in found}) == 1
    with ShardReader(tmp_path, policy_id="q") as reader:
        assert reader.next()["agent_id"].tolist() == ["y", "y"]


def test_a_shared_stream_takes_up_where_a_failed_write_began(tmp_path):
    """After a failed write, the open episodes and ordinals of the other policy in the stream are as
    they were."""
    writer = ParquetOutputWriter(tmp_path, {"p": SPACES["default"], "q": SPACES["default"]})
    names = {n: np.array([n] * 2, object) for n in "pq"}
    for first in (True, False):
        if not first:
            with pytest.raises(KeyError):
                writer.write(MultiAgentBatch({"q": SampleBatch(eps_id=["e"], t=[2])}, 1))
        t, ended = (range(2), None) if first else (range(2, 4), "terminated")
        writer.write(
            MultiAgentBatch({n: rows("e", t, ended=ended, agent_id=names[n]) for n in "pq"}, 2)
        )
    for name in "pq":
        [episode] = read(tmp_path, policy_id=name).values()
        assert (episode.complete, len(episode)) == (True, 4)
    with ShardReader(tmp_path, policy_id="p") as reader:
        reader.next()
        assert list(reader.ledger.values()) == [[[0, 3]]]
