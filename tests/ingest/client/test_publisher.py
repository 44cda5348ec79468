"""Publishing from another machine: `Publisher`, and commands with `--url`, on a real collector.

Also of `ingest.client.admin_session`.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import requests

from ingest.access.key_files import create_token
from ingest.client.publisher import Publisher
from ingest.protocol import messages as wire
from ingest.protocol.errors import CollectorUnavailable, Refusal
from policy.inference.spec import PolicySpec
from policy.inference.weight_store import WeightStore
from policy.networks.policy import Policy
from storage.spaces.descriptors import parse_space
from storage.weights.decisions import load_decisions
from tests.certificates import certify
from tests.collector_process import CollectorProcess, declare
from tests.headrace.command import Result, headrace
from tests.ingest.scripted_collector import ScriptedCollector

SPEC = PolicySpec(parse_space("box:4"), parse_space("discrete:2"))


@dataclass
class House:
    """A collector with its store, and the separate root of a trainer."""

    process: CollectorProcess
    served: WeightStore
    trained: WeightStore
    token: str
    folder: Path

    def publisher(self) -> Publisher:
        return Publisher(self.process.address, token=self.token)

    def candidate(self, seed: int) -> str:
        weights = Policy(SPEC, seed=seed).get_weights()
        lineage = {"stream": [[0, 7]]}
        return self.trained.add_candidate(
            weights, spec=SPEC.to_json(), metrics={"seed": seed}, lineage=lineage
        )

    def run(self, *words: object, token: str | None = None) -> Result:
        return headrace(*words, env={"HEADRACE_TOKEN": self.token if token is None else token})


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    folder = tmp_path_factory.mktemp("house")
    root, mine = folder / "served", folder / "trained"
    declare(root)
    declare(mine)
    token = create_token(root, "trainer", ["weights:publish"])[1]
    with CollectorProcess(root, log=folder / "log") as process:
        stores = WeightStore(root, "default"), WeightStore(mine, "default")
        yield House(process, *stores, token, folder)


def sockets() -> set[str]:
    """The open sockets of this process."""
    return {link for one in Path("/proc/self/fd").iterdir() if "socket" in (link := link_of(one))}


def link_of(path: Path) -> str:
    try:
        return os.readlink(path)
    except FileNotFoundError:  # that of the listing
        return ""


def test_a_forked_child_publishes_on_connections_of_its_own(house: House) -> None:
    """Parent and child would otherwise read each other's answers."""
    others = sockets()
    with house.publisher() as publisher:
        publisher.versions()
        mine = sockets() - others
        assert mine
        if not (child := os.fork()):
            try:
                publisher.versions()
                os._exit(0 if sockets() - others and not sockets() & mine else 1)
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        publisher.versions()
        assert sockets() - others == mine


def test_a_candidate_is_published_elsewhere_with_all_that_is_known_of_it(house: House) -> None:
    """The candidate's weights, spec, metrics and lineage arrive under the next number."""
    with house.publisher() as publisher:
        before = publisher.versions()
        now = publisher.publish_candidate(house.trained, house.candidate(1))
        after = publisher.versions()
    assert (now.version, after.next) == (before.next, before.next + 1)
    assert after.live == now
    manifest, weights = house.served.load(now.version)
    assert (manifest.metrics, manifest.spec) == ({"seed": 1}, SPEC.to_json())
    assert house.served.lineage(now.version)["stream"].ranges() == [(0, 7)]
    for name, array in Policy(SPEC, seed=1).get_weights().items():
        np.testing.assert_array_equal(weights[name], array)
    assert [one["version"] for one in after.versions] == house.served.versions()


def test_publishers_at_the_same_time_get_a_number_each(house: House) -> None:
    """The slower one proposes the next number: nothing is lost, nothing is published twice."""
    digests = [house.candidate(seed) for seed in range(10, 14)]
    before, found = house.served.versions(), list[int]()

    def publish(digest: str) -> None:
        with house.publisher() as publisher:
            found.append(publisher.publish_candidate(house.trained, digest).version)

    threads = [threading.Thread(target=publish, args=(digest,)) for digest in digests]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    fresh = house.served.versions()[len(before) :]
    assert sorted(found) == fresh
    seeds = [house.served.manifest(number).metrics["seed"] for number in fresh]
    assert sorted(seeds) == [10, 11, 12, 13]


