"""Losses of torchrl as algorithms: one adapter, one loop, one replay.

    Learner(Policy(spec), SACConfig())       # or `headrace train --algorithm torchrl:sac`

A config builds one of torchrl's losses around the policy's own network, so that what it learns is
what clients act with, and its propensities are known. That excludes torchrl's squashed
distributions: a Box's actor is a normal distribution, whose samples clients clip to the bounds. The
critics clip as well, because the clipped action is what earned the reward. They see bounded actions
in units of half their range.

An update takes steps of Adam on minibatches. With `updates`, as from a log, these are of its batch;
the learning rate decreases to 0, and the policy keeps its mean weights over the last tenth of the
steps. Without, as while clients act, the batch is added to the replay, and each of its rows brings
`updates_per_row` steps on minibatches of the replay. The replay is not part of a checkpoint: a
trainer that resumes fills it again from the shards.

torchrl is imported when a loss is made (the [torchrl] extra).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from msgspec import Meta
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from policy.algorithms.base import (
    RowsLeftOut,
    require_columns,
    require_no_scorer,
    useless_by_mask,
)
from policy.algorithms.offline import PARTS, Transitions
from policy.algorithms.settings import AnnotatedSettings
from policy.inference.action_rule import ActionRule
from policy.inference.preprocessors import columns_of
from policy.inference.spec import PolicySpec
from policy.networks.distributions import action_tensors
from policy.networks.modules import PolicyModule, mlp
from policy.networks.policy import Policy
from policy.progress import OnPart, Progress, no_part, no_progress
from storage.experience.sample_batch import NEXT_OBS, REWARDS, TERMINATEDS, SampleBatch
from storage.spaces.descriptors import Box, Discrete, Space

__all__ = [
    "DQNConfig",
    "REDQConfig",
    "SACConfig",
    "TD3BCConfig",
    "TD3Config",
    "TorchRL",
    "TorchRLConfig",
    "to_tensordict",
]

LOG_UPDATES = 4000
"""The steps of the optimizer on a log, as for the other offline algorithms."""


def to_tensordict(spec: PolicySpec, batch: SampleBatch, *, one_hot: bool = False) -> Any:
    """The rows of a batch as torchrl's losses read them: a TensorDict of N rows.

    `observation` and `next.observation` are flat and unfiltered, (N, D) float32; `next.reward`,
    `next.done` and `next.terminated` are (N, 1), where `done` is `terminated`: a truncated row
    bootstraps from its next observation. `action` is (N,) int64 for Discrete, from 0, or (N, n)
    with `one_hot`; (N, m) float32 for a Box. Rows that lead nowhere known, rows with numbers beyond
    float32 (`Transitions.left_out` counts both), and rows that action masks make useless are not in
    it. Raises ValueError for other action spaces and missing columns.
    """
    _require_space("to_tensordict", spec.action, Discrete, Box)
    require_columns(batch, Transitions.columns, "to_tensordict")
    left_out = {**Transitions.left_out(batch), **useless_by_mask(spec, batch)}
    rows = batch.take(~np.logical_or.reduce(list(left_out.values())))
    (action,) = action_tensors(spec.layout, columns_of(spec.action, "actions", rows))
    if isinstance(spec.action, Discrete):
        action = action[:, 0]
        action = nn.functional.one_hot(action, spec.action.n) if one_hot else action
    else:
        action = action.float()

    def flat(prefix: str) -> Tensor:
        return torch.from_numpy(
            spec.flattener.columns(columns_of(spec.observation, prefix, rows)).copy()
        )

    reward = torch.from_numpy(np.array(rows[REWARDS], np.float32))
    over = torch.from_numpy(np.array(rows[TERMINATEDS], np.bool_))
    return _tensordict(flat("obs"), action, flat(NEXT_OBS), reward, over)


def _tensordict(
    observation: Tensor, action: Tensor, following: Tensor, reward: Tensor, over: Tensor
) -> Any:
    from tensordict import TensorDict  # noqa: PLC0415  an optional extra

    after = {
        "observation": following,
        "reward": reward[:, None],
        "done": over[:, None],
        "terminated": over[:, None].clone(),
    }
    return TensorDict({"observation": observation, "action": action, "next": after}, [len(over)])


@dataclass(frozen=True, kw_only=True)
class TorchRLConfig(AnnotatedSettings):
    """The settings of every borrowed loss. A subclass makes the loss, in `loss`.

    Raises ValueError for values out of range.
    """

    columns: ClassVar[tuple[str, ...]] = Transitions.columns
    actor_every: ClassVar[int] = 1  # the actor's loss counts in one of so many steps

    updates: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="steps of the optimizer on each batch, a log; none: updates_per_row"),
    ] = None
    updates_per_row: Annotated[
        float, Meta(gt=0, description="without `updates`: steps for each new row")
    ] = 1.0
    minibatch: Annotated[int, Meta(ge=1, description="rows in a minibatch")] = 256
    lr: Annotated[float, Meta(gt=0, description="Adam's learning rate")] = 1e-3
    gamma: Annotated[float, Meta(ge=0, le=1, description="discount per step")] = 0.99
    target_rate: Annotated[
        float, Meta(gt=0, le=1, description="share by which target networks follow at each step")
    ] = 0.005
    replay: Annotated[int, Meta(ge=1, description="rows in the replay, the latest ones")] = 200_000
    recency: Annotated[
        float,
        Meta(ge=1, description="rows are among the latest u^recency of the replay, u uniform"),
    ] = 1.5
    max_grad_norm: Annotated[
        float, Meta(gt=0, description="limit of the gradient's Euclidean norm")
    ] = 10.0

    def build(self, policy: Policy) -> TorchRL:
        """The learner of a policy."""
        return TorchRL(policy, self)

    def loss(self, policy: Policy) -> Any:
        """One of torchrl's losses (`LossModule`), whose actor is the policy's module."""
        raise NotImplementedError(f"{type(self).__name__}: expected a method `loss`")


class TorchRL:
    """Updates a policy by a loss of torchrl (policy.algorithms.learner runs it).

    `networks` is the loss, with critics and target networks; a checkpoint includes it.
    """

    on_part: OnPart = staticmethod(no_part)

    def __init__(self, policy: Policy, config: TorchRLConfig) -> None:
        from torchrl.objectives import SoftUpdate  # noqa: PLC0415  an optional extra

        self.policy, self.config = policy, config
        space = policy.spec.action
        self._units = _Units(space) if isinstance(space, Box) else None
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.networks = config.loss(policy).to(policy.device)
            self.networks.make_value_estimator(gamma=config.gamma)
            self._targets = SoftUpdate(self.networks, tau=config.target_rate)
            self._require_fit()
        self.metric_names = ("loss", *(k for k in self.networks.out_keys if _is_part(k)))
        self._parameters = [one for one in self.networks.parameters() if one.requires_grad]
        self.optimizer: torch.optim.Optimizer = torch.optim.Adam(self._parameters, lr=config.lr)
        self.replay = RecentRows(config.replay)

    def _require_fit(self) -> None:
        """Raise ValueError unless the loss takes two rows of zeros."""
        spec = self.policy.spec
        observation, head = torch.zeros(2, spec.flattener.size), spec.layout.head
        choices = isinstance(spec.action, Discrete)
        action = torch.zeros(2, dtype=torch.int64) if choices else torch.zeros(2, head)
        over = torch.zeros(2, dtype=torch.bool)
        try:
            self.networks(_tensordict(observation, action, observation, torch.zeros(2), over))
        except (KeyError, RuntimeError) as error:
            raise ValueError(
                f"{type(self.config).__name__}: expected a loss that reads rows with the keys of "
                f"`to_tensordict`, got an error of {type(self.networks).__name__}: {error}"
            ) from error

    def state_dict(self) -> dict[str, Any]:
        return {"added": self.replay.added}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore; the replay forgets the rows that were added since."""
        self.replay.forget(int(state["added"]))

    def left_out(self, batch: SampleBatch) -> RowsLeftOut:
        """Reason -> bool (N,) rows that cannot be learned from. Raises ValueError."""
        require_columns(batch, self.config.columns, type(self.config).__name__)
        return Transitions.left_out(batch)

    def refill(self, batch: SampleBatch) -> None:
        """Put rows that were learned from earlier into the replay, oldest first."""
        self.replay.add(to_tensordict(self.policy.spec, batch), counted=False)

    def update(
        self, batch: SampleBatch, rng: np.random.Generator, on_progress: Progress = no_progress
    ) -> dict[str, float]:
        """Learn from a batch of usable rows, and from the replay; the metrics of the last step.

        Raises FloatingPointError if the loss is not finite.
        """
        config, module = self.config, self.policy.module
        from_log = config.updates is not None
        source = RecentRows(batch.count) if from_log else self.replay
        source.add(to_tensordict(self.policy.spec, batch))
        steps = config.updates or max(1, round(config.updates_per_row * batch.count))
        mean, metrics = AveragedModel(module), {}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(rng.integers(2**63)))
            for done in range(steps):
                rows = source.draw(config.minibatch, 1.0 if from_log else config.recency, rng)
                metrics = self._step(rows, done, 1 - done / steps if from_log else 1.0)
                if 10 * (done + 1) > 9 * steps:
                    mean.update_parameters(module)
                on_progress("training", done + 1, steps)
                if from_log and (done + 1) % math.ceil(steps / PARTS) == 0:
                    self.on_part(done + 1, metrics)
        if from_log:
            module.load_state_dict(mean.module.state_dict())
        return metrics

    def _step(self, rows: Any, done: int, left: float) -> dict[str, float]:
        """One step with a share `left` of the learning rate."""
        for one in (rows, rows["next"]):
            one["observation"] = self.policy.observe(one["observation"].numpy())
        if self._units is not None:
            rows["action"] = self._units.of(rows["action"])
        found = self.networks(rows.to(self.policy.device))
        parts = {name: value for name, value in found.items() if _is_part(name)}
        if done % self.config.actor_every:
            parts.pop("loss_actor", None)
        loss = sum(value.mean() for value in parts.values()) + self._beyond_bounds(rows)
        if not torch.isfinite(loss):
            name = type(self.config).__name__
            raise FloatingPointError(f"{name}: the loss became {loss.item()}; try a smaller lr")
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.lr * left
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self._parameters, self.config.max_grad_norm)
        self.optimizer.step()
        self._targets.step()
        named = {name: found[name] for name in self.metric_names[1:]}
        return {
            name: float(value.detach().mean()) for name, value in {"loss": loss, **named}.items()
        }

    def _beyond_bounds(self, rows: Any) -> Tensor:
        """How far means are outside the bounds, where no critic's gradient brings them back."""
        if self._units is None:
            return torch.zeros(())
        means = self._units.of(self.policy.module.pi(rows["observation"]))
        return (means.abs() - self._units.most).clamp(min=0).square().sum(dim=-1).mean()


