"""Construction of a rollout worker.

Also of `policy.worker.policy_map`.
"""

from __future__ import annotations

import json
import logging
import os
from typing import ClassVar

import gymnasium as gym
import numpy as np
import pytest

from policy.algorithms.ppo import PPOConfig
from policy.algorithms.trainable_policy import PolicySettings, TrainablePolicy
from policy.envs.env_context import EnvContext
from policy.inference.filters import ConcurrentMeanStdFilter, MeanStdFilter, NoFilter
from policy.inference.numpy_policy import NumpyPolicy
from policy.inference.spec import ModuleSpec, PolicySpec
from policy.worker.batch_io import NoopOutput
from policy.worker.env_creation import seed_of
from policy.worker.rollout_worker import RolloutWorker
from policy.worker.settings import DROPPED, WorkerSettings
from storage.spaces.descriptors import Box, Discrete
from tests.policy.toy_envs import AgentsEnv, BoxEnv, CountEnv, DictEnv


def worker(**arguments):
    return RolloutWorker(**{"env_creator": CountEnv, "rollout_fragment_length": 4} | arguments)


def test_every_copy_is_made_with_its_own_context():
    """The context is a dict of the env_config with the worker's and the copy's index; the creator
    is called once per copy.

    Row: env_creator(EnvContext), env_config, worker_index, vector_index, remote
    """
    seen = []

    def create(context):
        seen.append((dict(context), context.worker_index, context.vector_index, context.remote))
        return CountEnv(context)

    with worker(env_creator=create, env_config={"length": 3}, worker_index=2, num_envs=3):
        assert seen == [({"length": 3}, 2, i, False) for i in range(3)]
    context = EnvContext({"a": 1}, 4, 5, True, 6)
    other = context.copy_with_overrides(env_config={"b": 2}, vector_index=7)
    assert (other, other.worker_index, other.vector_index) == ({"b": 2}, 4, 7)
    assert (other.remote, other.num_workers, context.vector_index) == (True, 6, 5)


class Named(TrainablePolicy):
    """Records the order in which policies are built."""

    built: ClassVar[list] = []
    config_keys = ("name", "extra")

    def __init__(self, observation_space, action_space, config):
        super().__init__(observation_space, action_space, config)
        self.built.append((config["name"], config["worker_index"], config["num_workers"]))


def test_policies_are_built_in_the_order_of_their_ids_with_merged_configs():
    """The policy's own config overrides policy_config, and the worker's indices are added; a class
    is the default policy, under any of the argument's names.

    Row: policy: class or {id: (cls, obs_space, act_space, config)}
    """
    Named.built.clear()
    spaces = AgentsEnv.observation_space, AgentsEnv.action_space
    forms = {"z": (Named, *spaces, {"name": "z"}), "a": (Named, *spaces, {})}
    with worker(
        env_creator=AgentsEnv,
        policies=forms,
        policy_mapping_fn=lambda agent: "a",
        policy_config={"name": "shared", "extra": 1},
        worker_index=1,
        num_workers=3,
    ) as made:
        assert Named.built == [("shared", 1, 3), ("z", 1, 3)]
        assert list(made.policies) == ["a", "z"]
        assert made.policies["z"].config["extra"] == 1
    with worker(policy_graph=TrainablePolicy) as made:
        assert list(made.policies) == ["default"]


def test_a_spec_is_a_policy_too():
    """A PolicySpec has module and filter; it must fit the environment's spaces.

    Row: policy: class or {id: (cls, obs_space, act_space, config)}
    """
    spec = PolicySpec(Box((1,), "float32", 0, 1000), Discrete(2), ModuleSpec(hidden=(8,)))
    with worker(policy=spec) as made:
        assert made.get_policy().spec == spec
    with pytest.raises(ValueError, match="expected a class, a PolicySpec or"):
        worker(policy=3)
    with pytest.raises(ValueError, match="expected a subclass of TrainablePolicy"):
        worker(policy=type("Other", (), {"__init__": lambda self, *args: None}))
    with pytest.raises(ValueError, match="spec: expected the spaces"):
        TrainablePolicy(Box((3,)), Discrete(2), {"spec": spec})
    with pytest.raises(ValueError, match="expected its spaces"):
        RolloutWorker(policy=TrainablePolicy)


