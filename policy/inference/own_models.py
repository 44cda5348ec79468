"""Versions whose network was made elsewhere: an ONNX file, or the layers of a perceptron.

    publish_onnx("data/run", "model.onnx", head="squashed_gaussian")
    publish_mlp("data/run", [(weight, bias), ...], activation="relu", head="q_values")

Each adds a candidate under a root and, unless `live=False`, makes it the live version without a
judgement; `headrace publish` judges a candidate first. policy.networks.own_modules has the same for
torch modules. They return the candidate's digest, and raise SpecError or WeightsRefused for what
cannot act.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from policy.inference.action_rule import SAMPLE, ActionRule
from policy.inference.onnx_network import MAX_FILE
from policy.inference.spec import ONNX, ONNX_FILE, ModuleSpec, PolicySpec, SpecError
from policy.inference.weight_store import WeightStore
from storage.declarations.policy_files import load_declarations
from storage.objects.opening import Root
from storage.spaces.descriptors import Space
from storage.weights.lineage import Lineage

_Q_VALUES = "q_values"


@dataclass(frozen=True, kw_only=True)
class OwnModel:
    """How a network that was made elsewhere is published.

    Args:
        policy_id: the policy under the root.
        spaces: (observation, action); by default those of the declaration.
        head: the action distribution of the network's outputs (`PolicySpec.distribution`), by
            default the usual one of the action space; or "q_values", the values of options, of
            which the best one is chosen epsilon-greedily unless there is another `action_rule`.
        action_rule: how an action is chosen; by default it is sampled.
        lineage: which parts of the log it was trained on, such as a reader's `ledger`. Without it
            the judge takes all episodes for unseen ones.
        metrics: what to note about the training (JSON).
        live: whether it becomes the live version at once.
    """

    policy_id: str = "default"
    spaces: tuple[Space, Space] | None = None
    head: str | None = None
    action_rule: ActionRule | None = None
    lineage: Lineage | None = None
    metrics: Mapping[str, Any] | None = None
    live: bool = True

    def spec(self, root: Root, module: ModuleSpec) -> PolicySpec:
        """The spec of a module under a root. Raises SpecError."""
        spaces = self.spaces
        if spaces is None:
            declared = load_declarations(root).get(self.policy_id)
            if declared is None:
                raise SpecError(
                    "spaces: expected (observation, action), because the root declares no policy "
                    f"{self.policy_id!r}"
                )
            spaces = declared.observation, declared.action
        is_q = self.head == _Q_VALUES
        rule = self.action_rule or (ActionRule("epsilon_greedy") if is_q else SAMPLE)
        return PolicySpec(*spaces, module, None if is_q else self.head, action_rule=rule)

    def publish(self, root: Root, spec: PolicySpec, weights: Mapping[str, npt.NDArray[Any]]) -> str:
        """Add the weights as a candidate, make it live if asked to, and return its digest."""
        store = WeightStore(root, self.policy_id)
        digest = store.add_candidate(
            weights,
            spec=spec.to_json(),
            metrics={"algorithm": "own model", **(self.metrics or {})},
            lineage=self.lineage or {},
        )
        if self.live:
            store.publish(digest)
        return digest


def publish_onnx(root: Root, model: Path | str | bytes, **how: Any) -> str:
    """Publish an ONNX file (a path, or its bytes), which policy.inference.onnx_network explains.

    `how`: see `OwnModel`. Needs the [export] extra, for the check.
    """
    own = OwnModel(**how)
    if not isinstance(model, bytes):
        size = Path(model).stat().st_size
        if size > MAX_FILE:
            raise SpecError(f"{model}: expected at most {MAX_FILE:,} bytes, got {size:,}")
        model = Path(model).read_bytes()
    return own.publish(root, own.spec(root, ONNX), {ONNX_FILE: np.frombuffer(model, np.uint8)})


def publish_mlp(
    root: Root,
    layers: Sequence[tuple[npt.ArrayLike, npt.ArrayLike]],
    *,
    activation: str = "tanh",
    log_std: npt.ArrayLike | None = None,
    **how: Any,
) -> str:
    """Publish fully connected layers: (weight (out, in), bias (out,)) of each, from first to last.

    They read the flat observation, with one-hot vectors of Discrete leaves; the activation is
    between them (`ModuleSpec.activation`). For a Box the last layer gives a mean and a log standard
    deviation of each element; with `log_std` (elements,) it gives means alone. `how`: see
    `OwnModel`.
    """
    own = OwnModel(**how)
    try:
        arrays = [
            (np.asarray(weight, np.float32), np.asarray(bias, np.float32))
            for weight, bias in layers
        ]
    except (TypeError, ValueError) as error:
        raise SpecError(f"layers: expected pairs of a weight and a bias: {error}") from error
    if not arrays or any(weight.ndim != 2 for weight, _ in arrays):
        raise SpecError("layers: expected one or more weights (out, in), got others")
    for at, ((before, _), (after, _)) in enumerate(pairwise(arrays), 1):
        if after.shape[1] != len(before):
            raise SpecError(
                f"layers[{at}]: expected a weight (out, {len(before)}), got {after.shape}"
            )
    hidden = tuple(len(weight) for weight, _ in arrays[:-1])
    spec = own.spec(root, ModuleSpec("mlp", hidden, activation, value_head=False))
    weights: dict[str, npt.NDArray[Any]] = {}
    if log_std is not None:
        weights["log_std"] = np.asarray(log_std, np.float32)
    elif spec.layout.log_stds:
        spec = replace(spec, module=replace(spec.module, state_std=True))
    for at, (weight, bias) in enumerate(arrays):
        weights |= {f"pi.{2 * at}.weight": weight, f"pi.{2 * at}.bias": bias}
    return own.publish(root, spec, weights)