class RecentRows:
    """The latest `capacity` rows, as one TensorDict; `added` counts all that were learned from."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.added = capacity, 0
        self.rows: Any = None

    def __len__(self) -> int:
        return 0 if self.rows is None else len(self.rows)

    def add(self, rows: Any, *, counted: bool = True) -> None:
        joined = rows if self.rows is None else torch.cat([self.rows, rows])
        self.rows = joined[-self.capacity :]
        self.added += len(rows) if counted else 0

    def forget(self, added: int) -> None:
        """Remove the rows that were added since there were `added`."""
        if self.rows is not None:
            self.rows = self.rows[: max(0, len(self.rows) - max(0, self.added - added))]
        self.added = added

    def draw(self, count: int, recency: float, rng: np.random.Generator) -> Any:
        """Random rows, each among the latest share u^recency of all, u uniform."""
        ages = (len(self) * rng.random(count) ** recency).astype(np.int64)
        return self.rows[torch.from_numpy(len(self) - 1 - ages)]


def _is_part(name: str) -> bool:
    return name.startswith("loss")


def _require_space(who: str, space: Space, *kinds: type[Space]) -> None:
    if not isinstance(space, kinds):
        names = " or ".join(kind.__name__ for kind in kinds)
        raise ValueError(f"{who}: expected a {names} action space, got {space}")


class _Units:
    """Actions of a Box in units of half its range, from the middle; unbounded elements as they
    are."""

    def __init__(self, space: Box) -> None:
        low, high = (
            torch.from_numpy(np.broadcast_to(bound, space.shape).reshape(-1).astype(np.float32))
            for bound in (space.low, space.high)
        )
        self.bounded = torch.isfinite(low) & torch.isfinite(high)
        self.half = torch.where(self.bounded, (high - low) / 2, 1.0)
        self.middle = torch.where(self.bounded, (high + low) / 2, 0.0)
        self.most = torch.where(self.bounded, 1.0, math.inf)

    def of(self, actions: Tensor) -> Tensor:
        return (actions - self.middle) / self.half


class _Gaussian(nn.Module):
    """A policy's means and deviations, in `_Units`."""

    def __init__(self, module: PolicyModule, units: _Units) -> None:
        super().__init__()
        self.module, self.units = module, units

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = self.module.dist_inputs(observation).chunk(2, dim=-1)
        return self.units.of(mean), log_std.exp() / self.units.half