def test_one_agent_has_one_policy():
    """Several policies need an environment of several agents.

    Row: several policies but env not multi-agent
    """
    with pytest.raises(ValueError, match="2 policies, but the environment is not a multi-agent"):
        worker(policy={"a": None, "b": None}, policy_mapping_fn=lambda agent: "a")


def test_what_is_of_tensorflow_names_its_replacement():
    """NotImplementedError names the alternative; None, the old default, is accepted.

    Row: tf_session_creator, tf paths, import_policy_model_from_h5
    """
    for name in DROPPED:
        with pytest.raises(NotImplementedError, match=f"{name}: .*(set_weights|state_dict)"):
            worker(**{name: object()})
    with (
        worker(tf_session_creator=None) as made,
        pytest.raises(NotImplementedError, match="set_weights"),
    ):
        made.import_policy_model_from_h5("weights.h5")


def test_unknown_arguments_and_values_are_refused():
    """Each error says what was expected."""
    for wrong, text in (
        ({"rollout_fragment_length": 0}, "rollout_fragment_length: expected an integer >= 1"),
        ({"num_envs": 1.5}, "num_envs: expected an integer"),
        ({"clip_rewards": "half"}, "clip_rewards: expected"),
        ({"observation_filter": "Other"}, "observation_filter: expected one of"),
        ({"log_level": "LOUD"}, "log_level: expected"),
        ({"remote_env_batch_wait_ms": -1}, "remote_env_batch_wait_ms"),
        ({"episode_horizon": 0}, "episode_horizon: expected 1 or more"),
        ({"policies_to_train": ["b"]}, "policies_to_train: expected some of"),
        (
            {"policies_to_train": "default"},
            "policies_to_train: expected a list of ids, got 'default'",
        ),
    ):
        with pytest.raises(ValueError, match=text):
            worker(**wrong)
    with pytest.raises(TypeError, match=r"unknown arguments \['num_copies'\]"):
        worker(num_copies=2)
    with pytest.raises(TypeError, match=r"near horizon: episode_horizon, soft_horizon$"):
        worker(horizon=5)
    with pytest.raises(TypeError, match=r"num_gpus is an argument of as_remote\(num_gpus=...\)"):
        worker(num_gpus=1)
    with pytest.raises(TypeError, match=r"unknown arguments \['train_batch_callbacks'\]"):
        worker(train_batch_callbacks={})
    with pytest.raises(TypeError, match="got two"):
        worker(policy=None, policies=TrainablePolicy, policy_graph=TrainablePolicy)
    with pytest.raises(ValueError, match="expected an environment, got None"):
        worker(env_creator=lambda context: None)


def test_composite_observations_are_flattened_unless_that_is_off():
    """Dict observations reach the network flat and the batch raw, with a column per leaf. Without a
    preprocessor they are refused, and plain ones pass.

    Row: preprocessor_pref, preprocessors
    """
    for preference in ("flatten", "rllib", "deepmind"):
        with worker(env_creator=DictEnv, preprocessor_pref=preference) as made:
            batch = made.sample()
            assert made.get_policy().spec.flattener.size == 5
            assert batch["obs.gear"].tolist() == [0, 1, 2, 0]
            assert batch["obs.speed"].shape == (4, 2)
            assert batch["new_obs.gear"].tolist() == [1, 2, 0, 1]
    with pytest.raises(ValueError, match="raw Dict or Tuple"):
        worker(env_creator=DictEnv, preprocessors=None)
    with worker(preprocessors=None) as made:
        assert made.sample()["obs"].shape == (4, 1)


