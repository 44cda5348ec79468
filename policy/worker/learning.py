"""The worker's half that learns: weights, global variables, gradients, epochs over a sample."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from policy.algorithms.data_parallel import (
    all_or_none,
    broadcast_weights,
    join_group,
    leave_group,
    require_same_setup,
)
from policy.algorithms.trainable_policy import TrainablePolicy
from storage.experience.episode import DEFAULT_POLICY
from storage.experience.multi_agent_batch import MultiAgentBatch
from storage.experience.sample_batch import SampleBatch

__all__ = ["WorkerLearning"]

Batch: TypeAlias = SampleBatch | MultiAgentBatch
Weights: TypeAlias = dict[str, dict[str, npt.NDArray[np.float32]]]
_MULTI_AGENT = "a MultiAgentBatch, whose keys are policies"


class WorkerLearning:
    """What a `RolloutWorker` does with its policies. Needs `policies` and `policies_to_train`."""

    policies: dict[str, TrainablePolicy]
    policies_to_train: list[str]
    global_vars: dict[str, Any]
    worker_rng: np.random.Generator

    @abstractmethod
    def sample(self, **kwargs: Any) -> Batch: ...

    # weights and global variables

    def get_weights(self, policies: Collection[str] | None = None) -> Weights:
        """Policy id -> name -> array: copies, never views. Raises KeyError for an unknown id."""
        chosen = self.policies if policies is None else policies
        return {policy_id: self._policy(policy_id).get_weights() for policy_id in chosen}

    def set_weights(
        self,
        weights: Mapping[str, Mapping[str, npt.NDArray[Any]]],
        global_vars: Mapping[str, Any] | None = None,
        *,
        version: int | Mapping[str, int] = -1,
    ) -> None:
        """Copy weights in; then `set_global_vars` if there are any.

        `version` (one, or one a policy) is stamped on every step that is acted with them. Raises
        KeyError for an unknown id and ValueError for weights that do not fit, and changes nothing
        before all ids are known.
        """
        known = {policy_id: self._policy(policy_id) for policy_id in weights}
        for policy_id, policy in known.items():
            number = version if isinstance(version, int) else version.get(policy_id, -1)
            policy.set_weights(weights[policy_id], version=number)
        if global_vars:
            self.set_global_vars(global_vars)

    def set_global_vars(self, global_vars: Mapping[str, Any]) -> None:
        """Keep them and tell every policy, whose schedules follow `timestep`."""
        for policy in self.policies.values():
            policy.on_global_var_update(global_vars)
        self.global_vars = dict(global_vars)

    def get_global_vars(self) -> dict[str, Any]:
        """A copy of what was set last; empty before."""
        return dict(self.global_vars)

    def _policy(self, policy_id: str) -> TrainablePolicy:
        if policy_id not in self.policies:
            raise KeyError(f"no policy {policy_id!r}; the policies are {sorted(self.policies)}")
        return self.policies[policy_id]

    # what is learned from

    def _shares(
        self,
        samples: Batch,
        *,
        expected: int | None = None,
        epochs: int = 1,
        minibatch: int | None = None,
    ) -> dict[str, SampleBatch]:
        """Policy id -> the rows that it learns from, in the order of the ids, of trained policies
        alone; refused on every rank unless all ranks have as many for each."""
        names = {policy_id: f"policy {policy_id!r}" for policy_id in sorted(self.policies)}
        counts = dict.fromkeys(names.values(), 0)
        counts |= {"num_sgd_iter": epochs, "sgd_minibatch_size": minibatch or 0}
        with all_or_none(counts, max(one.world_size for one in self.policies.values())):
            if expected is not None and samples.count not in (0, expected):
                raise ValueError(
                    f"sample_and_learn: expected a batch of {expected} steps, got "
                    f"{samples.count}: truncate_episodes gives fragments of exact size"
                )
            mine = self._trainable(samples)
            counts |= {names[policy_id]: rows.count for policy_id, rows in mine.items()}
        return mine

    def _trainable(self, samples: Batch) -> dict[str, SampleBatch]:
        """The batches of policies that are trained; others are left as they are."""
        if not isinstance(samples, MultiAgentBatch):
            return {self._only(): _plain(samples)}
        return {
            policy_id: _plain(rows)
            for policy_id, rows in sorted(samples.policy_batches.items())
            if self._policy(policy_id) and policy_id in self.policies_to_train and rows.count
        }

    def _only(self) -> str:
        """The default policy's id, or that of the one there is."""
        if DEFAULT_POLICY in self.policies:
            return DEFAULT_POLICY
        if len(self.policies) == 1:
            return next(iter(self.policies))
        raise ValueError(
            f"expected {_MULTI_AGENT}, because there are the policies {sorted(self.policies)}"
        )

    # gradients

    def compute_gradients(self, samples: Batch) -> tuple[Any, dict[str, Any]]:
        """Of one policy: (gradients, info with `batch_count`). Of several: (policy id -> gradients,
        {"info": policy id -> info, "batch_count": env steps}), trained policies alone."""
        found = {
            policy_id: self.policies[policy_id].compute_gradients(rows)
            for policy_id, rows in self._shares(samples).items()
        }
        if not isinstance(samples, MultiAgentBatch):
            [(gradients, info)] = found.values()
            return gradients, {**info, "batch_count": samples.count}
        gradients_of = {policy_id: pair[0] for policy_id, pair in found.items()}
        info_of = {policy_id: pair[1] for policy_id, pair in found.items()}
        return gradients_of, {"info": info_of, "batch_count": samples.count}

    def apply_gradients(self, gradients: Mapping[str, Sequence[Any]] | Sequence[Any]) -> None:
        """One optimizer step: a mapping by policy id, whether trained here or not; a list for the
        default policy. Raises ValueError when their number or shapes differ from the parameters'.
        """
        if isinstance(gradients, Mapping):
            for policy_id in gradients:
                self._policy(policy_id)
            for policy_id, mine in gradients.items():
                self.policies[policy_id].apply_gradients(mine)
        else:
            self.policies[self._only()].apply_gradients(gradients)

    def learn_on_batch(self, samples: Batch) -> dict[str, Any]:
        """One gradient step: info with `learner_stats` of one policy; of several, policy id -> info
        of those that are trained. Names are the same whatever the batch: where it has no row to
        learn from nothing changes, `batch_count` is 0 and the statistics are NaN."""
        found = {
            policy_id: self.policies[policy_id].learn_on_batch(rows)
            for policy_id, rows in self._shares(samples).items()
        }
        if not isinstance(samples, MultiAgentBatch):
            return next(iter(found.values()))
        empty = {"batch_count": 0, "left_out": {}}
        return {
            policy_id: found[policy_id]
            if policy_id in found
            else {"learner_stats": self.policies[policy_id].no_stats(), **empty}
            for policy_id in sorted(self.policies_to_train)
        }

    def sample_and_learn(
        self,
        expected_batch_size: int,
        num_sgd_iter: int,
        sgd_minibatch_size: int | None,
        standardize_fields: Sequence[str] = (),
    ) -> tuple[dict[str, Any], int]:
        """Sample, standardise fields, and learn for some epochs over minibatches.

        Fields become (x - mean) / max(1e-4, std), once and in a copy. Minibatches are slices of
        shuffled rows (rows with recurrent state keep their order) in a random order; the last one
        may be short; size None or 0 is the whole batch. Gives (statistics averaged over the last
        epoch's minibatches, steps sampled); NaN statistics and 0 steps of an input that is idle.
        Raises ValueError for another count than expected.
        """
        if num_sgd_iter < 1:
            raise ValueError(f"num_sgd_iter: expected 1 or more, got {num_sgd_iter}")
        batch = self.sample()
        shares = self._shares(
            batch, expected=expected_batch_size, epochs=num_sgd_iter, minibatch=sgd_minibatch_size
        )
        found = {
            policy_id: self._epochs(
                self.policies[policy_id],
                rows,
                num_sgd_iter,
                sgd_minibatch_size,
                standardize_fields,
            )
            for policy_id, rows in shares.items()
        }
        if not isinstance(batch, MultiAgentBatch):
            return next(iter(found.values())), batch.count
        trained = sorted(self.policies_to_train)
        return {k: found.get(k) or self.policies[k].no_stats() for k in trained}, batch.count

    def _epochs(
        self,
        policy: TrainablePolicy,
        batch: SampleBatch,
        epochs: int,
        size: int | None,
        fields: Sequence[str],
    ) -> dict[str, Any]:
        if not batch.count:
            return policy.no_stats()
        batch = standardised(batch, fields)
        stats: list[dict[str, float]] = []
        for _ in range(epochs):
            stats = [
                policy.learn_on_batch(piece)["learner_stats"]
                for piece in _pieces(batch, size, self.worker_rng)
            ]
        return {name: _mean([one[name] for one in stats]) for name in stats[0]}

    # data parallel

    def setup_torch_data_parallel(
        self, url: str, world_rank: int, world_size: int, backend: str = "gloo"
    ) -> None:
        """Join `world_size` workers in learning: from now on `learn_on_batch` and
        `compute_gradients` take the mean of all ranks' gradients, and every rank has to call them
        as often, with as many rows for each trained policy; else all ranks raise ValueError. Begins
        with the weights of rank 0.

        `url` is torch.distributed's init_method, e.g. "tcp://127.0.0.1:29500". Raises ValueError
        for a policy that is no torch policy, for a rank outside the world, and on every rank when
        their policies differ.
        """
        for policy_id, policy in self.policies.items():
            if not isinstance(policy, TrainablePolicy):
                raise ValueError(f"policy {policy_id!r}: expected a torch policy, got {policy!r}")
        join_group(url, world_rank, world_size, backend)
        described = {
            policy_id: [tuple(one.shape) for one in self.policies[policy_id].module.parameters()]
            for policy_id in sorted(self.policies)
        }
        try:
            require_same_setup(f"{described}, trained {sorted(self.policies_to_train)}", world_size)
        except ValueError:
            leave_group()
            raise
        for policy_id in described:
            policy = self.policies[policy_id]
            broadcast_weights(policy.module)
            policy.world_size = world_size


def _mean(values: Sequence[float]) -> float:
    """Over the minibatches that say it: one without a row to learn from says NaN."""
    known = [value for value in values if not np.isnan(value)]
    return float(np.mean(known)) if known else float("nan")


def _plain(batch: SampleBatch) -> SampleBatch:
    """The batch with what `compress_observations` packed unpacked, in a batch of its own."""
    return batch.copy(shallow=True).decompress_if_needed()


def standardised(batch: SampleBatch, fields: Sequence[str]) -> SampleBatch:
    """The batch with new columns for these fields; the others are shared."""
    changed = batch.select(list(batch))
    for name in fields:
        if name not in batch:
            raise ValueError(f"standardize_fields: expected some of {sorted(batch)}, got {name!r}")
        values = np.asarray(batch[name], np.float64)
        changed[name] = (values - values.mean()) / max(1e-4, float(values.std()))
    return changed


def _pieces(batch: SampleBatch, size: int | None, rng: np.random.Generator) -> list[SampleBatch]:
    recurrent = "state_in_0" in batch
    pieces = list(batch.minibatches(size, None if recurrent else rng))
    return [pieces[i] for i in rng.permutation(len(pieces))]