class _Critic(nn.Module):
    """Q(s, a), of clipped actions; without actions one value per choice."""

    def __init__(self, spec: PolicySpec) -> None:
        super().__init__()
        self.units = _Units(spec.action) if isinstance(spec.action, Box) else None
        self._features = spec.flattener.features
        inputs, outputs = self._features, spec.layout.head
        if self.units is not None:
            inputs, outputs = inputs + len(self.units.half), 1
        self.layers = mlp(inputs, spec.module, outputs, 1.0, torch.default_generator)

    def forward(self, observation: Tensor, action: Tensor | None = None) -> Tensor:
        observation = observation[..., : self._features]
        if self.units is not None and action is not None:
            clipped = torch.maximum(torch.minimum(action, self.units.most), -self.units.most)
            observation = torch.cat([observation, clipped], dim=-1)
        values: Tensor = self.layers(observation)
        return values


def _gaussian_actor(policy: Policy) -> Any:
    from tensordict.nn import TensorDictModule  # noqa: PLC0415  an optional extra
    from torchrl.modules import IndependentNormal, ProbabilisticActor  # noqa: PLC0415  an extra

    gaussian = _Gaussian(policy.module, _Units(policy.spec.action))  # type: ignore[arg-type]  # a Box
    found = TensorDictModule(gaussian, in_keys=["observation"], out_keys=["loc", "scale"])
    return ProbabilisticActor(
        found,
        in_keys=["loc", "scale"],
        distribution_class=IndependentNormal,
        return_log_prob=True,
    )