def test_filters_see_every_observation_and_batches_keep_the_raw_ones():
    """The filter learns from each observation that the policy acts on, and the policy sees it
    filtered. The stored logp is that of the filtered observation; the batch holds the raw one.

    Row: observation_filter NoFilter / MeanStdFilter / ConcurrentMeanStdFilter
    """
    kinds = {"NoFilter": NoFilter, "MeanStdFilter": MeanStdFilter}
    kinds["ConcurrentMeanStdFilter"] = ConcurrentMeanStdFilter
    for name, kind in kinds.items():
        with worker(observation_filter=name) as made:
            assert type(made.get_policy().filter) is kind
            batch = made.sample()
            assert batch["obs"][:, 0].tolist() == [0, 1, 2, 3]
            if name != "NoFilter":
                stats = made.get_policy().filter.stats
                assert (stats.n, stats.mean[0]) == (4, 1.5)
                # at t = 0 one observation, 0, has been seen: the filter gives 0
                zero = made.get_policy().actor().dist_inputs(np.zeros((1, 1), np.float32))
                np.testing.assert_allclose(batch["action_dist_inputs"][:1], zero, atol=1e-6)
    for in_a_thread in ({"sample_async": True}, {"input_evaluation": ["simulation"]}):
        with pytest.raises(ValueError, match="ConcurrentMeanStdFilter"):
            worker(**in_a_thread, observation_filter="MeanStdFilter")
    spec = PolicySpec(Box((1,), "float32", 0, 1000), Discrete(2))
    with pytest.raises(ValueError, match="the spec says 'NoFilter'"):
        worker(policy=spec, observation_filter="MeanStdFilter")


def test_a_seed_reaches_every_copy_and_makes_weights_alike():
    """Copy i of worker w is first reset with seed + 10007 w + i, later without a seed. Two workers
    with one seed have the same weights, and one worker repeats its actions.

    Row: seed
    """
    made = []
    arguments = {"env_config": {"made": made}, "seed": 5, "worker_index": 1, "num_envs": 2}
    with worker(**arguments, env_creator=lambda c: CountEnv(c)) as first:
        one = first.sample()
        assert [env.seeds[0] for env in made] == [10012, 10013]
        first.sample()
        assert made[0].seeds[1:] == [None]
    with worker(**arguments) as again:
        assert (again.sample()["actions"] == one["actions"]).all()
    assert seed_of(WorkerSettings(env_creator=None), 3) is None
    with worker(seed=5, worker_index=0) as zero:
        weights = zero.get_weights()["default"]
        for name, array in first.get_weights()["default"].items():
            np.testing.assert_array_equal(weights[name], array)


def test_who_takes_a_lost_ones_place_does_not_play_its_episodes_again():
    """The replacement of a lost worker has other seeds and actions than every worker before,
    however many were lost."""
    arguments = {"seed": 5, "worker_index": 1, "num_workers": 2, "num_envs": 4}
    with worker(**arguments) as lost, worker(**arguments, incarnation=1) as follower:
        assert (lost.sample()["actions"] != follower.sample()["actions"]).any()
    seeds = {
        seed_of(WorkerSettings(seed=5, worker_index=w, num_workers=2, incarnation=n), copy)
        for w in range(3)
        for n in range(3)
        for copy in range(4)
    }
    assert len(seeds) == 3 * 3 * 4
    with pytest.raises(ValueError, match="incarnation: expected an integer >= 0, got -1"):
        WorkerSettings(incarnation=-1)


class Pictures(CountEnv):
    """Renders a small picture."""

    render_mode = "rgb_array"
    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012  gymnasium's way

    def render(self):
        return np.zeros((16, 16, 3), np.uint8)


