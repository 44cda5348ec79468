"""A sample of every attack, for the unit suite; `make attack` runs them in full."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import urllib3

from tests.attack import arrow_streams, json_bodies, msgpack_bodies, raw_sockets
from tests.attack.attacked_collector import Case, judge_ratios
from tests.collector_process import CollectorProcess, declare
from tests.faults import mutants, scenario
from tests.faults.scenario import Verdict
from tests.ingest.raw_http import exchange

SAMPLE = 120
SEED = 11


@pytest.fixture(scope="module")
def collector(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CollectorProcess]:
    folder = tmp_path_factory.mktemp("attacked")
    declare(folder / "root")
    with CollectorProcess(folder / "root", log=folder / "log") as process:
        yield process


def every() -> list[Case]:
    return [*json_bodies.cases(), *msgpack_bodies.cases(), *arrow_streams.cases(SEED, 50)]


def test_the_attacks_are_many_and_reach_every_field() -> None:
    """Thousands of cases with unique names, derived from the current messages."""
    names = [case.name for case in every()]
    assert len(names) > 3_000
    assert len(raw_sockets.cases()) > 200
    for field in ("LogAction.pass_prob", "Start.tags", "ActionBatch.actions", "Register.name"):
        assert any(field in name for name in names), field


@pytest.mark.parametrize("name", scenario.ATTACKS)
def test_an_attack_is_a_scenario(name: str) -> None:
    """An attack runs like any fault scenario, and a broken build has to fail it."""
    found = scenario.load(name)
    assert found.name == name
    assert 0 < found.planted <= found.quick <= found.long
    assert name == "schema" or any(name in one.symptoms for one in mutants.every().values())


def test_one_pair_of_windows_judges_nothing() -> None:
    """Momentary load on the machine neither fails a build nor catches a broken one."""
    faults = []
    for ratios in ([], [9.0], [1.0], [1.0, 9.0], [1.0, 9.0, 1.0], [1.0, 9.0, 9.0]):
        judge_ratios(verdict := Verdict(), ratios)
        faults.append(set(verdict.faults))
    assert faults == [{"unjudged"}] * 4 + [set(), {"slowed"}]


def test_hostile_bodies_are_refused_and_nothing_else_happens(collector: CollectorProcess) -> None:
    """No answer of 500 or above, none too late; the collector keeps running."""
    pool = urllib3.PoolManager(retries=False, timeout=60.0)
    cases = [case for case in every() if len(case.body) < 500_000]
    for case in random.Random(SEED).sample(cases, SAMPLE):
        headers = {"content-type": "application/json", **case.headers}
        url = collector.address + case.path
        answer = pool.request(case.method, url, body=case.body, headers=headers)
        assert answer.status < 500 or answer.status in case.allowed, case.name
    assert collector.get("/healthz")[0] == 200


def test_no_request_is_hidden_in_another(collector: CollectorProcess) -> None:
    for label, data in random.Random(SEED).sample(sorted(raw_sockets.cases().items()), 40):
        heard = exchange(collector.port, data, patience=0.2, answers=2)
        assert heard.statuses or heard.closed, label
        assert 201 not in heard.statuses, label
    assert collector.get("/v1/episodes/smuggled")[0] == 404
