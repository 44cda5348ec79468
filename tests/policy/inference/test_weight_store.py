"""Weights with which a policy of their spec cannot act are never stored, numbered or live."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from policy.inference.spec import ModuleSpec, PolicySpec
from policy.inference.weight_store import WeightStore
from policy.networks.policy import Policy
from storage.declarations.declaration import PolicyDeclaration
from storage.declarations.policy_files import save_declaration
from storage.errors import WeightsRefused
from storage.spaces.descriptors import Box, Discrete
from storage.weights import store as storage_store

SPEC = PolicySpec(Box((4,)), Discrete(2), ModuleSpec(hidden=(8,), activation="relu"))
Weights = dict[str, Any]


def weights(seed: int = 0) -> Weights:
    return dict(Policy(SPEC, seed=seed).get_weights())


def add(store: storage_store.WeightFolder, given: Weights, **changes: Any) -> str:
    arguments = {"spec": SPEC.to_json(), "metrics": {}, "lineage": {}, **changes}
    return store.add_candidate(given, **arguments)


def anything(candidate: object, weights: object) -> None:
    """Accept every candidate, like a tool without checks."""


def changed(name: str, value: Callable[[Any], Any]) -> Weights:
    found = weights()
    found[name] = value(found[name])
    return found


BAD: dict[str, tuple[Weights, str]] = {
    "another shape": (changed("pi.0.weight", lambda a: a.T), r"pi\.0\.weight: expected float32"),
    "no shape for (1,)": (
        changed("vf.2.bias", lambda a: a.reshape(())),
        r"vf\.2\.bias: expected float32 \(1,\), got float32 \(\)",
    ),
    "another dtype": (changed("pi.2.bias", lambda a: a.astype("f8")), r"pi\.2\.bias: expected"),
    "a tensor too few": ({k: v for k, v in weights().items() if k != "pi.0.bias"}, "missing"),
    "a tensor too many": ({**weights(), "pi.4.bias": np.zeros(2, np.float32)}, "not expected"),
    "an overflow": (
        {k: np.full_like(v, 1e38) for k, v in weights().items()},
        "finite outputs of the network",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_weights_that_cannot_act_come_in_nowhere(tmp_path: Path, name: str) -> None:
    """Weights that cannot act are refused as a candidate, when published from another tool's
    candidate, and by a rollback."""
    bad, text = BAD[name]
    store = WeightStore(tmp_path, "default")
    with pytest.raises(WeightsRefused, match=text):
        add(store, bad)
    assert store.candidates() == []
    careless = storage_store.WeightFolder(tmp_path, "default", check=anything)
    digest = add(careless, bad)
    with pytest.raises(WeightsRefused, match=text):
        store.publish(digest)
    careless.publish(digest)
    live = careless.publish(add(careless, weights()))
    with pytest.raises(WeightsRefused, match=text):
        store.rollback()
    with pytest.raises(WeightsRefused, match=text):
        store.set_live(1)
    assert store.live() == live


@pytest.mark.parametrize("spec", [{}, {"kind": "mlp"}, {**SPEC.to_json(), "version": 99}])
def test_a_spec_that_nobody_reads_is_refused(tmp_path: Path, spec: dict[str, Any]) -> None:
    with pytest.raises(WeightsRefused, match=r"^spec: "):
        add(WeightStore(tmp_path, "default"), weights(), spec=spec)


def test_a_filter_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    store = WeightStore(tmp_path, "default")
    with pytest.raises(WeightsRefused, match="filter state"):
        add(store, weights(), filter_state={"count": 3})


def test_weights_for_other_spaces_than_declared_are_refused(tmp_path: Path) -> None:
    """Weights for other spaces than the declared ones are refused, since no collector of the root
    would load them."""
    save_declaration(tmp_path, PolicyDeclaration(observation=Box((5,)), action=Discrete(2)))
    with pytest.raises(WeightsRefused, match="spaces that the policy is declared with"):
        add(WeightStore(tmp_path, "default"), weights())


def test_a_space_without_bounds_asks_no_more_of_a_network(tmp_path: Path) -> None:
    """Any network overflows somewhere in a space that reaches 3e38: no weights are refused for
    it.
    """
    high = np.array([4.8, np.finfo(np.float32).max, 0.4, np.inf], np.float32)
    spec = PolicySpec(Box((4,), "float32", -high, high), Discrete(2), SPEC.module)
    store = WeightStore(tmp_path, "default")
    given = {name: array * 100 for name, array in weights().items()}
    assert store.publish(add(store, given, spec=spec.to_json())).version == 1