def test_monitoring_puts_statistics_into_the_last_info(tmp_path, caplog):
    """gymnasium's statistics are in an episode's last info; environments that render are recorded
    under the path.

    Row: monitor_path
    """
    with worker(monitor_path=str(tmp_path), rollout_fragment_length=5) as made:
        info = made.sample()["infos"][-1]
        assert (info["episode"]["l"], info["episode"]["r"]) == (5, 15.0)
    with worker(env_creator=Pictures, monitor_path=str(tmp_path)) as made:
        recorded = any(isinstance(env, gym.wrappers.RecordVideo) for env in wrappers(made.env))
        # videos need a package that Headrace does not: without it there are statistics
        assert recorded or "statistics without videos: moviepy" in caplog.text


def wrappers(env):
    while isinstance(env, gym.Wrapper):
        yield env
        env = env.env


def test_process_settings_and_the_fake_sampler(tmp_path):
    """log_dir is passed to the creators of input and output, log_level to the package's logger, the
    extra environment variables to the process. A fake sampler plays once and repeats its first
    batch.

    Row: log_dir, log_level, extra_python_environs, fake_sampler
    """
    seen = []

    def given(ioctx):
        seen.append(ioctx.log_dir)
        return ioctx.default_sampler_input()

    before = logging.getLogger("headrace.worker").level
    with worker(
        log_dir=str(tmp_path),
        log_level="WARN",
        extra_python_environs={"HEADRACE_TEST_EXTRA": "1"},
        fake_sampler=True,
        input_creator=given,
    ) as made:
        assert (seen, os.environ.pop("HEADRACE_TEST_EXTRA")) == ([str(tmp_path)], "1")
        assert logging.getLogger("headrace.worker").level == logging.WARNING
        first = made.sample()
        first["obs"][:] = 9
        second = made.sample()
        assert second["eps_id"].tolist() == first["eps_id"].tolist()
        assert second["obs"][:, 0].tolist() == [0, 1, 2, 3]
    logging.getLogger("headrace.worker").setLevel(before)


def test_models_and_policies_are_configured_by_dicts_or_dataclasses():
    """model_config takes current or old keys for layers; policy_config has the fields of
    PolicySettings; the typed form gives the same result.

    Row: model_config, policy_config
    """
    old = {"fcnet_hiddens": (16,), "fcnet_activation": "relu"}
    with worker(model_config=old, policy_config={"algorithm": PPOConfig(gamma=0.5)}) as made:
        policy = made.get_policy()
        assert policy.spec.module == ModuleSpec(hidden=(16,), activation="relu")
        assert policy.algorithm.config.gamma == 0.5
    settings = PolicySettings(module=ModuleSpec(hidden=()), seed=3)
    form = (None, None, None, settings)
    with worker(policy={"default": form}) as made:
        assert made.get_policy().spec.module.hidden == ()
    typed = TrainablePolicy(Box((1,)), Discrete(2), settings)
    assert typed.spec.module.hidden == ()
    for model, text in (({"layers": 3}, "expected hidden"), (3, "expected a dict")):
        with pytest.raises(ValueError, match=text):
            worker(model_config={}, policy_config={"model": model})
    with pytest.raises(ValueError, match="algorithm: expected a PPOConfig"):
        PolicySettings(algorithm="ppo")


class Reading(TrainablePolicy):
    """Reads a key of its own."""

    config_keys = ("bonus",)


def test_a_key_that_nothing_reads_is_refused_with_the_nearest_name():
    """In policy_config, in a policy's own config and in a policy without a worker. The common
    config may have a key that one of the classes reads.

    Row: model_config, policy_config
    """
    with pytest.raises(TypeError, match=r"unknown keys \['gama'\]; near gama: gamma"):
        worker(policy_config={"gama": 0.9})
    with pytest.raises(TypeError, match="near observation_filters: observation_filter"):
        worker(policy={"default": (None, None, None, {"observation_filters": "NoFilter"})})
    with pytest.raises(TypeError, match="near bonuss: bonus; list further keys of Reading"):
        Reading(Box((1,)), Discrete(2), {"bonuss": 1})
    spaces = AgentsEnv.observation_space, AgentsEnv.action_space
    forms = {"a": (Reading, *spaces, {}), "b": (None, *spaces, {})}
    mapping = {"env_creator": AgentsEnv, "policy_mapping_fn": lambda agent: "a"}
    with worker(policy=forms, policy_config={"bonus": 2}, **mapping) as made:
        assert made.policies["a"].config["bonus"] == 2
        assert "bonus" not in made.policies["b"].config


