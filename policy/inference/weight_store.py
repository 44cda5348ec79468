"""The store of published weights, which accepts only weights that a policy can act with.

`storage.weights.store` stores weights without knowing networks. This subclass adds the check for
policies: the weights have the names, shapes and dtype of their spec, the spec has the spaces that
the policy is declared with, and the network gives finite numbers for observations of its space.
An ONNX file has to pass policy.inference.onnx_gate first, which runs it in a process of its own.
Publishers use this store, so collectors can load every live version.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy.typing as npt

from policy.inference.numpy_policy import NumpyPolicy
from policy.inference.onnx_gate import require_sound
from policy.inference.spec import PolicySpec
from storage.declarations.policy_files import load_declarations
from storage.errors import WeightsRefused
from storage.objects.opening import Root
from storage.weights import store
from storage.weights.manifest import Candidate


class WeightStore(store.WeightFolder):
    """The weights of one policy under a root directory. Any number of processes may use it.

    Its methods are those of `WeightFolder`: `add_candidate`, `publish`, `promote`, `rollback`,
    `live`, `load` and others. Weights are checked when they become a candidate, get a number or go
    live. WeightsRefused says what is wrong with them.

    Args:
        root: the folder of journal, shards and weights.
        policy_id: the policy; its weights are in `weights/{policy_id}` under the root.
        clock: returns seconds since the epoch.
    """

    def __init__(
        self, root: Root, policy_id: str, *, clock: Callable[[], float] = time.time
    ) -> None:
        super().__init__(root, policy_id, check=partial(_check, root), admit=admit, clock=clock)


def admit(candidate: Candidate, weights: Mapping[str, npt.NDArray[Any]]) -> None:
    """Raise WeightsRefused for an ONNX file that must not be stored. It is not run here."""
    spec = _spec_of(candidate)
    if spec.module.kind == "onnx":
        try:
            require_sound(spec, weights)
        except ValueError as error:
            raise WeightsRefused(str(error)) from error


def require_usable(
    candidate: Candidate,
    weights: Mapping[str, npt.NDArray[Any]],
    declared_schema: str | None,
    *,
    version: int = -1,
) -> NumpyPolicy:
    """The policy of these weights. Raises WeightsRefused unless it can act.

    `declared_schema` is the schema id of the spaces that the policy is declared with, None if it is
    not declared; `version` is the policy's, -1 for unknown.
    """
    spec = _spec_of(candidate)
    if declared_schema not in (None, spec.schema_id):
        got = f"{spec.observation} and {spec.action} (schema {spec.schema_id})"
        raise WeightsRefused(
            "spec: expected the spaces that the policy is declared with (schema "
            f"{declared_schema}), got {got}"
        )
    try:
        policy = NumpyPolicy(spec, weights, filter_state=candidate.filter_state, version=version)
        policy.require_finite()
    except (ValueError, TypeError, KeyError) as error:
        raise WeightsRefused(str(error)) from error
    return policy


def _spec_of(candidate: Candidate) -> PolicySpec:
    try:
        return PolicySpec.from_json(candidate.spec)
    except ValueError as error:
        raise WeightsRefused(f"spec: {error}") from error


def _check(root: Root, candidate: Candidate, weights: Mapping[str, npt.NDArray[Any]]) -> None:
    declared = load_declarations(root).get(candidate.policy_id)
    require_usable(candidate, weights, None if declared is None else declared.schema_id)
