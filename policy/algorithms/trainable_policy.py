"""A policy with its update rule: a rollout worker acts with it and trains it.

    policy = TrainablePolicy(env.observation_space, env.action_space, {"seed": 7})
    gradients, info = policy.compute_gradients(batch)
    policy.apply_gradients(gradients)
    info = policy.learn_on_batch(batch)                # both in one
    policy.actor().act(flat, rng)                      # a snapshot, which learning does not change

One thread may learn while another samples: weights are changed and copied under a lock, so that no
thread acts with part of an update. A subclass overrides `postprocess_trajectory`, `actor` or the
gradient methods; its constructor takes (observation space, action space, config).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, Protocol

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import torch

from policy.algorithms.advantages import gae
from policy.algorithms.base import no_metrics, rows_left_out
from policy.algorithms.data_parallel import all_or_none, average_gradients
from policy.algorithms.ppo import ADVANTAGES, PPO, VALUE_TARGETS, PPOConfig
from policy.algorithms.settings import near_names
from policy.inference.filters import ConcurrentMeanStdFilter, MeanStdFilter
from policy.inference.finite import NOT_FINITE
from policy.inference.numpy_policy import Actions, NumpyPolicy
from policy.inference.spec import ModuleSpec, PolicySpec
from policy.networks.policy import FloatArray, Policy
from storage.experience.sample_batch import (
    AGENT_ID,
    EPISODE_ORDINAL,
    NEXT_OBS,
    REWARDS,
    STREAM,
    TERMINATEDS,
    SampleBatch,
    T,
)
from storage.experience.sequences import fragment_ends
from storage.spaces.descriptors import Space
from storage.spaces.gymnasium_spaces import from_gym
from storage.wording import counted

_log = logging.getLogger("headrace.learner")
FlatArray = npt.NDArray[np.float32]
Gradients = Sequence[npt.NDArray[np.float32]]
CONCURRENT = "ConcurrentMeanStdFilter"


class Actor(Protocol):
    """Acts on filtered flat observations (B, D) until the next fragment.

    `version` is that of its weights. If the policy has an `initial_state()`, its actor also takes
    `state=` (a list of (B, *s) arrays), and returns (Actions, the next state).
    """

    version: int

    def act(
        self, flat: FlatArray, rng: np.random.Generator, *, explore: bool = True
    ) -> Actions: ...


@dataclass(frozen=True, kw_only=True)
class PolicySettings:
    """The settings of a policy; `from_config` reads the keys of a policy_config.

    There, `gamma`, `lambda` and `lr` set fields of `algorithm`.
    """

    module: ModuleSpec = field(default_factory=ModuleSpec)
    algorithm: PPOConfig = field(default_factory=lambda: PPOConfig(schedule_steps=None))
    observation_filter: str = "NoFilter"
    seed: int = 0
    explore: bool = True
    spec: PolicySpec | None = None  # instead of module and filter; has to match the spaces

    def __post_init__(self) -> None:
        if not isinstance(self.algorithm, PPOConfig):
            raise ValueError(
                f"algorithm: expected a PPOConfig, got {type(self.algorithm).__name__}: other "
                "update rules learn from the worker's batches through headrace.Learner"
            )

    _KEYS: ClassVar[tuple[str, ...]] = ("algorithm", "observation_filter", "explore", "spec")

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> PolicySettings:
        """The settings in a policy_config; its other keys are for the policy's class."""
        known = {key: config[key] for key in cls._KEYS if key in config}
        if "module" in config or config.get("model"):
            known["module"] = _module_spec(config.get("module", config.get("model")))
        if config.get("seed") is not None:
            known["seed"] = int(config["seed"])
        made = cls(**known)
        short = {name: config[name] for name in SHORT_NAMES if config.get(name) is not None}
        return replace(made, algorithm=_with_short_names(made.algorithm, short, known))


SHORT_NAMES: Mapping[str, str] = {"gamma": "gamma", "lambda": "lam", "lr": "lr"}
"""Keys of a policy_config -> the fields of a PPOConfig that they set."""

_OWN_KEYS = frozenset(
    {*PolicySettings._KEYS, *SHORT_NAMES, "module", "model", "seed"}
    | {"worker_index", "num_workers", "in_evaluation"}
)


