"""A command says "live" of a served version, "wanted" of others, and exits accordingly."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.serving import Wait, wait_served
from ingest.access.key_files import create_token
from ingest.client.policy_client import PolicyClient
from policy.inference.spec import PolicySpec
from policy.inference.weight_store import WeightStore
from policy.networks.policy import Policy
from storage.spaces.descriptors import parse_space
from storage.weights.manifest import Served
from tests.collector_process import CollectorProcess, declare
from tests.headrace.command import answer, headrace
from tests.storage.weights.any_weights import record

SPEC = PolicySpec(parse_space("box:4"), parse_space("discrete:2"))
OTHER = PolicySpec(parse_space("box:3"), parse_space("discrete:2"))


def candidate(root: Path, seed: int, spec: PolicySpec = SPEC) -> str:
    weights = Policy(spec, seed=seed).get_weights()
    return WeightStore(root, "default").add_candidate(
        weights, spec=spec.to_json(), metrics={}, lineage={}
    )


# --- waiting ---------------------------------------------------------------------------------

NEW, OLD, REFUSES = record(serves=2), record(serves=1), record(serves=1, wanted=2, why="spaces")


@pytest.mark.parametrize(
    ("records", "how", "state"),
    [
        ([], Wait.ALL, "no collector"),
        ([], Wait.ANY, "no collector"),
        ([NEW], Wait.ALL, "served"),
        ([record(serves=3)], Wait.ALL, "served"),  # another version was published since
        ([NEW, OLD], Wait.ALL, "not served"),
        ([NEW, OLD], Wait.ANY, "served"),
        ([NEW, REFUSES], Wait.ANY, "served"),
        ([NEW, REFUSES], Wait.ALL, "not served"),
        ([OLD, REFUSES], Wait.ANY, "not served"),
        ([OLD], Wait.NONE, "not asked"),
    ],
)
def test_which_collectors_have_to_serve(records: list[Served], how: Wait, state: str) -> None:
    found = wait_served(lambda: records, 2, how, seconds=0.1)
    assert found["state"] == state
    assert [one["why"] for one in found["collectors"]] == [one.why for one in records]


def test_a_collector_that_comes_round_is_waited_for() -> None:
    """One collector catches up, the registration of the other, killed one expires."""
    looks: Iterator[list[Served]] = iter([[OLD, REFUSES], [NEW, REFUSES], [NEW]])
    assert wait_served(lambda: next(looks), 2, Wait.ALL, seconds=60.0)["state"] == "served"


# --- the commands ------------------------------------------------------------------------------


def test_without_a_collector_a_version_is_wanted(tmp_path: Path) -> None:
    """Without a collector, publishing ends with status 0: one that starts later serves the
    version."""
    declare(tmp_path)
    done = headrace("publish", candidate(tmp_path, 1), "--no-gate", "--root", tmp_path)
    assert done.returncode == 0
    assert "Version 1 of default is wanted, no collector is registered" in done.stdout


def test_what_is_served_is_called_live(tmp_path: Path) -> None:
    """publish and rollback end once the collector serves the version."""
    declare(tmp_path)
    root = ("--root", tmp_path)
    with CollectorProcess(tmp_path) as collector:
        for seed in (1, 2):
            done = headrace("publish", candidate(tmp_path, seed), "--no-gate", *root)
            assert done.returncode == 0, done.stderr
            assert f"Version {seed} of default is live, served by 1 of 1" in done.stdout
            weights = collector.get("/v1/spec")[1]["policies"]["default"]["weights"]
            assert weights["served"]["version"] == weights["wanted"]["version"] == seed
        back = headrace("rollback", *root, "--why", "2 is worse")
        assert (back.returncode, "Version 3 of default is live" in back.stdout) == (0, True)
        listed = answer(headrace("versions", *root, "--json"))
        assert [one["version"] for one in listed["served"]] == [3]
        assert listed["live"]["pinned"]["why"] == "2 is worse"
        page = collector._pool.request("GET", collector.address + "/").data.decode()
        assert "version 3 is served, as wanted" in page
        assert "2 is worse" in page


def test_what_a_collector_refuses_is_not_called_live(tmp_path: Path) -> None:
    """A version that a collector refuses gives status 5 with the reason, also in `versions` and
    `verify`. A rollback goes to what it served.

    The policy was redeclared, and the collector runs with the earlier spaces, which only the
    collector knows.
    """
    declare(tmp_path)
    root = ("--root", tmp_path)
    with CollectorProcess(tmp_path) as collector:
        assert headrace("publish", candidate(tmp_path, 1), "--no-gate", *root).returncode == 0
        declare(tmp_path, observation="box:3")
        for number in (2, 3):
            digest = candidate(tmp_path, number, OTHER)
            done = headrace("publish", digest, "--no-gate", *root, "--wait-for", 20)
            assert (done.returncode, done.stdout) == (5, "")
            assert f"Version {number} of default is wanted and NOT served" in done.stderr
            assert "serves 1 (spec: expected the spaces that the policy is declared" in done.stderr
        listed = headrace("versions", *root).stdout
        assert "wanted" in listed
        assert "serves version 1: spec: expected the spaces" in " ".join(listed.split())
        notes = " ".join(answer(headrace("verify", *root, "--json"))["notes"])
        assert "wanted: version 3" in notes
        metrics = collector._pool.request("GET", collector.address + "/metrics").data.decode()
        assert 'headrace_wanted_version{policy="default"} 3.0' in metrics
        assert 'headrace_live_version{policy="default"} 1.0' in metrics
        assert 'headrace_weights_refused_total{policy="default",why="unusable"} 2.0' in metrics
        declare(tmp_path)
        back = headrace("rollback", *root)
        assert back.returncode == 0, back.stderr
        assert WeightStore(tmp_path, "default").manifest(4).copy_of == 1


def test_a_pinned_policy_is_published_again_after_resume(tmp_path: Path) -> None:
    """A job's publication is refused with status 6, and the message names the pin and `resume`."""
    declare(tmp_path)
    root = ("--root", tmp_path)
    for seed in (1, 2):
        headrace("publish", candidate(tmp_path, seed), "--no-gate", *root)
    headrace("rollback", *root, "--why", "2 is worse")
    digest = candidate(tmp_path, 3)
    refused = headrace("publish", digest, "--no-gate", *root)
    assert (refused.returncode, refused.stdout) == (6, "")
    assert "(2 is worse); `headrace resume" in refused.stderr
    resumed = answer(headrace("resume", *root, "--json"))
    assert resumed["ended"]["why"] == "2 is worse"
    assert headrace("publish", digest, "--no-gate", *root).returncode == 0
    assert "was not pinned" in headrace("resume", *root).stdout