def test_sample_takes_no_arguments():
    """Arguments belong to the constructor: the error names the nearest one.

    Row: sample()
    """
    with worker() as made:
        with pytest.raises(TypeError, match=r"sample: .* got \['num_env'\].*: num_envs"):
            made.sample(num_env=2)
        with pytest.raises(TypeError, match=r"sample: expected no arguments, got \['foo'\]"):
            made.sample(foo=1)


def test_input_is_a_name_of_old_for_the_input_creator():
    """`input_=` is the name in the previous API; a value that is not a function is refused at once.

    Row: input_creator(ioctx) / output_creator(ioctx)
    """
    with worker(input_=lambda ioctx: ioctx.default_sampler_input()) as made:
        assert made.sample().count
    with pytest.raises(TypeError, match="input_creator: expected a function of an IOContext"):
        worker(input_="sampler")


OLD_ARGUMENTS = {
    "env_creator": CountEnv,
    "policy_graph": None,
    "policy_mapping_fn": None,
    "policies_to_train": None,
    "tf_session_creator": None,
    "batch_steps": 100,
    "batch_mode": "truncate_episodes",
    "episode_horizon": None,
    "preprocessor_pref": "deepmind",
    "sample_async": False,
    "compress_observations": False,
    "num_envs": 1,
    "observation_filter": "NoFilter",
    "clip_rewards": None,
    "clip_actions": True,
    "env_config": None,
    "model_config": None,
    "policy_config": None,
    "worker_index": 0,
    "monitor_path": None,
    "log_dir": None,
    "log_level": None,
    "callbacks": None,
    "input_creator": lambda ioctx: ioctx.default_sampler_input(),
    "input_evaluation": frozenset(),
    "output_creator": lambda ioctx: NoopOutput(),
}
"""The arguments of `PolicyEvaluator`, the previous API's worker, with its defaults."""
LATER_ARGUMENTS = {
    "policies": None,
    "preprocessors": "deepmind",
    "input_": None,
    "async_remote_worker_envs": False,
    "remote_worker_envs": False,
    "remote_env_batch_wait_ms": 0,
    "soft_horizon": False,
    "no_done_at_end": False,
    "seed": None,
    "extra_python_environs": None,
    "fake_sampler": False,
}


@pytest.mark.parametrize(
    "current",
    [
        {},
        LATER_ARGUMENTS,
        {"rollout_fragment_length": 50, "policy": Named, "policy_config": {"name": "a"}},
        {"preprocessors": "deepmind", "preprocessor_pref": "flatten"},
        {"async_remote_worker_envs": False, "remote_worker_envs": True},
        {"input_": None, "observation_filter": "MeanStdFilter", "policies": None},
    ],
    ids=str,
)
def test_the_previous_workers_arguments_are_accepted_at_their_defaults(current):
    """All 26, without a warning, and beside the current names, which then decide.

    Row: batch_steps / rollout_fragment_length = 100
    """
    for arguments in (OLD_ARGUMENTS | current, current | OLD_ARGUMENTS | current):
        with RolloutWorker(**arguments) as made:
            length = current.get("rollout_fragment_length", 100)
            assert made.sample().count == length
            assert type(made.get_policy()) is current.get("policy", TrainablePolicy)
            for name in ("preprocessor_pref", "remote_worker_envs", "observation_filter"):
                assert (
                    getattr(made.settings, name)
                    == (OLD_ARGUMENTS | {"remote_worker_envs": False} | current)[name]
                )
    for one, value in (OLD_ARGUMENTS | LATER_ARGUMENTS).items():
        RolloutWorker(**{"env_creator": CountEnv, one: value}).stop()