def _with_short_names(
    algorithm: PPOConfig, short: Mapping[str, Any], known: Mapping[str, Any]
) -> PPOConfig:
    """The algorithm with these values.

    Raises ValueError if an `algorithm` was given that has other values.
    """
    for name, value in short.items():
        real = SHORT_NAMES[name]
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError(f"{name}: expected a number, got {value!r:.80}")
        if "algorithm" in known and getattr(algorithm, real) != value:
            raise ValueError(
                f"{name}: expected it in algorithm=PPOConfig({real}=...) alone, got {value!r} "
                f"beside an algorithm with {getattr(algorithm, real)!r}"
            )
    return replace(algorithm, **{SHORT_NAMES[name]: value for name, value in short.items()})


_MODEL_KEYS = {"fcnet_hiddens": "hidden", "fcnet_activation": "activation"}


def _module_spec(model: Any) -> ModuleSpec:
    """A ModuleSpec, from a dict of its fields or with `fcnet_hiddens`, `fcnet_activation`."""
    if isinstance(model, ModuleSpec):
        return model
    if not isinstance(model, Mapping):
        raise ValueError(f"model: expected a dict or a ModuleSpec, got {model!r:.80}")
    named = {_MODEL_KEYS.get(str(key), str(key)): value for key, value in model.items()}
    unknown = set(named) - {"kind", "hidden", "activation", "value_head"}
    if unknown:
        raise ValueError(
            f"model: expected hidden, activation and value_head, got {sorted(unknown)}"
        )
    return ModuleSpec(**named)


def _descriptor(space: gym.Space[Any] | Space) -> Space:
    return from_gym(space) if isinstance(space, gym.Space) else space


