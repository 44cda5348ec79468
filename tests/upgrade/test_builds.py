"""The client of one build with the collector of another, as processes of their own code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import requests
from requests.adapters import HTTPAdapter

from ingest.client.policy_client import PolicyClient
from tests.collector_process import CollectorProcess, shard_rows
from tests.upgrade.fixture import BUILDS, ROOT, environment, steps_in_shards, unpacked, verified

TODAY = ""
PAIRS = [(build, TODAY) for build in BUILDS] + [(TODAY, build) for build in BUILDS]
PROGRAM = Path(__file__).with_name("logging_program.py")


def collector_of(build: str, root: Path) -> CollectorProcess:
    """A collector of a build; today's is forked."""
    if build == TODAY:
        return CollectorProcess(root)
    return CollectorProcess(root, program=("-m", "ingest"), env=environment(build))


def python(build: str, *words: object) -> str:
    """What a program prints with the packages of a build."""
    return subprocess.run(
        [sys.executable, *map(str, words)],
        env={**os.environ, **environment(build)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout


@pytest.mark.parametrize("build", [*BUILDS, TODAY])
def test_a_process_of_a_build_runs_its_own_code(build: str) -> None:
    """Otherwise the pairs below would compare a build with itself."""
    found = python(
        build, "-c", "import headrace, ingest; print(headrace.__file__, ingest.__file__)"
    )
    for path in found.split():
        assert (Path(path).parents[1] == ROOT) == (build == TODAY)


@pytest.mark.parametrize("spools", [False, True], ids=["queue", "spool"])
@pytest.mark.parametrize(("client", "collector"), PAIRS)
def test_any_client_works_with_any_collector(
    tmp_path: Path, client: str, collector: str, spools: bool
) -> None:
    """Each step of each way of logging is stored once, and nothing is refused."""
    facts = unpacked(tmp_path, "follower", client or collector)
    root, logged = tmp_path / "root", Counter[str]()
    with collector_of(collector, root) as running:
        for mode in ("local", "remote"):
            spool = tmp_path / mode if spools else ""
            report = json.loads(python(client, PROGRAM, running.address, mode, spool))
            assert report["refused"] == {}
            logged.update(report["logged"])
        running.settle(facts["in_shards"] + logged.total())
        assert running.stop() == 0
    assert verified(root) == facts["acknowledged"] + logged.total()
    found = steps_in_shards(root)
    assert set(found.values()) == {1}
    names = Counter(name for name, _, _ in found)
    assert {name: names[name] for name in logged} == logged
    shares = {row["eps_id"]: row["pass_prob"] for row in shard_rows(root)}
    for name in logged:
        assert shares[name] == (0.5 if name.endswith("0.5") else 1.0), name


class Moved(HTTPAdapter):
    """Sends requests for an address to another one."""

    def __init__(self, known: str, address: str) -> None:
        super().__init__()
        self._known, self._address = known, address

    def send(self, request: requests.PreparedRequest, *given: Any, **more: Any) -> Any:
        request.url = (request.url or "").replace(self._known, self._address)
        return super().send(request, *given, **more)


@pytest.mark.parametrize("collector", [*BUILDS, TODAY])
@pytest.mark.parametrize("build", BUILDS)
def test_a_spool_is_delivered_once(tmp_path: Path, build: str, collector: str) -> None:
    """A client of today delivers what an earlier one left, to the collector of its root."""
    facts, root = unpacked(tmp_path, "root", build), tmp_path / "root"
    token = facts["tokens"]["writer"]
    known = (root / "journal" / "address").read_text().split()[0]
    with collector_of(collector, root) as running, requests.Session() as session:
        session.mount(known, Moved(known, running.address))
        with PolicyClient(
            known,
            session=session,
            token=token,
            on_full="spool",
            spool_dir=tmp_path / "spool",
            policy_id="default",
        ) as client:
            client.flush(60)
            assert client.stats.acknowledged == facts["spool"]["events"]
            assert (client.stats.refused, client.stats.spooled) == ({}, 0)
        running.settle(facts["in_shards"] + 2 * 17, authorization=f"Bearer {token}")
        assert running.stop() == 0
    assert [path.name for path in (tmp_path / "spool").iterdir()] == ["lock"]
    assert verified(root) == facts["acknowledged"] + 2 * 17 + 1  # of `spooled-open`
    found = steps_in_shards(root)
    assert set(found.values()) == {1}
    spooled = dict.fromkeys((f"spooled-{number}" for number in range(20)), 2)
    names = Counter(name for name, _, _ in found)
    assert {name: names[name] for name in spooled} == spooled
