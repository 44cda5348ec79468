"""`headrace report` on the command line."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from ingest.client.policy_client import PolicyClient
from storage.experience.interfaces import ReaderError
from tests.collector_process import CollectorProcess, declare
from tests.headrace.command import answer, headrace, process, refused
from tests.ingest.client.test_local_inference import publish
from tests.ingest.client.test_local_inference_canary import play
from tests.policy.judging.test_canary import EQUAL, Traffic
from tests.policy.judging.test_evaluate_verdicts import log_episodes


def test_a_report_is_one_file(tmp_path: Path) -> None:
    Traffic(tmp_path).log(20, EQUAL)
    output = tmp_path / "out" / "report.html"
    done = answer(process("report", "--root", tmp_path, "-o", output, "--json"))
    assert done == {
        "output": str(output),
        "bytes": output.stat().st_size,
        "steps": 20,
        "versions": 1,
        "decisions": 0,
    }
    assert output.read_text().startswith("<!doctype html>")
    assert refused(headrace("report", "--root", tmp_path / "none"), "expected a folder")


def test_status_says_what_the_page_does(tmp_path: Path) -> None:
    """A running collector is asked, and stopped ones are noticed; status 1 calls for somebody."""
    declare(tmp_path)
    publish(tmp_path, 1)
    with CollectorProcess(tmp_path) as running, PolicyClient(running.address) as client:
        play(client)
        running.settle(2)
        well = headrace("status", "--root", tmp_path)
        assert (well.returncode, well.stderr) == (0, "")
        assert (
            "What needs attention?\n  Nothing.\nWhat is live?\n  default: version 1" in well.stdout
        )
        assert re.search(r"version 1, from \d{4}-\d\d-\d\d .*: [▁▂▃▄▅▆▇█]\n", well.stdout)
        elsewhere = headrace("status", "--url", running.address, "--json")
        document = answer(elsewhere)
        assert document["policies"] == running.get("/v1/status")[1]["policies"]
        assert running.stop() == 0
    gone = headrace("status", "--root", tmp_path, "--json")
    assert gone.returncode == 1
    found = json.loads(gone.stdout)
    assert found["policies"][0]["chart"] == document["policies"][0]["chart"]
    assert f"No collector is running on {tmp_path}" in gone.stdout
    nobody = headrace("status", "--url", running.address)
    assert (nobody.returncode, nobody.stdout) == (1, "")
    assert refused(headrace("status", "--root", tmp_path / "none"), "expected a folder")
    (tmp_path / "weights" / "default" / "versions" / "1" / "manifest.json").unlink()
    damaged = headrace("status", "--root", tmp_path)
    assert damaged.returncode == 1
    assert re.search(r"default: .*versions/1/manifest.json.*\n  No collector", damaged.stdout)


def test_wrong_propensities_are_in_the_report_and_in_verify(tmp_path: Path) -> None:
    """Action 0 is taken in 70 % of the log, which says 25 %."""
    rng, n = np.random.default_rng(8), 2000
    actions = rng.choice(4, p=[0.7, 0.1, 0.1, 0.1], size=(n, 1))
    probs = np.full((n, 1), 0.25)
    log_episodes(tmp_path, rng.normal(size=(n, 1, 2)), actions, np.ones((n, 1)), probs)
    output = tmp_path / "report.html"
    process("report", "--root", tmp_path, "-o", output)
    assert "for action 0, where at most 1 was expected" in output.read_text()
    (checks,) = answer(process("verify", "--root", tmp_path, "--json"))["logs"].values()
    assert [(one["name"], one["passed"]) for one in checks] == [
        ("propensities", False),
        ("repeats", True),
    ]


def test_verify_names_a_log_that_it_cannot_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The account of its steps is given all the same."""
    Traffic(tmp_path).log(20, EQUAL)

    def unreadable(*given: object, **more: object) -> None:
        raise ReaderError("no more files can be opened")

    monkeypatch.setattr("policy.judging.log_review.review", unreadable)
    done = headrace("verify", "--root", tmp_path, "--json")
    assert answer(done)["logs"] == {}
    assert done.stderr == "log of default: not checked: no more files can be opened\n"