class TrainablePolicy(Policy):
    """A `Policy` with its optimizer, its loss (PPO's), its filter and its global variables.

    `config` is a `PolicySettings` or a dict with its fields, `model` (see `ModuleSpec`), and the
    `config_keys` that a subclass declares because it reads them; a worker adds `worker_index`,
    `num_workers` and `in_evaluation`. Raises TypeError for any other key. `on_trained` is called
    with the rows that `learn_on_batch` used, for the lineage of published versions.
    """

    config_keys: ClassVar[Collection[str]] = ()

    def __init__(
        self,
        observation_space: gym.Space[Any] | Space,
        action_space: gym.Space[Any] | Space,
        config: Mapping[str, Any] | PolicySettings | None = None,
    ) -> None:
        given: Mapping[str, Any] = {}
        if isinstance(config, PolicySettings):
            self.settings = config
        else:
            given = config or {}
            self.check_config(given)
            self.settings = PolicySettings.from_config(given)
        self.config = dict(given)
        spec, concurrent = _spec_of(self.settings, observation_space, action_space)
        super().__init__(spec, seed=self.settings.seed)
        if concurrent:
            self.filter = ConcurrentMeanStdFilter(spec.flattener.features)
        self.observation_space, self.action_space = observation_space, action_space
        self.global_vars: dict[str, Any] = {}
        self.on_trained: Callable[[SampleBatch], None] | None = None
        self.world_size = 1
        self._lock = threading.RLock()
        # observations are filtered before, by the filter that continues to learn
        self._unfiltered = replace(spec, observation_filter="NoFilter")

    @classmethod
    def known_config(cls) -> frozenset[str]:
        """The keys that a config of this class may have."""
        return _OWN_KEYS.union(cls.config_keys)

    @classmethod
    def check_config(cls, config: Mapping[str, Any], allowed: Collection[str] = ()) -> None:
        """Raise TypeError for keys that are neither known to this class nor in `allowed`."""
        known = cls.known_config().union(allowed)
        unknown = sorted(set(config) - known)
        if unknown:
            hints = "".join(near_names(name, known) for name in unknown)
            raise TypeError(
                f"policy_config: unknown keys {unknown}{hints}; list further keys of "
                f"{cls.__name__} in its config_keys"
            )

    @cached_property
    def algorithm(self) -> PPO:
        """The update rule; raises ValueError for a module without a value head."""
        return PPO(self, self.settings.algorithm)

    # acting

    def actor(self) -> Actor:
        """The actor for the next fragment, with a copy of the current weights."""
        with self._lock:
            return NumpyPolicy(self._unfiltered, super().get_weights(), version=self.version)

    def initial_state(self) -> list[npt.NDArray[Any]]:
        """The recurrent state (s,) at the start of an episode; none for feed-forward modules."""
        return []

    # trajectories

    def postprocess_trajectory(
        self,
        batch: SampleBatch,
        other_agent_batches: Mapping[Any, Any] | None = None,
        episode: Any = None,
    ) -> SampleBatch:
        """Complete the rows of one agent's trajectory in one episode; may change their number.

        `other_agent_batches`: agent id -> (policy, batch) of the other agents in the episode.
        `episode`: the worker's episode. Returns the batch.
        """
        return self.postprocess(batch)

    @torch.no_grad()
    def postprocess(self, batch: SampleBatch) -> SampleBatch:
        """Add `advantages` and `value_targets` to the rows of one or more trajectories.

        Both are float64 (N,). Rows of a trajectory are consecutive; see
        policy.algorithms.advantages.gae. Without a value head the batch is returned unchanged.
        """
        if not self.spec.module.value_head:
            return batch
        if not batch.count:
            batch[ADVANTAGES], batch[VALUE_TARGETS] = np.zeros(0), np.zeros(0)
            return batch
        episode = batch[STREAM], batch[EPISODE_ORDINAL], batch[AGENT_ID]
        ends = fragment_ends(batch[T], *episode)
        # an excluded row ends the fragment before it, as if it had been removed
        for rows in rows_left_out(self.algorithm, batch).values():
            ends[:-1] |= rows[1:]
        values = self._values(batch, "obs")
        following = np.empty_like(values)
        following[:-1] = values[1:]
        # inside a fragment the next observation is that of the next row; only ends need their own
        last = batch.take(ends)
        following[ends] = np.where(last[TERMINATEDS], 0.0, self._values(last, NEXT_OBS))
        config = self.settings.algorithm
        found = gae(
            batch[REWARDS],
            values,
            following,
            terminated=batch[TERMINATEDS],
            ends=ends,
            gamma=config.gamma,
            lam=config.lam,
        )
        batch[ADVANTAGES], batch[VALUE_TARGETS] = found.advantages, found.value_targets
        return batch

    def _values(self, batch: SampleBatch, prefix: str) -> FloatArray:
        observed = self.observe(self.flat_observations(batch, prefix))
        values: FloatArray = self.module.values(observed).double().cpu().numpy()
        return values

    # learning

    def compute_gradients(self, batch: SampleBatch) -> tuple[list[FlatArray], dict[str, Any]]:
        """Return (a gradient per parameter, info with `learner_stats`, `batch_count`, `left_out`).

        Gradients are copies: a later backward pass does not change them. With data parallelism they
        are the mean over all ranks. Raises ValueError if no row can be learned from, or if ranks
        have different numbers of rows or another one failed; FloatingPointError for a loss that is
        not finite.
        """
        with self._lock:
            gradients, info, _ = self._gradients(batch)
        if not gradients:
            why = info["left_out"]
            raise ValueError(f"expected rows to learn from, got none of {batch.count}: {why}")
        return gradients, info

    def _gradients(self, batch: SampleBatch) -> tuple[list[FlatArray], dict[str, Any], SampleBatch]:
        """Return (gradients over all ranks, info, the rows that this rank used).

        There are no gradients if no rank has a row to learn from.
        """
        counts = {"rows": 0}
        with all_or_none(counts, self.world_size):
            used, why = self._usable(batch)
            gradients, stats = self._own_gradients(used) if used.count else ([], self.no_stats())
            counts["rows"] = used.count
        average_gradients(gradients, self.world_size)
        info = {"learner_stats": stats, "batch_count": used.count, "left_out": why}
        return gradients, info, used

    def no_stats(self) -> dict[str, float]:
        """The `learner_stats` of a batch without a row to learn from: NaN under the same names."""
        return no_metrics(("loss", *PPO.metrics_before))

    def _own_gradients(self, used: SampleBatch) -> tuple[list[FlatArray], dict[str, float]]:
        """(this rank's gradients, statistics) from rows that can be learned from."""
        rows, before = self.algorithm.rows(used)
        clip = self.algorithm.schedule()
        loss = self.algorithm.loss(rows, clip, normalise=False)
        if not torch.isfinite(loss):
            raise FloatingPointError(f"the loss became {loss.item()}; try a smaller lr")
        self.module.zero_grad(set_to_none=True)
        loss.backward()
        gradients = [self._gradient(parameter) for parameter in self.module.parameters()]
        if not all(np.isfinite(gradient).all() for gradient in gradients):
            raise FloatingPointError("the gradients became NaN or infinity; try a smaller lr")
        return gradients, {"loss": float(loss.detach()), **before}

    def _usable(self, batch: SampleBatch) -> tuple[SampleBatch, dict[str, int]]:
        """(the rows that can be learned from, reason -> number of the others)."""
        keep = np.ones(batch.count, np.bool_)
        reasons = rows_left_out(self.algorithm, batch) if batch.count else {}
        for rows in reasons.values():
            keep &= ~rows
        why = {name: int(rows.sum()) for name, rows in reasons.items() if rows.any()}
        return (batch if keep.all() else batch.take(keep)), why

    def _gradient(self, parameter: torch.nn.Parameter) -> FlatArray:
        if parameter.grad is None:
            return np.zeros(tuple(parameter.shape), np.float32)
        return parameter.grad.detach().cpu().numpy().copy()

    def apply_gradients(self, gradients: Gradients) -> None:
        """Take one optimizer step. Raises ValueError unless gradients match the parameters."""
        parameters = list(self.module.parameters())
        if len(gradients) != len(parameters):
            raise ValueError(
                f"gradients: expected {len(parameters)}, one a parameter, got {len(gradients)}"
            )
        named = self.module.named_parameters()
        for (name, parameter), gradient in zip(named, gradients, strict=True):
            if np.shape(gradient) != tuple(parameter.shape):
                raise ValueError(
                    f"gradients: {name}: expected shape {tuple(parameter.shape)}, "
                    f"got {np.shape(gradient)}"
                )
        with self._lock:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                copied = torch.from_numpy(np.array(gradient, np.float32))
                parameter.grad = copied.to(parameter.device)
            self.module.clip_gradients(self.algorithm.config.max_grad_norm)
            self.algorithm.optimizer.step()

    def learn_on_batch(self, batch: SampleBatch) -> dict[str, Any]:
        """Take one gradient step on the batch.

        Returns info with `learner_stats`, `batch_count` (rows learned from) and `left_out` (reason
        -> rows). Without a row to learn from nothing changes. Rows whose loss, gradients or weights
        are not finite are excluded as "not_finite", and change nothing. With data parallelism this
        raises instead: FloatingPointError here, ValueError on the other ranks.
        """
        with self._lock:
            try:
                gradients, info, used = self._gradients(batch)
            except FloatingPointError as error:
                if self.world_size > 1:
                    raise
                return self._taken_back(batch, error)
            if not gradients:
                return info
            self.apply_gradients(gradients)
            if self.on_trained is not None:
                self.on_trained(used)
            if "timestep" not in self.global_vars:
                self.algorithm.trained += info["batch_count"] * self.world_size
            return info

    def _taken_back(self, batch: SampleBatch, error: FloatingPointError) -> dict[str, Any]:
        """The info of a batch that changed nothing, because of an error."""
        used, why = self._usable(batch)
        _log.error("%s left out as %s: %s", counted(used.count, "row"), NOT_FINITE, error)
        why[NOT_FINITE] = why.get(NOT_FINITE, 0) + used.count
        return {"learner_stats": self.no_stats(), "batch_count": 0, "left_out": why}

    def on_global_var_update(self, global_vars: Mapping[str, Any]) -> None:
        """Store global variables; `timestep` determines the learning rate and the clip range."""
        self.global_vars = dict(global_vars)
        if "timestep" in global_vars and self.spec.module.value_head:
            self.algorithm.trained = int(global_vars["timestep"])
            self.algorithm.schedule()

    # weights

    def get_weights(self) -> dict[str, FlatArray]:
        with self._lock:
            return super().get_weights()

    def set_weights(self, weights: Mapping[str, npt.NDArray[Any]], *, version: int = -1) -> None:
        with self._lock:
            super().set_weights(weights, version=version)

    def go_on_from(
        self,
        weights: Mapping[str, npt.NDArray[Any]],
        filter_state: Mapping[str, Any] | None,
        *,
        version: int,
    ) -> None:
        """Continue from a published version of this spec, including its filter."""
        self.set_weights(weights, version=version)
        if isinstance(self.filter, MeanStdFilter):
            self.filter.sync(MeanStdFilter.from_json(filter_state, self.spec.flattener.features))


def _spec_of(
    settings: PolicySettings, observation_space: Any, action_space: Any
) -> tuple[PolicySpec, bool]:
    """(the spec, whether the filter is the concurrent one)."""
    name = settings.observation_filter
    concurrent = name == CONCURRENT
    observation, action = _descriptor(observation_space), _descriptor(action_space)
    if settings.spec is None:
        named = "MeanStdFilter" if concurrent else name
        made = PolicySpec(observation, action, settings.module, observation_filter=named)
        return made, concurrent
    spec = settings.spec
    if (spec.observation, spec.action) != (observation, action):
        raise ValueError(
            f"spec: expected the spaces {observation} and {action}, got {spec.observation} and "
            f"{spec.action}"
        )
    if name != "NoFilter" and spec.observation_filter == "NoFilter":
        raise ValueError(f"observation_filter: the spec says 'NoFilter', the settings say {name!r}")
    return spec, concurrent