def test_a_rollback_needs_no_number(house: House) -> None:
    """A rollback without a number restores the version that was live before, once. A 404 for a
    missing version lists the others.
    """
    with house.publisher() as publisher:
        for seed in (20, 21):
            publisher.publish_candidate(house.trained, house.candidate(seed))
        now = publisher.rollback()
        assert house.served.manifest(now.version).metrics == {"seed": 20}
        with pytest.raises(Refusal, match=rf"versions .*\b{now.version} to go .* 10000"):
            publisher.rollback(to=10_000)
        publisher.resume()


def test_what_cannot_be_used_is_refused_once(house: House) -> None:
    """A 422 is not retried under another number."""
    with house.publisher() as publisher:
        before = publisher.versions()
        message = wire.Publish(version=1, sha256="0" * 64, weights=b"x", spec=SPEC.to_json())
        with pytest.raises(Refusal, match="SHA-256"):
            publisher._publish("default", message)
        with pytest.raises(Refusal, match="there is no policy"):
            publisher.versions("another/one")
        assert publisher.versions() == before


def test_a_given_session_is_used_for_everything() -> None:
    """The session's headers are sent; closing the publisher leaves the session open for its
    owner."""
    with ScriptedCollector() as collector, requests.Session() as session:
        session.headers["x-team"] = "ads"
        with Publisher(collector.address, session=session, token="t") as publisher:
            for call in (publisher.versions, publisher.rollback):
                with pytest.raises(Refusal):
                    call()
        assert [headers["x-team"] for _, headers, _ in collector.requests] == ["ads", "ads"]
        session.get(f"{collector.address}/v1/spec", timeout=60)


def test_nothing_of_the_environment_comes_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proxy would receive the token, and a .netrc would replace it."""
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login somebody password else\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    with ScriptedCollector() as collector:
        with Publisher(collector.address, token="t") as publisher, pytest.raises(Refusal):
            publisher.versions()
        assert [headers["authorization"] for _, headers, _ in collector.requests] == ["Bearer t"]


def test_a_publisher_trusts_the_authority_that_it_is_given(tmp_path: Path) -> None:
    """Only `ca` is trusted: another authority's certificate is refused, and nothing is sent."""
    mine, others = certify(tmp_path / "mine"), certify(tmp_path / "others")
    declare(tmp_path)
    token = create_token(tmp_path, "trainer", ["weights:publish"])[1]
    with CollectorProcess(tmp_path, options=mine.options, ca=mine.ca) as process:
        with Publisher(process.address, token=token, ca=mine.ca) as publisher:
            assert publisher.versions().next == 1
        for trusted in (others.ca, None):
            with (
                Publisher(process.address, token=token, ca=trusted) as publisher,
                pytest.raises(CollectorUnavailable, match="CERTIFICATE_VERIFY_FAILED"),
            ):
                publisher.versions()


@pytest.mark.parametrize("text", [None, "no certificate"])
def test_an_authority_that_is_none_is_named(tmp_path: Path, text: str | None) -> None:
    """The error names the file before anything is sent."""
    path = tmp_path / "ca.pem"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=r"ca: expected .* certificates.*ca\.pem"):
        Publisher("https://127.0.0.1:9", ca=path)