def test_two_names_with_values_are_a_conflict():
    """An older name at another value than its default contradicts the current name; None is a
    value of `preprocessors`.

    Row: batch_steps / rollout_fragment_length = 100
    """
    with (
        pytest.warns(DeprecationWarning, match="batch_steps"),
        pytest.raises(TypeError, match="expected either rollout_fragment_length or one of"),
    ):
        worker(batch_steps=7)
    with pytest.raises(TypeError, match="expected either preprocessor_pref"):
        worker(preprocessors=None, preprocessor_pref="flatten")
    with pytest.raises(TypeError, match=r"unknown arguments \['num_copies'\]"):
        worker(num_copies=None)


def test_in_evaluation_is_passed_to_the_policy():
    """The previous API's mark of a worker that evaluates; False unless it is given.

    Row: model_config, policy_config
    """
    for config, expected in (
        ({}, False),
        ({"in_evaluation": False}, False),
        ({"in_evaluation": True}, True),
    ):
        with worker(policy_config=config) as made:
            assert made.get_policy().config["in_evaluation"] is expected
            assert made.sample().count == 4
    with worker(policy={"default": (None, None, None, {"in_evaluation": True})}) as made:
        assert made.get_policy().config["in_evaluation"] is True


def test_the_update_rule_takes_its_short_names():
    """gamma, lambda and lr set the update rule, and a policy's own config overrides the common one.
    An algorithm has its own values, so giving both is refused where they differ.

    Row: model_config, policy_config
    """
    short = {"gamma": 0.5, "lambda": 0.1, "lr": 0.25}
    with worker(policy_config=short) as made:
        policy = made.get_policy()
        config = policy.algorithm.config
        assert (config.gamma, config.lam, config.lr) == (0.5, 0.1, 0.25)
        assert policy.algorithm.optimizer.param_groups[0]["lr"] == 0.25
    for own, gamma in (
        ({"gamma": 0.75}, 0.75),
        ({"algorithm": PPOConfig(gamma=0.875)}, 0.875),
        (PolicySettings(), 0.5),
        (PolicySettings(algorithm=PPOConfig(gamma=0.875)), 0.875),
    ):
        with worker(policy={"default": (None, None, None, own)}, policy_config=short) as made:
            assert made.get_policy().algorithm.config.gamma == gamma
    twice = {"algorithm": PPOConfig(lam=0.5), "lambda": 0.25}
    with pytest.raises(ValueError, match=r"lambda: expected it in algorithm=PPOConfig\(lam="):
        worker(policy_config=twice)
    assert PolicySettings.from_config(twice | {"lambda": 0.5}).algorithm.lam == 0.5
    for wrong, text in (({"gamma": 2}, "gamma: expected 0 to 1"), ({"lr": "x"}, "lr: expected")):
        with pytest.raises(ValueError, match=text):
            worker(policy_config=wrong)


def test_the_spec_of_a_workers_policy_acts_in_a_thin_client():
    """A client computes the same from spec, weights and filter state as the sampling worker."""
    with worker(env_creator=BoxEnv, observation_filter="ConcurrentMeanStdFilter") as made:
        batch = made.sample()
        policy = made.get_policy()
        spec = PolicySpec.from_json(json.loads(json.dumps(policy.spec.to_json())))
        state = policy.filter.to_json()
        client = NumpyPolicy(spec, policy.get_weights(), filter_state=state)
        flat = client.flatten(batch["obs"])
        actions = {"": batch["actions"]}
        np.testing.assert_allclose(
            client.logp(flat, actions), policy.logp(flat, actions), atol=1e-5
        )
