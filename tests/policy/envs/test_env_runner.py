"""The abstract env runner, and how it survives failing environments."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest
import torch

from policy.envs.env_runner import ENV_STEP_FAILURE, EnvFailed, EnvRunner, RestartLimits, Restarts
from tests.policy.toy_envs import CountEnv


class Runner(EnvRunner):
    """The smallest possible runner."""

    def __init__(self, *, config, **kwargs):
        super().__init__(config=config, **kwargs)
        self.pauses = []
        self.restarts.pause = self.pauses.append

    def make_env(self):
        self.env = CountEnv(self.config["context"])

    def sample(self, **kwargs):
        return self._try_env_step(0)

    def get_spaces(self):
        return {"default": (CountEnv.observation_space, CountEnv.action_space)}

    def assert_healthy(self):
        if self.env is None:
            raise RuntimeError("no env")


def make(restart=True, most=3, **context):
    made = Runner(
        config={
            "context": context,
            "restart_failed_sub_environments": restart,
            "restart_limits": RestartLimits(most=most, backoff=0.1, longest=0.3),
        }
    )
    made.make_env()
    return made


def test_the_config_is_a_copy_and_the_rest_is_the_runners():
    """The config's containers are copied, and env is None at first. sample, get_spaces and
    assert_healthy are abstract; make_env and make_module say that they are optional. Metrics are
    empty, and stopping is harmless.

    Row: EnvRunner(*, config, **kw)
    """
    config = {"context": {"length": 2}, "list": [1]}
    made = Runner(config=config, anything=1)
    config["context"]["length"] = 9
    config["list"].append(2)
    assert (made.config["context"], made.config["list"]) == ({"length": 2}, [1])
    assert made.env is None
    with pytest.raises(RuntimeError, match="no env"):
        made.assert_healthy()
    assert EnvRunner.__abstractmethods__ == {"sample", "get_spaces", "assert_healthy"}
    with pytest.raises(NotImplementedError, match="make_module"):
        made.make_module()
    with pytest.raises(NotImplementedError, match="make_env"):
        EnvRunner.make_env(made)
    assert made.get_metrics() == []
    made.stop()
    made.__del__()


def test_a_reset_that_fails_is_tried_again_with_a_new_env_and_growing_pauses():
    """Pauses double up to the longest; there is no recursion; the env that answers is a new one.

    Row: _try_env_reset
    """
    made, failures = deque(), [OSError(), ValueError("two"), OSError()]
    runner = make(most=3, made=made, fail_resets=failures)
    obs, info = runner._try_env_reset(seed=4)
    assert (obs.tolist(), info) == ([0.0], {})
    assert runner.pauses == [0.1, 0.2, 0.3]
    assert len(made) == 4
    assert made[-1] is runner.env


def test_restarts_are_bounded_and_the_text_says_what_happened():
    """More failures than allowed raise EnvFailed with the exception's type, whether its text is
    empty or not. With restarts off, the environment's own exception is raised at once.

    Row: _try_env_reset
    """
    runner = make(most=2, fail_resets=[OSError() for _ in range(9)])
    with pytest.raises(EnvFailed, match=r"failed 3 times .* OSError\(\)"):
        runner._try_env_reset()
    plain = make(restart=False, fail_resets=[ValueError("mine")])
    with pytest.raises(ValueError, match="mine"):
        plain._try_env_reset()
    assert plain.pauses == []


def test_a_step_that_fails_says_so_and_leaves_a_new_env():
    """ENV_STEP_FAILURE after the env was recreated, otherwise the step's own result; with restarts
    off, its exception.

    Row: _try_env_step
    """
    runner = make(fails={1: 1})
    runner._try_env_reset()
    assert runner._try_env_step(0)[1] == 1.0
    broken = runner.env
    assert runner._try_env_step(0) is ENV_STEP_FAILURE
    assert runner.env is not broken
    assert runner.restarts.total == 1
    plain = make(restart=False, fails={0: 1})
    plain._try_env_reset()
    with pytest.raises(OSError, match=r"^$"):
        plain._try_env_step(0)


def test_a_row_of_failures_ends_with_progress():
    """Failures are counted per copy, and only progress of that copy resets its count."""
    restarts = Restarts(RestartLimits(most=1), pause=lambda seconds: None)
    restarts.failed(0, OSError())
    restarts.failed(1, OSError())
    restarts.progressed(0)
    restarts.failed(0, OSError())
    with pytest.raises(EnvFailed, match="copy 1"):
        restarts.failed(1, OSError())
    assert restarts.total == 4


def test_limits_that_make_no_sense_are_refused():
    """Counts and seconds must not be negative."""
    with pytest.raises(ValueError, match="restart limits"):
        RestartLimits(most=-1)


def test_nested_arrays_become_tensors():
    """float64 becomes float32, other dtypes stay; dicts, tuples and lists keep their structure.

    Row: _convert_to_tensor
    """
    runner = make()
    out = runner._convert_to_tensor(
        {"a": np.zeros((2, 3)), "b": (np.arange(2), [1.0, 2.0]), "c": [np.float32(1), {"d": 1}]}
    )
    assert out["a"].dtype == torch.float32
    assert out["a"].shape == (2, 3)
    assert (type(out["b"]), out["b"][0].dtype) == (tuple, torch.int64)
    assert out["b"][1].dtype == torch.float32
    assert out["c"][0].dtype == torch.float32
    assert out["c"][1]["d"].item() == 1
