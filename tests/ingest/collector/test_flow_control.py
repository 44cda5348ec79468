"""Flow control bounds the steps that may be closed while a version is live."""

from __future__ import annotations

from ingest.collector.flow_control import FlowControl
from storage.declarations.declaration import PolicyDeclaration
from storage.spaces.descriptors import parse_space


def flow_of(quota: int | None, live: dict[str, int]) -> FlowControl:
    declaration = PolicyDeclaration(
        observation=parse_space("box:4"), action=parse_space("discrete:2"), steps_per_version=quota
    )
    return FlowControl({"default": declaration}, live.get)


def close(flow: FlowControl, steps: int) -> None:
    for _ in range(steps):
        flow.count("default", 1)


def test_a_version_is_held_at_its_quota_and_told_once() -> None:
    flow = flow_of(5, {"default": 1})
    close(flow, 4)
    assert flow.held() == {}
    close(flow, 1)
    assert flow.held() == {"default": 1}
    assert flow.newly_held(flow.held()) == ["default"]
    assert flow.newly_held(flow.held()) == []


def test_a_surplus_counts_for_the_next_version() -> None:
    """Steps beyond `steps_per_version` count for the next version; otherwise each one would leave
    the learner further behind."""
    live = {"default": 1}
    flow = flow_of(5, live)
    close(flow, 8)
    live["default"] = 2
    assert flow.held() == {}
    close(flow, 1)
    assert flow.held() == {}
    close(flow, 1)
    assert flow.held() == {"default": 2}


def test_clients_that_lag_too_far_are_told_to_wait() -> None:
    """Clients that act with a version older than live - max_policy_lag wait; the live version is
    not held.
    """
    declaration = PolicyDeclaration(
        observation=parse_space("box:4"), action=parse_space("discrete:2"), max_policy_lag=2
    )
    live = {"default": 2}
    flow = FlowControl({"default": declaration}, live.get)
    assert flow.active
    assert flow.versions_to_hold() == {}
    live["default"] = 7
    assert flow.versions_to_hold() == {"default": 4}
    assert flow.held() == {}


def test_nothing_is_held_without_a_quota_or_a_version() -> None:
    off = flow_of(None, {"default": 1})
    close(off, 100)
    assert not off.active
    assert off.held() == {}
    unpublished = flow_of(5, {})
    close(unpublished, 100)
    assert unpublished.held() == {}
