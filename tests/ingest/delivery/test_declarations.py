"""A client before it has its policy's declaration, and the sources of that declaration."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ingest.client.policy_client import PolicyClient
from ingest.delivery.declarations import Declarations, Draft
from ingest.protocol import messages as wire
from ingest.protocol.errors import Refusal
from storage.declarations.declaration import DeclarationError, PolicyDeclaration
from storage.declarations.policy_files import save_declaration
from storage.spaces.codec import Codec
from storage.spaces.descriptors import parse_space
from tests.ingest.scripted_collector import (
    ACTION,
    OBSERVATION,
    Gate,
    ScriptedCollector,
    answering,
    cut_before,
    pass_by,
)

OBS = [0.5, -1.0]


def hold_spec(collector: ScriptedCollector) -> Gate:
    """Withhold the collector's declarations from its clients until the gate is opened."""
    gate = Gate()
    collector.chance = lambda: gate
    return gate


def test_values_are_copied_until_it_is_known_what_is_declared() -> None:
    """The caller may change its arrays, lists and mappings right after the call."""
    with ScriptedCollector() as collector, PolicyClient(collector.address, max_wait=0.0) as client:
        gate = hold_spec(collector)
        name = client.start_episode()
        obs = np.array(OBS)
        for action in (0, 2):
            client.log_action(name, obs, action, action_prob=0.5)
            client.log_returns(name, 1.0)
            obs *= -2.0
        client.end_episode(name, obs)
        gate.opened.set()
        client.flush()
        first, _, second, _, end = collector.episodes[name].events
    encode = Codec(OBSERVATION).encode
    assert [first.obs, second.obs, end.obs] == [encode(OBS), encode([-1, 2]), encode([2, -4])]
    assert [first.action, second.action] == [Codec(ACTION).encode(0), Codec(ACTION).encode(2)]


@pytest.mark.parametrize("bad", [[np.nan, 0.0], [0.0], {"a": [0.0, 0.0]}, [99.0, 0.0]])
def test_what_does_not_fit_ends_its_episode_at_its_last_good_step(bad: Any) -> None:
    """The error is counted and reported to on_error, to the episode's next call and to flush. Other
    episodes go on.
    """
    refusals: list[Refusal] = []
    with (
        ScriptedCollector() as collector,
        PolicyClient(collector.address, max_wait=0.0, on_error=refusals.append) as client,
    ):
        gate = hold_spec(collector)
        name, other = client.start_episode(), client.start_episode()
        client.log_action(name, OBS, 1)
        client.log_action(name, bad, 1)
        client.log_action(name, OBS, 2)
        client.log_action(other, OBS, 1)
        gate.opened.set()
        with pytest.raises(Refusal, match=f"{name}.*; the episode has ended as broken$"):
            client.flush()
        with pytest.raises(ValueError, match="obs"):
            client.log_action(name, OBS, 1)
        client.end_episode(other)
        client.flush()
        events = collector.episodes[name].events
        assert [type(event) for event in events] == [wire.LogAction, wire.End]
        assert (events[1].seq, events[1].broken) == (2, "client_invalid")
        assert len(collector.episodes[other].events) == 2
        assert client.stats.refused == {"invalid": 1, "broken": 1}
        assert (client.stats.waiting, client.stats.acknowledged) == (0, 5)  # 7 events are logged
    assert [(one.code, one.episode_id) for one in refusals] == [("invalid", name)]


@pytest.mark.parametrize("error", [RuntimeError("requires grad"), KeyError("x"), OSError(5)])
def test_a_value_that_raises_its_own_error_does_not_fit(error: Exception) -> None:
    """A tensor that requires grad breaks its episode at once; other episodes go on. Once the
    declaration is known, the call raises and leaves the episode as it was."""

    class Odd:
        def __array__(self, *_: Any, **__: Any) -> None:
            raise error

        def __float__(self) -> float:
            raise error

    met: list[Refusal] = []
    with (
        ScriptedCollector() as collector,
        PolicyClient(collector.address, max_wait=0.0, on_error=met.append) as client,
    ):
        gate = hold_spec(collector)
        odd, other = client.start_episode(), client.start_episode()
        for name in (odd, other):
            client.log_action(name, OBS, 1)
        client.log_action(odd, Odd(), 1)
        client.log_action(other, OBS, 2)
        gate.opened.set()
        with pytest.raises(Refusal, match="a value cannot be read"):
            client.flush(60)
        assert client.stats.refused == {"invalid": 1}
        assert client.stats.errors == 0
        assert [refusal.episode_id for refusal in met] == [odd]
        assert collector.episodes[odd].events[-1].broken == "client_invalid"
        for obs, action in ((Odd(), 1), (OBS, Odd())):
            with pytest.raises(ValueError, match="a value cannot be read"):
                client.log_action(other, obs, action)
        with pytest.raises(ValueError, match="reward: expected one number"):
            client.log_returns(other, Odd())  # type: ignore[arg-type]
        client.end_episode(other)
        client.flush(60)
        assert [type(event) for event in collector.episodes[other].events] == [
            wire.LogAction,
            wire.LogAction,
            wire.End,
        ]