def _critic(policy: Policy, output: str, *inputs: str) -> Any:
    from tensordict.nn import TensorDictModule  # noqa: PLC0415  an optional extra

    return TensorDictModule(_Critic(policy.spec), in_keys=[*inputs], out_keys=[output])


@dataclass(frozen=True, kw_only=True)
class DQNConfig(TorchRLConfig):
    """Double DQN (van Hasselt, Guez & Silver 2016): the outputs of `pi` are action values."""

    action_rule: ClassVar[ActionRule] = ActionRule("epsilon_greedy")

    def loss(self, policy: Policy) -> Any:
        from torchrl.modules import QValueActor  # noqa: PLC0415  an optional extra
        from torchrl.objectives import DQNLoss  # noqa: PLC0415  an optional extra

        _require_space("torchrl:dqn", policy.spec.action, Discrete)
        values = QValueActor(policy.module, in_keys=["observation"], action_space="categorical")
        return DQNLoss(values, action_space="categorical", double_dqn=True, delay_value=True)


@dataclass(frozen=True, kw_only=True)
class SACConfig(TorchRLConfig):
    """Soft actor-critic (Haarnoja et al. 2018; Christodoulou 2019 for choices)."""

    target_entropy: Annotated[
        float | None,
        Meta(
            description="nats that the policy's entropy is held at, in units of half a Box's range;"
            " none: minus a Box's elements, or a third of the most for choices"
        ),
    ] = None

    def loss(self, policy: Policy) -> Any:
        from torchrl.objectives import DiscreteSACLoss, SACLoss  # noqa: PLC0415  an extra

        _require_space("torchrl:sac", policy.spec.action, Box, Discrete)
        require_no_scorer("torchrl:sac", policy.spec)
        entropy = self.target_entropy
        if isinstance(policy.spec.action, Box):
            return SACLoss(
                _gaussian_actor(policy),
                _critic(policy, "state_action_value", "observation", "action"),
                target_entropy=-float(policy.spec.layout.head) if entropy is None else entropy,
            )
        n = policy.spec.layout.head
        return DiscreteSACLoss(
            _categorical_actor(policy),
            _critic(policy, "action_value", "observation"),
            action_space="categorical",
            num_actions=n,
            target_entropy=math.log(n) / 3 if entropy is None else entropy,
        )


