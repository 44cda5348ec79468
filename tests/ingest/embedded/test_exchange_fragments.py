"""All steps of a program are delivered before its end, whatever the fragments."""

from __future__ import annotations

import numpy as np
import pytest

from ingest.embedded.external_env import ExternalEnv
from ingest.protocol.errors import ServingStopped
from policy.worker.rollout_worker import RolloutWorker
from storage.spaces.descriptors import Box, Discrete

SPACES = Discrete(2), Box((1,), "float32", 0, 1000)


class Shop(ExternalEnv):
    """Five episodes of three steps; the second is logged with propensities, the third is not for
    training, the last stays open."""

    def run(self):
        for number in range(5):
            episode = self.start_episode(f"e{number}", training_enabled=number != 2)
            for t in range(3):
                observation = np.array([10 * number + t], np.float32)
                if number == 1:
                    self.log_action(episode, observation, 1, action_prob=0.25)
                else:
                    self.get_action(episode, observation)
                self.log_returns(episode, t + 1.0)
            if number != 4:
                self.end_episode(episode, np.array([10 * number + 3], np.float32))


def worker(**arguments):
    return RolloutWorker(
        **{"env_creator": lambda context: Shop(*SPACES), "rollout_fragment_length": 4} | arguments
    )


def everything(made):
    batches = []
    while True:
        try:
            batches.append(made.sample())
        except ServingStopped:
            return batches


@pytest.mark.parametrize("mode", ["truncate_episodes", "complete_episodes"])
def test_no_step_of_a_program_is_lost(mode):
    """Every completed step for training is in a batch, once, before the program's end is reported.
    Logged actions keep their propensity and are marked as logged."""
    with worker(batch_mode=mode) as made:
        batches = everything(made)
    rows = {int(row["obs"][0]): row for batch in batches for row in batch.rows()}
    assert sum(batch.count for batch in batches) == len(rows)
    whole = [0, 1, 2, 10, 11, 12, 30, 31, 32]
    # the last step of the open episode has no outcome
    assert sorted(rows) == [*whole, 40, 41]
    for number in whole:
        row = rows[number]
        assert row["rewards"] == number % 10 + 1
        assert row["new_obs"][0] == number + 1
        assert row["terminateds"] == (number % 10 == 2)
        assert row["source"] == ("logged" if number // 10 == 1 else "on_policy")
    assert rows[11]["action_logp"] == pytest.approx(np.log(0.25))
    assert rows[11]["actions"] == 1
    assert np.isnan(rows[11]["action_dist_inputs"]).all()


class Half(ExternalEnv):
    """Episodes of seven steps, every second one of them not for training."""

    def run(self):
        for number in range(20):
            episode = self.start_episode(f"e{number}", training_enabled=number % 2 == 0)
            for t in range(7):
                self.get_action(episode, np.array([10 * number + t], np.float32))
            self.end_episode(episode, np.array([10 * number + 7], np.float32))


def test_episodes_that_are_not_for_training_do_not_shorten_fragments():
    """Fragments have their full length, counted over the other episodes alone."""
    half = worker(env_creator=lambda context: Half(*SPACES), rollout_fragment_length=10)
    with half as made:
        batches = [made.sample() for _ in range(7)]
    assert [batch.count for batch in batches] == [10] * 7
    seen = np.concatenate([batch["obs"][:, 0] for batch in batches]).astype(int).tolist()
    assert seen == [20 * number + t for number in range(10) for t in range(7)]


def test_a_program_cannot_be_copied():
    """num_envs=2 is a ValueError, as there is only one program."""
    with pytest.raises(ValueError, match="num_envs"):
        worker(num_envs=2)