def test_a_policy_that_is_not_there_is_told_when_that_is_known() -> None:
    """The call raises if the collector has answered; otherwise the episode's events are refused
    later.
    """
    with ScriptedCollector() as collector, PolicyClient(collector.address, max_wait=0.0) as client:
        gate = hold_spec(collector)
        name = client.start_episode(policy_id="ads")
        client.log_action(name, OBS, 1)
        gate.opened.set()
        with pytest.raises(Refusal, match=r"expected one of \['default'\], got 'ads'"):
            client.flush()
        with pytest.raises(ValueError, match=r"expected one of \['default'\], got 'ads'"):
            client.get_action(client.start_episode(policy_id="ads"), OBS)


def test_drafts_are_bounded_in_bytes_with_the_queue() -> None:
    """Events that wait for the declaration count towards the limit of the queue."""
    with ScriptedCollector() as collector:
        gate = hold_spec(collector)
        options = {"max_wait": 0.0, "max_pending_bytes": 10_000, "on_full": "drop"}
        with PolicyClient(collector.address, **options) as client:  # type: ignore[arg-type]  # one dict
            name = client.start_episode()
            for _ in range(20):
                client.log_action(name, np.zeros(256), 1)
            assert client.stats.waiting < 10
            assert client.stats.dropped_steps > 10
            gate.opened.set()
            with pytest.raises(Refusal):
                client.flush()


def test_with_a_policy_file_calls_validate_at_once(tmp_path: Path) -> None:
    """No collector is needed; an invalid file raises when the client is created."""
    path = save_declaration(tmp_path, PolicyDeclaration(observation=OBSERVATION, action=ACTION))
    with ScriptedCollector() as collector:
        collector.chance = lambda: cut_before
        with PolicyClient(collector.address, policy_file=path) as client:
            name = client.start_episode()
            with pytest.raises(ValueError, match="obs"):
                client.log_action(name, [0.0], 1)
            client.log_action(name, OBS, 1)
            collector.chance = lambda: pass_by
            client.flush()
        assert len(collector.episodes[name].events) == 1
    path.write_text("{}")
    with pytest.raises(DeclarationError, match=r"default\.json"):
        PolicyClient(collector.address, policy_file=path)


def test_a_policy_file_that_cannot_be_read_is_named_by_its_argument(tmp_path: Path) -> None:
    """The same holds for bounds of a wrong type and an address with a blank."""
    for path in (tmp_path, tmp_path / "nope.json"):
        with pytest.raises(DeclarationError, match=f"policy_file: expected a file.*{path}"):
            PolicyClient("http://h", policy_file=path)
    with pytest.raises(ValueError, match="spool_bytes: expected a number >= 1, got '1'"):
        PolicyClient("http://h", on_full="spool", spool_dir=tmp_path, spool_bytes="1")  # type: ignore[arg-type]
    for address in ("http://h/ p", "http://h/p\n"):
        with pytest.raises(ValueError, match="address: expected"):
            PolicyClient(address)


def test_a_policy_file_that_differs_from_the_collector_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The collector's declaration applies from then on."""
    other = PolicyDeclaration(observation=parse_space("box:7"), action=ACTION)
    path = save_declaration(tmp_path, other)
    with (
        ScriptedCollector() as collector,
        PolicyClient(collector.address, policy_file=path) as client,
    ):
        client.connect()
        client.log_action(client.start_episode(), OBS, 1)
    assert "declares other spaces than the policy file" in caplog.text


def test_the_cache_serves_the_next_process(tmp_path: Path) -> None:
    """The cache is written after the first answer and checked when read; each address has its
    own.
    """
    with ScriptedCollector() as collector:
        with PolicyClient(collector.address, cache_dir=tmp_path / "cache") as first:
            first.connect()
        (kept,) = (tmp_path / "cache").iterdir()
        collector.chance = lambda: answering(503, "draining")
        with PolicyClient(collector.address, cache_dir=tmp_path / "cache") as second:
            name = second.start_episode()
            with pytest.raises(ValueError, match="obs"):
                second.log_action(name, [0.0], 1)
            collector.chance = lambda: pass_by
    assert Declarations("http://elsewhere", None, tmp_path / "cache").spec is None
    document = json.loads(kept.read_text())
    document["spec"]["policies"]["default"]["action"]["n"] = 4
    for damaged in (json.dumps(document), "{", "[]", ""):
        kept.write_text(damaged)
        assert Declarations(collector.address, None, tmp_path / "cache").spec is None


def test_a_cache_that_cannot_be_written_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A warning is logged, and the client goes on."""
    blocked = tmp_path / "file"
    blocked.write_text("")
    with (
        caplog.at_level(logging.WARNING, "headrace.client"),
        ScriptedCollector() as collector,
        PolicyClient(collector.address, cache_dir=blocked / "cache") as client,
    ):
        client.log_step(OBS, 1, 1.0)
        client.flush()
    assert "are not cached" in caplog.text


def test_what_cannot_be_copied_raises_in_the_call() -> None:
    """A generator could not be sent later."""
    with ScriptedCollector() as collector, PolicyClient(collector.address, max_wait=0.0) as client:
        gate = hold_spec(collector)
        name = client.start_episode()
        with pytest.raises(ValueError, match="obs: cannot be copied"):
            client.log_action(name, (x for x in OBS), 1)
        draft = client._declarations.policy(None).observe(name, {"a": np.zeros(10), "b": ("x", 1)})
        gate.opened.set()
    assert isinstance(draft, Draft)
    assert len(draft) > 80