def answer(done: Result) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def test_the_commands_do_the_same(house: House) -> None:
    """publish, versions and rollback with --url; a token without the scope ends with status 2."""
    url, root = ("--url", house.process.address), ("--root", house.trained.directory.parents[1])
    digest = house.candidate(30)
    done = answer(house.run("publish", digest, "--no-gate", *root, *url, "--json"))
    assert done["version"] == house.served.versions()[-1]
    assert house.trained.versions() == []
    listed = answer(house.run("versions", *url, "--json"))
    assert listed["live"]["version"] == done["version"]
    assert listed["versions"][-1]["metrics"] == {"seed": 30}
    back = answer(house.run("rollback", *url, "--to", 1, "--json"))
    assert house.served.manifest(back["version"]).copy_of == 1
    assert answer(house.run("resume", *url, "--json"))
    refused = house.run("rollback", *url, token="nobody")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "Traceback" not in refused.stderr
    log = (house.folder / "log").read_text()
    assert f'"audit":"rolled_back","policy":"default","version":{back["version"]}' in log


def test_what_is_done_under_a_root_leaves_an_audit_line(tmp_path: Path, house: House) -> None:
    """The audit line goes to stderr in the collector's format, with the command line as its
    source."""
    declare(tmp_path)
    store = WeightStore(tmp_path, "default")
    for seed in (1, 2):
        digest = store.add_candidate(
            Policy(SPEC, seed=seed).get_weights(), spec=SPEC.to_json(), metrics={}, lineage={}
        )
        done = house.run("publish", digest, "--no-gate", "--root", tmp_path, "--json")
        assert answer(done)["version"] == seed
        audit = msgspec.json.decode(done.stderr[done.stderr.index("{") :])
        assert (audit["audit"], audit["version"], audit["by"]) == (
            "published",
            seed,
            "command line",
        )
    again = house.run("publish", digest, "--no-gate", "--root", tmp_path)
    assert "it was live already" in again.stdout
    assert '"audit"' not in again.stderr
    done = house.run("rollback", "--root", tmp_path, "--why", "a complaint")
    assert (done.returncode, store.manifest(3).copy_of) == (0, 1)
    audit = msgspec.json.decode(done.stderr[done.stderr.index("{") :])
    assert (audit["audit"], audit["version"], audit["to"]) == ("rolled_back", 3, 1)
    assert "@" in audit["pinned_by"]
    assert audit["why"] == "a complaint"


def test_a_collector_of_another_root_is_asked_what_is_live_there(
    tmp_path: Path, house: House
) -> None:
    """A version that is live in the local root passes no gate of another collector. Publishing it
    there twice makes one version."""
    declare(tmp_path / "run")
    declare(tmp_path / "far")
    store = WeightStore(tmp_path / "run", "default")
    digest = store.add_candidate(
        Policy(SPEC).get_weights(), spec=SPEC.to_json(), metrics={}, lineage={}
    )
    words = ("publish", digest, "--root", tmp_path / "run")
    assert house.run(*words, "--no-gate").returncode == 0
    scopes = ("--scope", "weights:publish", "--scope", "weights:read")
    made = house.run("token", "create", "p", *scopes, "--root", tmp_path / "far")
    with CollectorProcess(tmp_path / "far") as far:
        there = (*words, "--url", far.address, "--token", made.stdout.strip())
        judged = house.run(*there)
        assert (judged.returncode, judged.stdout) == (4, "")
        for text in ("without a gate: not judged", "it was live already"):
            done = house.run(*there, "--no-gate")
            assert done.stdout.startswith("Version 1 of default")
            assert text in done.stdout
    verdicts = [one["verdict"] for one in load_decisions(tmp_path / "run", "default").known]
    assert verdicts == [None, "cannot tell", None]


def test_a_publication_that_was_not_recorded_is_recorded_later(
    tmp_path: Path, house: House
) -> None:
    """A kill may come between a publication and its record: publishing the same candidate again
    records it."""
    declare(tmp_path)
    store = WeightStore(tmp_path, "default")
    digest = store.add_candidate(
        Policy(SPEC).get_weights(), spec=SPEC.to_json(), metrics={}, lineage={}
    )
    store.publish(digest)
    for gate in ("--no-gate", "--gate"):
        done = house.run("publish", digest, gate, "--root", tmp_path)
        assert "it was live already" in done.stdout
        assert "audit" not in done.stderr
    (kept,) = load_decisions(tmp_path, "default").known
    assert kept["reasons"] == ["it is live already"]
