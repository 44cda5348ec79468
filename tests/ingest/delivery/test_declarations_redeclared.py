"""A collector with new declarations, and clients that know the earlier ones.

Both pairs of spaces encode to equal bytes: names in another order, and other numbers. A client's
value is stored as it was meant, or refused, never reinterpreted.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ingest.client.policy_client import PolicyClient
from ingest.protocol.errors import Refusal
from storage.declarations.declaration import PolicyDeclaration
from storage.declarations.policy_files import save_declaration
from storage.reading.shard_reader import ShardReader
from storage.spaces.descriptors import Box, Discrete
from tests.collector_process import CollectorProcess


def box(size: int, dtype: str) -> Box:
    return Box((size,), np.dtype(dtype), np.array(-np.inf), np.array(np.inf))


BEFORE = {
    "names": PolicyDeclaration(
        policy_id="names", observation=Discrete.of(["DE", "FR"]), action=Discrete.of(["a", "b"])
    ),
    "bytes": PolicyDeclaration(
        policy_id="bytes", observation=box(2, "float64"), action=box(2, "float64")
    ),
}
AFTER = [
    replace(BEFORE["names"], observation=Discrete.of(["FR", "DE"]), action=Discrete.of(["b", "a"])),
    replace(BEFORE["bytes"], observation=box(4, "float32"), action=box(4, "float32")),
]
MEANT: dict[str, tuple[Any, Any]] = {"names": ("DE", "a"), "bytes": ([1.0, 2.0], [3.0, 4.0])}
NOW: dict[str, tuple[Any, Any]] = {"names": ("DE", "a"), "bytes": ([1.0] * 4, [2.0] * 4)}


def log_all(client: PolicyClient, prefix: str, *policies: str) -> list[str]:
    """Log two episodes of each policy, and one with an agent of each; return those that were
    logged.
    """
    names = []
    for policy in policies:
        obs, action = MEANT[policy]
        names += [f"{prefix}-{policy}", f"{prefix}-{policy}-step"]
        client.start_episode(names[-2], policy_id=policy)
        client.log_action(names[-2], obs, action)
        client.end_episode(names[-2], obs)
        client.log_step(obs, action, 1.0, policy_id=policy, episode_id=names[-1])
    if len(policies) > 1:
        names.append(f"{prefix}-whole")
        client.start_episode(names[-1], policy_id={policy: policy for policy in policies})
        client.log_action(names[-1], *({one: MEANT[one][k] for one in policies} for k in (0, 1)))
        client.end_episode(names[-1])
    return names


def stored(root: Path, policies: Iterable[PolicyDeclaration]) -> dict[str, set[str]]:
    """Read the shards of the given declarations: episode -> its steps by name, as text."""
    found: dict[str, set[str]] = {}
    for policy in policies:
        save_declaration(root, policy)
        of = {"policy_id": policy.policy_id, "schema_id": policy.schema_id}
        with ShardReader(root, **of, names=True) as reader:
            for batch in reader:
                for row in zip(batch["eps_id"], batch["obs"], batch["actions"], strict=True):
                    eps, obs, action = (np.asarray(one).tolist() for one in row)
                    found.setdefault(eps, set()).add(str((obs, action)))
    return found


@pytest.mark.parametrize("is_known", [True, False])
def test_what_was_encoded_by_an_earlier_declaration_is_that_or_nothing(
    tmp_path: Path, is_known: bool
) -> None:
    """A running client, one with a cache, one with policy files and a spool log before the
    collector returns with other declarations. Under the same root it knows the earlier ones, and
    stores every value as it was meant. Under another root it refuses every episode, with the
    reason.
    """
    root = tmp_path / "root"
    files = [save_declaration(root, policy) for policy in BEFORE.values()]
    files = [shutil.copy(file, tmp_path) for file in files]
    spool: Any = {"on_full": "spool", "spool_dir": tmp_path / "spool"}
    with CollectorProcess(root) as collector, contextlib.ExitStack() as stack:
        address = collector.address
        running = stack.enter_context(PolicyClient(address, cache_dir=tmp_path / "cache"))
        running.connect()
        collector.kill()

        logged = log_all(running, "running", *BEFORE)
        clients = [running]
        cached = PolicyClient(address, cache_dir=tmp_path / "cache")
        logged += log_all(stack.enter_context(cached), "cached", *BEFORE)
        clients.append(cached)
        for file, policy in zip(files, BEFORE, strict=True):
            client = stack.enter_context(PolicyClient(address, policy_file=file))
            logged += log_all(client, "file", policy)
            clients.append(client)
        spooling = PolicyClient(address, cache_dir=tmp_path / "cache", **spool)
        logged += log_all(spooling, "spool", *BEFORE)
        spooling.close(0.05)

        collector.root = root if is_known else tmp_path / "other"
        for declared in AFTER:
            save_declaration(collector.root, declared)
        collector.restart()
        errors: list[Refusal] = []
        later = PolicyClient(address, on_error=errors.append, **spool)
        for client in [*clients, stack.enter_context(later)]:
            if is_known or client is later:  # not reported to this process
                client.flush(60)
            else:
                with pytest.raises(Refusal, match=r"in schema \w+, got \w+: the client used"):
                    client.flush(60)
                assert client.stats.refused["other_schema"] > 0
        assert is_known != ("other_schema" in {error.code for error in errors})
        running.connect()
        for policy, (obs, action) in NOW.items():
            running.log_step(obs, action, 1.0, policy_id=policy, episode_id=f"now-{policy}")
        running.flush(60)
        assert collector.stop() == 0

    steps = {policy: str(value) for policy, value in NOW.items()}
    now = {f"now-{policy}": {steps[policy]} for policy in NOW}
    assert stored(collector.root, AFTER) == now
    found = stored(root, BEFORE.values()) if is_known else {}
    meant = {policy: str(value) for policy, value in MEANT.items()}
    assert found == {
        name: {meant[policy] for policy in MEANT if policy in name or "whole" in name}
        for name in (logged if is_known else ())
    }


def test_a_client_that_notices_nothing_learns_of_it_by_the_first_answer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The first episode after the change uses the declaration that the client knew; later ones use
    the current one."""
    save_declaration(tmp_path, BEFORE["names"])
    with CollectorProcess(tmp_path) as collector, PolicyClient(collector.address) as client:
        client.log_step("DE", "a", 1.0, episode_id="before")
        client.flush(60)
        assert collector.stop() == 0
        save_declaration(tmp_path, AFTER[0])
        collector.restart()
        with caplog.at_level(logging.ERROR, "headrace.client"):
            for name in ("still", "after"):
                client.log_step("DE", "a", 1.0, episode_id=name)
                client.flush(60)
                client.connect()
        check_by_json(collector, BEFORE["names"].schema_id, AFTER[0].schema_id)
        assert collector.stop() == 0
    assert "declares other spaces than before" in caplog.text
    assert stored(tmp_path, AFTER[:1]).keys() == {"after", "today"}
    assert stored(tmp_path, [BEFORE["names"]]).keys() == {"before", "still"}


def check_by_json(collector: CollectorProcess, before: str, today: str) -> None:
    """Only an event that names another schema than its episode is refused."""

    def post(path: str, **body: Any) -> tuple[int, str | None]:
        status, answer = collector.post(path, body)
        return status, answer.get("error", {}).get("code")

    assert post("/v1/episodes", episode_id="odd", schema_id="0" * 12) == (422, "other_schema")
    assert post("/v1/episodes", episode_id="today") == (201, None)
    step = "/v1/episodes/today/log_action"
    assert post(step, obs="DE", action="a", schema_id=before) == (422, "other_schema")
    assert post(step, obs="DE", action="a", schema_id=today) == (200, None)
    act = "/v1/episodes/today/action"
    assert post(act, obs="DE", schema_id=before) == (422, "other_schema")
    assert post("/v1/episodes/today/end", obs="DE", schema_id=before) == (422, "other_schema")
    assert post("/v1/episodes/today/end", obs="DE") == (200, None)
    ask = {"episode_id": "none", "obs": "DE", "schema_id": before}
    _, answer = collector.post("/v1/actions", {"actions": [ask], "record": False})
    assert answer["actions"][0]["error"]["code"] == "other_schema"