def test_a_collector_that_cannot_register_is_asked(tmp_path: Path) -> None:
    """A collector that cannot write its record, as on a read-only mount, is asked by address."""
    declare(tmp_path)
    directory = tmp_path / "weights" / "default"
    directory.mkdir(parents=True)
    (directory / "served").write_text("")
    with CollectorProcess(tmp_path):
        done = headrace("publish", candidate(tmp_path, 1), "--no-gate", "--root", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "served by 1 of 1" in done.stdout


def test_a_collector_that_does_not_say_is_not_taken_for_serving(tmp_path: Path) -> None:
    """The collector cannot register, and answers only requests with a token: it counts as not
    serving."""
    declare(tmp_path)
    directory = tmp_path / "weights" / "default"
    directory.mkdir(parents=True)
    (directory / "served").write_text("")
    create_token(tmp_path, "somebody", ["log"])
    with CollectorProcess(tmp_path):
        words = ("--no-gate", "--root", tmp_path, "--wait-for", 1)
        done = headrace("publish", candidate(tmp_path, 1), *words)
    assert (done.returncode, done.stdout) == (5, "")
    assert "it is not registered, and its answer was" in done.stderr


def test_over_http_it_is_the_same(tmp_path: Path) -> None:
    """publish, rollback and resume through a remote collector; the pin names the token."""
    there, here = tmp_path / "there", tmp_path / "here"
    declare(there)
    declare(here)
    scopes = ["weights:publish", "weights:read"]
    made, token = create_token(there, "trainer", scopes)
    with CollectorProcess(there) as collector:
        url = ("--url", collector.address)

        def run(*words: object) -> Any:
            return headrace(*words, *url, env={"HEADRACE_TOKEN": token})

        for seed in (1, 2):
            done = run("publish", candidate(here, seed), "--no-gate", "--root", here)
            assert (done.returncode, "served by 1 of 1" in done.stdout) == (0, True), done.stderr
        assert run("rollback", "--why", "worse").returncode == 0
        digest = candidate(here, 3)
        refused = run("publish", digest, "--no-gate", "--root", here)
        assert (refused.returncode, "pinned by token" in refused.stderr) == (6, True)
        assert answer(run("versions", "--json"))["live"]["pinned"]["by"] == f"token {made.id}"
        assert json.loads(run("resume", "--json").stdout)["ended"]["why"] == "worse"
        assert run("publish", digest, "--no-gate", "--root", here).returncode == 0


# --- rollback and clients ------------------------------------------------------------------------


def test_a_pinned_policy_holds_no_client(tmp_path: Path) -> None:
    """While the policy is pinned, clients continue to act, far beyond `steps_per_version`."""
    declare(tmp_path, steps_per_version=10)
    for seed in (1, 2):
        headrace("publish", candidate(tmp_path, seed), "--no-gate", "--root", tmp_path)
    WeightStore(tmp_path, "default").rollback()
    with CollectorProcess(tmp_path) as collector:
        until(lambda: collector.get("/v1/spec")[1]["policies"]["default"]["live_version"] == 3)
        with PolicyClient(collector.address) as client:
            episode = client.start_episode()
            for _ in range(50):
                client.get_action(episode, [0.0] * 4)
            client.end_episode(episode)
            client.flush()
            assert client._actor.holds == 0
        assert collector.stop() == 0


def until(holds: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(6_000):
        if holds():
            return
        pause.wait(0.02)
    raise AssertionError("it never held")
