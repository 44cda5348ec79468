"""The description of a policy as strict JSON: spaces, module, distribution, observation filter.

A spec and a dictionary of float32 arrays determine a policy, both in torch (policy.networks.policy)
and in numpy alone (policy.inference.numpy_policy). Nothing in a spec names code: unknown kinds,
keys and versions are refused.

    spec = PolicySpec(Box((4,)), Discrete(2), ModuleSpec(hidden=(64, 64)))
    PolicySpec.from_json(spec.to_json()) == spec
    spec.weight_shapes()    # {"pi.0.weight": (64, 4), "pi.0.bias": (64,), ...}
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from policy.inference.action_layout import ActionLayout, action_layout, distribution_names
from policy.inference.action_rule import SAMPLE, ActionRule
from policy.inference.filters import FILTERS
from policy.inference.preprocessors import Flattener
from storage.spaces.action_mask import ACTION_MASK, ActionMask
from storage.spaces.candidates import CANDIDATES, Candidates
from storage.spaces.descriptors import (
    Json,
    Space,
    SpaceError,
    schema_id,
    space_from_json,
    space_to_json,
)

FORMAT_VERSION = 1
KINDS = ("mlp", "scorer", "onnx")
ACTIVATIONS = ("tanh", "relu", "silu", "elu", "gelu", "leaky_relu")
ONNX_FILE = "model.onnx"
"""The name of an ONNX file among a version's weights: an array of its bytes."""
# limits for the network that a spec from another process can make a client build
_MOST_LAYERS = 32
_WIDEST_LAYER = 65_536


class SpecError(ValueError):
    """A spec cannot be used; the text says what was expected, what came, and where."""


@dataclass(frozen=True)
class ModuleSpec:
    """A network. Raises SpecError for unknown kinds and sizes beyond its limits.

    Args:
        kind: "mlp", fully connected layers; or "scorer", which scores each of an observation's
            candidates (storage.spaces.candidates) with the same weights: the score of features c
            in a state s is [s; 1]^T W [c; 1] + f(s, c), with a matrix W and fully connected f; or
            "onnx", a file of any network (policy.inference.onnx_network), which isn't trained here.
        hidden: units of each hidden layer, at most 32 layers of 65,536; () is a linear policy.
            "onnx" has none, and no value head.
        activation: "tanh", "relu", "silu", "elu", "gelu" or "leaky_relu", as in torch.
        value_head: whether there is a value network `vf`, with `hidden` layers of its own, in
            addition to the policy network `pi`. PPO needs one.
        state_std: whether `pi` gives the log standard deviations of a Box's elements, too, so that
            they depend on the observation. An ONNX file always does.
    """

    kind: str = "mlp"
    hidden: tuple[int, ...] = (64, 64)
    activation: str = "tanh"
    value_head: bool = True
    state_std: bool = False

    def __post_init__(self) -> None:
        is_file = self.kind == "onnx"
        object.__setattr__(self, "hidden", tuple(self.hidden))
        object.__setattr__(self, "state_std", self.state_std or is_file)
        if self.kind not in KINDS:
            raise SpecError(f"module: expected a kind of {KINDS}, got {self.kind!r:.80}")
        if self.activation not in ACTIVATIONS:
            raise SpecError(
                f"module: expected an activation of {ACTIVATIONS}, got {self.activation!r:.80}"
            )
        for name in ("value_head", "state_std"):
            if type(getattr(self, name)) is not bool:
                found = getattr(self, name)
                raise SpecError(f"module: expected {name} true or false, got {found!r:.80}")
        if is_file and (self.hidden or self.value_head):
            raise SpecError(
                f"module: expected hidden () and no value head for onnx, got {self.hidden!r:.80} "
                f"and value_head {self.value_head}"
            )
        sizes_are_fine = all(type(n) is int and 1 <= n <= _WIDEST_LAYER for n in self.hidden)
        if len(self.hidden) > _MOST_LAYERS or not sizes_are_fine:
            raise SpecError(
                f"module: expected at most {_MOST_LAYERS} hidden layers of 1 to {_WIDEST_LAYER} "
                f"units, got {self.hidden!r:.200}"
            )

    def to_json(self) -> Json:
        """The module as it stands in a spec."""
        return {
            "kind": self.kind,
            "hidden": list(self.hidden),
            "activation": self.activation,
            "value_head": self.value_head,
            # omitted if it is the default, so that such a spec keeps its digest
            **({"state_std": True} if self.state_std and self.kind != "onnx" else {}),
        }

    @classmethod
    def from_json(cls, document: Json) -> ModuleSpec:
        """Parse the result of `to_json`. Raises SpecError."""
        keys = {"kind", "hidden", "activation", "value_head"}
        if isinstance(document, dict):
            keys |= {"state_std"} & set(document)
        _check_keys(document, keys, "module")
        if not isinstance(document["hidden"], list):
            raise SpecError(f"module: expected hidden as a list, got {document['hidden']!r:.80}")
        return cls(**{**document, "hidden": tuple(document["hidden"])})


