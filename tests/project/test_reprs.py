"""Objects that people print have a helpful repr."""

from __future__ import annotations

import inspect
from pathlib import Path

import gymnasium
import numpy as np
import pytest

import headrace
from headrace import (
    BanditConfig,
    Box,
    Dict,
    Discrete,
    Episode,
    Episodes,
    ExternalEnv,
    ImportReport,
    Learner,
    MultiAgentReader,
    ParquetOutputWriter,
    Policy,
    PolicyClient,
    PolicyServerInput,
    PolicySpec,
    Publisher,
    RolloutWorker,
    ShardReader,
    ShardWriter,
    TrainablePolicy,
    Versions,
    WeightStore,
    parse_space,
)
from tests.collector_process import declare

ABSTRACT = {
    "AlgorithmConfig", "AlgorithmConformance", "BaseEnv", "BaseEnvConformance", "Callbacks",
    "EnvRunner", "InputReader", "InputReaderConformance", "Objects", "ObjectsConformance",
    "OutputWriter", "ShardSource", "ShardSourceConformance",
}  # fmt: skip
CLASSES = {
    name: made
    for name, made in ((name, getattr(headrace, name)) for name in headrace.__all__)
    if inspect.isclass(made) and not issubclass(made, BaseException)
}


@pytest.mark.parametrize("name", sorted(CLASSES.keys() - ABSTRACT))
def test_a_public_class_has_a_repr(name: str) -> None:
    assert CLASSES[name].__repr__ is not object.__repr__


def spec() -> PolicySpec:
    return PolicySpec(parse_space("box:4"), parse_space("discrete:2"))


def test_spaces_read_as_they_are_made() -> None:
    """A short one can be pasted; bounds and names are cut after eight."""
    space = Dict({"age": Box((2,), "float32", low=0, high=[1, 9]), "who": Discrete.of(["a", "b"])})
    text = "Dict({'age': Box((2,), 'float32', low=0, high=[1, 9]), 'who': Discrete.of(['a', 'b'])})"
    assert repr(space) == text
    names = {"Dict": Dict, "Box": Box, "Discrete": Discrete}
    assert eval(text, names) == space  # noqa: S307  our own text
    assert repr(parse_space("box:84x84x4:uint8")) == "Box((84, 84, 4), 'uint8', low=0, high=255)"
    assert repr(Discrete(3, start=1)) == "Discrete(3, start=1)"
    many = Discrete.of([f"item-{n}" for n in range(1000)], other="other")
    assert repr(many).endswith("'item-7', ...], other='other')")
    assert repr(Box((9,), low=range(9))).startswith("Box((9,), 'float32', low=[0, 1, 2,")
    assert repr(Box((0,))) == "Box((0,), 'float32', low=[], high=[])"


def test_experience_says_how_much_it_holds() -> None:
    columns = {"obs": np.zeros((3, 2), np.float32), "rewards": np.array([1.0, 0.5, 0.0])}
    episode = Episode(episode_id="a", columns=columns, ended="terminated")
    assert repr(episode) == (
        "Episode('a', 3 steps, reward 1.5, terminated; obs: float32[3, 2], rewards: float64[3])"
    )
    episodes = Episodes.from_flat([1.0, 0.0, 1.0], lengths=[2, 1], target_logp=[0.0, 0.0, 0.0])
    assert repr(episodes) == "Episodes(2 episodes, 3 steps; with target_logp; excluded {})"
    report = ImportReport("log.csv", rows=10, steps=8, episodes=4, rows_left_out=2)
    assert repr(report) == (
        "ImportReport('log.csv': 10 rows, sent 8 steps of 4 episodes; 0 rows known, 2 left out, "
        "0 dropped)"
    )


def test_readers_and_writers_say_where_and_how_far(tmp_path: Path) -> None:
    declare(tmp_path)
    with ShardReader(tmp_path, follow=True) as reader:
        where = f"ShardReader({tmp_path}, mode='transitions', follow=True; 0 rows of 0 shards read"
        assert repr(reader) == where + ")"
    assert repr(reader) == where + "; closed)"
    with MultiAgentReader(tmp_path, follow=True) as several:
        text = "MultiAgentReader(policies default, follow=True; 0 steps of 0 episodes read)"
        assert repr(several) == text
    writer = ParquetOutputWriter(tmp_path, {"default": (Box((4,)), Discrete(2))})
    assert repr(writer) == f"ParquetOutputWriter('{tmp_path}', policies default)"
    assert repr(ShardWriter(tmp_path)) == f"ShardWriter('{tmp_path}', compression='zstd')"


def test_policies_and_weights_say_which_version(tmp_path: Path) -> None:
    policy = Policy(spec(), version=3)
    text = "Policy(Box((4,), 'float32', low=-inf, high=inf) -> Discrete(2), version 3, "
    assert repr(policy).startswith(text)
    trainable = TrainablePolicy(parse_space("box:4"), parse_space("discrete:2"))
    assert repr(trainable).startswith("TrainablePolicy(Box(")
    learner = Learner(policy, BanditConfig())
    assert repr(learner).endswith("version 3; 0 updates, 0 of 0 rows trained)")
    counts = learner.counts
    counts.updates, counts.rows_read, counts.rows_trained = 1, 2_000, 1_500
    assert repr(learner).endswith("version 3; 1 update, 1,500 of 2,000 rows trained)")
    store = WeightStore(tmp_path, "default")
    assert repr(store) == f"WeightStore('{tmp_path}', 'default')"
    digest = store.add_candidate(
        policy.get_weights(), spec=policy.spec.to_json(), metrics={"loss": 0.5}, lineage={}
    )
    short, metrics = digest[:12], "metrics {'loss': 0.5}"
    assert repr(store.candidate(digest)) == f"Candidate('default', digest {short}, {metrics})"
    store.promote(digest)
    assert repr(store.manifest(1)) == (
        f"Manifest('default', version 1, parent None, candidate {short}, {metrics})"
    )
    versions = Versions(live=None, next=2, versions=[{"version": 1}])
    assert repr(versions) == "Versions(live=None, next=2, versions=[1])"


def test_clients_and_their_hosts_say_where_they_are() -> None:
    declared = headrace.PolicyDeclaration(observation=Box((4,)), action=Discrete(2))
    with PolicyServerInput(None, "127.0.0.1", 0, policies=declared) as inputs:
        where = f"PolicyServerInput('{inputs.address}', in memory, policies default"
        assert repr(inputs) == where + ")"
        with PolicyClient(inputs.address) as client:
            client.end_episode(client.start_episode())
            client.flush()
            text = f"PolicyClient('{inputs.address}', 'local', policy_id=None; 2 events acknow"
            assert repr(client) == text + "ledged, 0 waiting)"
        assert repr(client).endswith("; closed)")
    assert repr(inputs) == where + "; closed)"
    assert repr(Publisher("http://127.0.0.1:1")) == "Publisher('http://127.0.0.1:1')"
    env = ExternalEnv(Discrete(2), Discrete(3))
    assert repr(env) == "ExternalEnv(Discrete(2), Discrete(3); not running)"


def test_a_worker_says_what_it_plays() -> None:
    with RolloutWorker(lambda context: gymnasium.make("CartPole-v1")) as worker:
        text = repr(worker)
    assert text.startswith("RolloutWorker(0 of 0, env <")
    assert text.endswith(">; default version -1)")
