"""What every algorithm has to pass: an algorithm of one's own inherits the suite.

class TestMine(AlgorithmConformance):
    def config(self) -> AlgorithmConfig: ...
    def policy(self) -> Policy: ...
    def batch(self) -> SampleBatch: ...
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict, fields
from pathlib import Path

import numpy as np

from policy.algorithms.base import AlgorithmConfig
from policy.algorithms.learner import Learner
from policy.networks.policy import Policy
from storage.conformance import expect, expect_error
from storage.experience.sample_batch import SampleBatch


class AlgorithmConformance:
    """Checks of the promises of an algorithm and its config; each raises ConformanceError.

    Each call of a method gives a new object with the same content.
    """

    def config(self) -> AlgorithmConfig:
        """The settings to check; with schedules, if there are any."""
        raise NotImplementedError

    def policy(self) -> Policy:
        """A policy that the algorithm trains."""
        raise NotImplementedError

    def batch(self) -> SampleBatch:
        """Rows with the config's columns, at least four, all of which can be learned from."""
        raise NotImplementedError

    def test_the_config_is_frozen_and_plain(self) -> None:
        """A checkpoint stores it as JSON; `columns` are names for a reader."""
        config = self.config()
        stored = asdict(config)
        expect("the settings are plain values", json.loads(json.dumps(stored)), stored)
        name = fields(config)[0].name if fields(config) else "setting"
        expect_error("the settings are frozen", AttributeError, lambda: setattr(config, name, None))
        expect("columns are names", {type(name) for name in config.columns}, {str})

    def test_an_update_learns_and_gives_its_metrics(self) -> None:
        """The weights change; the metrics are floats under `metric_names`."""
        policy = self.policy()
        algorithm, before = self.config().build(policy), policy.get_weights()
        metrics = algorithm.update(self.batch(), np.random.default_rng(0))
        expect("the metrics have their names", set(metrics), set(algorithm.metric_names))
        expect("metrics are floats", {type(one) for one in metrics.values()} <= {float})
        changed = not all(np.array_equal(before[k], one) for k, one in policy.get_weights().items())
        expect("an update changes the weights", changed)

    def test_a_batch_stays_as_it_was(self) -> None:
        """Estimators and writers use the same rows."""
        batch, whole = self.batch(), self.batch()
        self.config().build(self.policy()).update(batch, np.random.default_rng(0))
        expect("an update leaves the batch's columns", set(batch), set(whole))
        for name in whole:
            same = np.array_equal(batch[name], whole[name], equal_nan=whole[name].dtype.kind == "f")
            expect(f"an update leaves the column {name!r} as it was", same)

    def test_the_same_seed_learns_the_same(self) -> None:
        """All chance comes from the generator that an update is given."""
        learners = [Learner(self.policy(), self.config(), seed=1) for _ in range(2)]
        for learner in learners:
            learner.update(self.batch())
        _expect_same("two learners of one seed have the same weights", *learners)

    def test_an_interrupted_learner_continues_exactly(self) -> None:
        """`state_dict` has everything that weights, optimizer and settings do not say."""
        straight = Learner(self.policy(), self.config(), seed=1)
        straight.update(self.batch())
        resumed = Learner(self.policy(), self.config(), seed=2)
        with tempfile.TemporaryDirectory() as folder:
            straight.save(Path(folder) / "checkpoint")
            resumed.load(Path(folder) / "checkpoint")
        for learner in (straight, resumed):
            learner.update(self.batch())
        _expect_same("a resumed learner has the same weights", straight, resumed)

    def test_rows_are_left_out_by_reason(self) -> None:
        """A bool for each row; without its columns, ValueError names some of them."""
        config, batch = self.config(), self.batch()
        algorithm = config.build(self.policy())
        for reason, rows in algorithm.left_out(batch).items():
            expect(f"{reason!r} has a bool for each row", (rows.dtype, rows.shape),
                   (np.dtype(np.bool_), (batch.count,)))  # fmt: skip
            expect(f"no row of the batch is left out as {reason!r}", rows.any(), np.False_)
        bare = SampleBatch(other=np.zeros(batch.count))
        expect_error("missing columns are refused", ValueError, lambda: algorithm.left_out(bare))
        try:
            algorithm.left_out(bare)
        except ValueError as error:
            named = [name for name in config.columns if repr(name) in str(error)]
            expect(f"the error names missing columns: {error}", bool(named))


def _expect_same(promise: str, one: Learner, other: Learner) -> None:
    weights = other.policy.get_weights()
    for name, array in one.policy.get_weights().items():
        expect(f"{promise}: {name}", np.array_equal(array, weights[name]))
