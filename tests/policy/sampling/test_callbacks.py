"""Callbacks observe and change samples, as a class and as a dict.

Also of `policy.sampling.episode`.
"""

from __future__ import annotations

from collections import Counter

import pytest

from policy.sampling.callbacks import Callbacks
from policy.worker.rollout_worker import RolloutWorker
from tests.policy.toy_envs import CountEnv


def worker(**arguments):
    return RolloutWorker(**{"env_creator": CountEnv, "rollout_fragment_length": 4} | arguments)


class Recording(Callbacks):
    """Records every call."""

    def __init__(self):
        self.calls = []

    def on_episode_start(self, *, worker, base_env, policies, episode, env_index):
        self.calls.append(("start", episode.episode_id, episode.length))
        episode.user_data["steps"] = []

    def on_episode_step(self, *, worker, base_env, policies, episode, env_index):
        assert episode.get_agents() == ["agent0"]
        seen = episode.last_observation_for("agent0")
        episode.user_data["steps"].append((episode.length, float(seen[0])))
        assert episode.last_info_for("agent0") == {"t": episode.length}
        assert episode.last_action_for("agent0") in (0, 1)

    def on_episode_end(self, *, worker, base_env, policies, episode, env_index):
        episode.custom_metrics["last"] = episode.user_data["steps"][-1][1]
        episode.hist_data["lengths"] = [episode.length]
        self.calls.append(("end", episode.episode_id, episode.total_reward))

    def on_postprocess_trajectory(self, *, postprocessed_batch, original_batches, **more):
        self.calls.append(("postprocess", more["agent_id"], postprocessed_batch.count))
        assert "advantages" in postprocessed_batch
        assert "advantages" not in original_batches["agent0"][1]
        postprocessed_batch["mine"] = postprocessed_batch["rewards"] * 2

    def on_sample_end(self, *, worker, samples):
        self.calls.append(("sample", samples.count))


def test_callbacks_see_episodes_steps_trajectories_and_samples():
    """The class form: data that a callback adds to an episode is in its metrics, and its changes to
    a trajectory are in the batch.

    Row: callbacks
    """
    with worker(callbacks=Recording, env_config={"length": 3}) as made:
        batch = made.sample()
        calls = made.callbacks.calls
        assert batch["mine"].tolist() == [2, 4, 6, 2]
        [metrics] = made.get_metrics()
    assert (metrics.custom_metrics, metrics.hist_data) == ({"last": 3.0}, {"lengths": [3]})
    names = [call[0] for call in calls]
    assert names == ["start", "end", "start", "postprocess", "postprocess", "sample"]
    assert calls[1][2] == 6.0
    assert [call[2] for call in calls if call[0] == "postprocess"] == [3, 1]


def test_callbacks_in_the_form_of_old():
    """A dict of functions that take a dict; an unknown name is refused.

    Row: callbacks
    """
    seen = Counter()
    names = ("on_episode_start", "on_episode_step", "on_episode_end", "on_postprocess_traj")
    functions = {name: lambda info, name=name: seen.update([name]) for name in names}
    functions["on_sample_end"] = lambda info: seen.update({"count": info["samples"].count})
    functions["on_train_result"] = lambda info: info["result"].update(seen=True)
    with worker(callbacks=functions, env_config={"length": 3}) as made:
        made.sample()
        result = {}
        made.callbacks.on_train_result(result=result)
    assert (result, seen["count"]) == ({"seen": True}, 4)
    assert [seen[name] for name in names] == [2, 4, 1, 2]
    with pytest.raises(ValueError, match="on_episode_over"):
        worker(callbacks={"on_episode_over": print})
    with pytest.raises(ValueError, match="callbacks: expected"):
        worker(callbacks=int)