ONNX = ModuleSpec("onnx", (), value_head=False)


@dataclass(frozen=True)
class PolicySpec:
    """Two spaces, the module between them, and how actions are chosen.

    Raises SpaceError for spaces that no policy can observe or act in, and SpecError for other
    faults, such as epsilon_greedy with a Box, whose best action has no density.

    Args:
        observation: the space of observations, which are flattened for the network.
        action: the space of actions.
        module: the network.
        distribution: None or one that fits the action space: "categorical" for Discrete,
            "multi_categorical" for MultiDiscrete, "bernoulli" for MultiBinary, "diag_gaussian" for
            Box, "product" for Dict and Tuple. Or "squashed_gaussian" for a Box with bounds, whose
            samples are never clipped.
        observation_filter: "NoFilter", or "MeanStdFilter" to standardise observations by their
            running mean and deviation.
        action_rule: how an action is chosen from the distribution; by default it is sampled.
        mask: whether options that the observation's `action_mask` forbids are never chosen. None
            stands for true if the observation has such a leaf (storage.spaces.action_mask). False
            makes it a feature, as in specs of release 0.1.0.
    """

    observation: Space
    action: Space
    module: ModuleSpec = field(default_factory=ModuleSpec)
    distribution: str | None = None
    observation_filter: str = "NoFilter"
    action_rule: ActionRule = SAMPLE
    mask: bool | None = None

    def __post_init__(self) -> None:
        fitting = distribution_names(self.action)
        if self.distribution is None:
            object.__setattr__(self, "distribution", fitting[0])
        if self.distribution not in fitting:
            raise SpecError(
                f"distribution: expected {' or '.join(map(repr, fitting))} for this action space, "
                f"got {self.distribution!r:.80}"
            )
        if self.observation_filter not in FILTERS:
            raise SpecError(
                f"observation_filter: expected one of {sorted(FILTERS)}, "
                f"got {self.observation_filter!r:.80}"
            )
        if self.mask is not False:
            found = ActionMask.of(self.observation, self.action)
            if self.mask and found is None:
                raise SpecError(
                    f"mask: expected the key {ACTION_MASK!r} in the observation space, got "
                    f"{self.observation}"
                )
            object.__setattr__(self, "mask", found is not None)
        if self.module.kind == "scorer" and (self.candidates is None or not self.mask):
            raise SpecError(
                f"module: expected the keys {CANDIDATES!r} and {ACTION_MASK!r} in the observation "
                f"space of a scorer, got {self.observation}"
            )
        if self.module.kind == "onnx" and self.observation_filter != "NoFilter":
            raise SpecError(
                "observation_filter: expected NoFilter for an ONNX file, which standardises its "
                f"inputs itself, got {self.observation_filter!r:.80}"
            )
        _ = self.flattener  # refuses a space that no policy can observe
        is_discrete = self.layout.is_discrete
        if not isinstance(self.action_rule, ActionRule):
            raise SpecError(f"action_rule: expected an ActionRule, got {self.action_rule!r:.80}")
        if self.action_rule.kind in ("epsilon_greedy", "squarecb") and not is_discrete:
            raise SpecError(
                f"action_rule: expected sample or greedy for continuous actions, got "
                f"{self.action_rule}: {self.action} has no best action with a probability"
            )
        if self.action_rule.explore and not is_discrete:
            raise SpecError(
                f"action_rule: expected no explore for continuous actions, got {self.action_rule}: "
                f"{self.action} has no finite number of actions among which to explore"
            )

    @cached_property
    def flattener(self) -> Flattener:
        """Raw observations -> flat float32 vectors."""
        last = [one.leaf for one in (self.candidates, self.action_mask) if one is not None]
        return Flattener(self.observation, last)

    @cached_property
    def candidates(self) -> Candidates | None:
        """The candidates that the policy scores, if it is a scorer."""
        is_scorer = self.module.kind == "scorer"
        return Candidates.of(self.observation, self.action) if is_scorer else None

    @cached_property
    def action_mask(self) -> ActionMask | None:
        """The mask that the policy respects, if any."""
        return ActionMask.of(self.observation, self.action) if self.mask else None

    def require_options(self, flat: npt.NDArray[np.float32]) -> None:
        """Raise SpaceError if the mask of one of the flat observations (B, D) allows no action."""
        mask = self.action_mask
        if mask is not None:
            mask.valid({mask.leaf.path: flat[:, -self.layout.head :]})

    @property
    def ignores_mask(self) -> bool:
        """Whether the observation has an action mask that the policy reads as a feature."""
        if self.mask:
            return False
        try:
            return ActionMask.of(self.observation, self.action) is not None
        except SpaceError:
            return False

    @cached_property
    def schema_id(self) -> str:
        """The schema id of its spaces, as in a declaration."""
        return schema_id(self.observation, self.action)

    @property
    def has_propensity(self) -> bool:
        """Whether its actions have a probability or a density; the mean of a Box has none."""
        return self.action_rule.explores or self.layout.is_discrete

    @cached_property
    def layout(self) -> ActionLayout:
        """The places of the distribution's parameters in `dist_inputs`."""
        return action_layout(self.action, squashed=self.distribution == "squashed_gaussian")

    @property
    def outputs(self) -> int:
        """The numbers that the network gives for each observation."""
        return self.layout.size if self.module.state_std else self.layout.head

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every weight, all float32, with torch's names; not of an ONNX file."""
        if self.candidates is not None:
            sizes = self.flattener.features, self.candidates.width
            shapes: dict[str, tuple[int, ...]] = {"pi.cross": (sizes[0] + 1, sizes[1] + 1)}
            shapes.update(self._tower("pi.layers", 1, sum(sizes)))
        else:
            shapes = dict(self._tower("pi", self.outputs))
        if self.layout.log_stds and not self.module.state_std:
            shapes["log_std"] = (self.layout.log_stds,)
        if self.module.value_head:
            shapes.update(self._tower("vf", 1))
        return shapes

    def _tower(
        self, name: str, outputs: int, inputs: int | None = None
    ) -> list[tuple[str, tuple[int, ...]]]:
        first = self.flattener.features if inputs is None else inputs
        sizes = (first, *self.module.hidden, outputs)
        shapes: list[tuple[str, tuple[int, ...]]] = []
        for i, (into, out) in enumerate(pairwise(sizes)):
            # every second module of torch's sequence is an activation
            shapes += [(f"{name}.{2 * i}.weight", (out, into)), (f"{name}.{2 * i}.bias", (out,))]
        return shapes

    def to_json(self) -> dict[str, Any]:
        """The spec as a JSON object, as manifests and policy files have it."""
        return {
            "version": FORMAT_VERSION,
            "observation": space_to_json(self.observation),
            "action": space_to_json(self.action),
            "module": self.module.to_json(),
            "distribution": self.distribution,
            "observation_filter": self.observation_filter,
            # omitted if it is the default, so that such a spec keeps its digest
            **({} if self.action_rule == SAMPLE else {"action_rule": self.action_rule.to_json()}),
            **({"mask": True} if self.mask else {}),
        }

    @classmethod
    def from_json(cls, document: Json) -> PolicySpec:
        """Parse the result of `to_json`. Raises SpecError or SpaceError."""
        keys = {"observation", "action", "module", "distribution", "observation_filter"}
        optional = {"action_rule", "mask"} & set(document) if isinstance(document, dict) else set()
        _check_keys(document, {"version", *keys, *optional}, "policy spec")
        if document["version"] != FORMAT_VERSION:
            raise SpecError(
                f"policy spec: expected format version {FORMAT_VERSION}, "
                f"got {document['version']!r:.80}"
            )
        if document.get("mask", True) is not True:
            raise SpecError(f"mask: expected true, or no mask, got {document['mask']!r:.80}")
        for name in ("distribution", "observation_filter"):
            if not isinstance(document[name], str):
                raise SpecError(f"{name}: expected a string, got {document[name]!r:.80}")
        return cls(
            space_from_json(document["observation"]),
            space_from_json(document["action"]),
            ModuleSpec.from_json(document["module"]),
            document["distribution"],
            document["observation_filter"],
            _rule(document["action_rule"]) if "action_rule" in document else SAMPLE,
            "mask" in document,
        )


def _rule(document: Json) -> ActionRule:
    try:
        return ActionRule.from_json(document)
    except ValueError as error:
        raise SpecError(str(error)) from error


def _check_keys(document: Json, keys: set[str], where: str) -> None:
    if not isinstance(document, dict):
        raise SpecError(f"{where}: expected an object, got {document!r:.80}")
    if set(document) != keys:
        raise SpecError(f"{where}: expected the keys {sorted(keys)}, got {sorted(document)!r:.200}")