def _categorical_actor(policy: Policy) -> Any:
    from tensordict.nn import TensorDictModule  # noqa: PLC0415  an optional extra
    from torch.distributions import Categorical  # noqa: PLC0415  as the others
    from torchrl.modules import ProbabilisticActor  # noqa: PLC0415  an optional extra

    return ProbabilisticActor(
        TensorDictModule(policy.module, in_keys=["observation"], out_keys=["logits"]),
        in_keys=["logits"],
        distribution_class=Categorical,
        return_log_prob=True,
    )


@dataclass(frozen=True, kw_only=True)
class REDQConfig(TorchRLConfig):
    """Randomised ensembles of critics (Chen et al. 2021): SAC with many steps for each row."""

    critics: Annotated[int, Meta(ge=2, description="critics, of which each step draws two")] = 10

    def loss(self, policy: Policy) -> Any:
        from torchrl.objectives import REDQLoss  # noqa: PLC0415  an optional extra

        _require_space("torchrl:redq", policy.spec.action, Box)
        return REDQLoss(
            _gaussian_actor(policy),
            _critic(policy, "state_action_value", "observation", "action"),
            num_qvalue_nets=self.critics,
            target_entropy=-float(policy.spec.layout.head),
        )


@dataclass(frozen=True, kw_only=True)
class TD3Config(TorchRLConfig):
    """Twin delayed DDPG (Fujimoto, van Hoof & Meger 2018).

    Its actor is the mean of the policy's normal distribution, and its exploration noise the
    deviation. `--action-rule greedy` acts by the mean alone, which has no propensity.
    """

    actor_every: ClassVar[int] = 2
    noise: Annotated[
        float, Meta(gt=0, description="deviation of exploration, in units of half a Box's range")
    ] = 0.1

    def loss(self, policy: Policy) -> Any:
        from torchrl.objectives import TD3Loss  # noqa: PLC0415  an optional extra

        return TD3Loss(*self._networks("torchrl:td3", policy), bounds=(-1.0, 1.0))

    def _networks(self, name: str, policy: Policy) -> tuple[Any, Any]:
        """(the actor, a critic); sets the policy's deviations."""
        from tensordict.nn import TensorDictModule  # noqa: PLC0415  an optional extra

        _require_space(name, policy.spec.action, Box)
        units = _Units(policy.spec.action)  # type: ignore[arg-type]  # a Box
        with torch.no_grad():
            policy.module.log_std.copy_(torch.log(self.noise * units.half))  # type: ignore[union-attr]  # of a Box
        mean = _Mean(policy.module, units)
        actor = TensorDictModule(mean, in_keys=["observation"], out_keys=["action"])
        return actor, _critic(policy, "state_action_value", "observation", "action")


class _Mean(nn.Module):
    def __init__(self, module: PolicyModule, units: _Units) -> None:
        super().__init__()
        self.pi, self.units = module.pi, units

    def forward(self, observation: Tensor) -> Tensor:
        return self.units.of(self.pi(observation))


@dataclass(frozen=True, kw_only=True)
class TD3BCConfig(TD3Config):
    """TD3 that stays near the log's actions (Fujimoto & Gu 2021), for logs."""

    alpha: Annotated[
        float, Meta(gt=0, description="weight of the values against that of imitation")
    ] = 2.5

    def loss(self, policy: Policy) -> Any:
        from torchrl.objectives import TD3BCLoss  # noqa: PLC0415  an optional extra

        networks = self._networks("torchrl:td3bc", policy)
        return TD3BCLoss(*networks, bounds=(-1.0, 1.0), alpha=self.alpha)
