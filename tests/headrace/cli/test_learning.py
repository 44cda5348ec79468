"""train, evaluate, publish, versions and ls, on one small log of a bandit.

Also of `storage.system.process`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.output import results
from policy.algorithms.dm import DMConfig
from policy.inference.weight_store import WeightStore
from tests.collector_process import CollectorProcess, declare
from tests.headrace.command import answer, headrace, refused
from tests.policy.inference.onnx_files import HOSTILE, constant, model, node, tensor

EPISODES = 400
ARMS = 3


def decisions(rng: np.random.Generator) -> list[dict[str, Any]]:
    """One-step episodes by a uniform policy; arm 2 earns always, the others never."""
    events: list[dict[str, Any]] = []
    for number in range(EPISODES):
        name, arm = f"e{number}", int(rng.integers(ARMS))
        obs = rng.standard_normal(2).round(3).tolist()
        step = {"obs": obs, "action": arm, "action_prob": 1 / ARMS, "reward": float(arm == 2)}
        events += [
            {"type": "start", "episode_id": name, "tags": {"visitor": f"v{number}"}},
            {"type": "log_action", "episode_id": name, **step},
            {"type": "end", "episode_id": name},
        ]
    return events


def logged(root: Path, seed: int) -> Path:
    """A root with the log in its shards."""
    declare(root, "box:2", f"discrete:{ARMS}")
    with CollectorProcess(root) as collector:
        events = {"events": decisions(np.random.default_rng(seed))}
        assert collector.post("/v1/events", events)[1]["accepted"] == 3 * EPISODES
        assert collector.stop() == 0
    return root


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return logged(tmp_path_factory.mktemp("log") / "first", 1)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return logged(tmp_path_factory.mktemp("log") / "second", 2)


@pytest.fixture(scope="module")
def trained(log: Path) -> dict[str, Any]:
    """The output of train, whose candidate is stored with the log."""
    return answer(headrace("train", "--root", log, "--algorithm", "snips", "--json"))


def test_train_counts_every_step_once(log: Path, trained: dict[str, Any]) -> None:
    """Trained on, left out and held out add up to the log; the candidate is kept."""
    assert trained["rows_read"] == trained["rows_trained"]
    assert trained["rows_read"] + trained["rows_held_out"] == EPISODES
    assert WeightStore(log, "default").candidates() == [trained["candidate"]]


def test_train_tells_people_the_same(log: Path, trained: dict[str, Any], tmp_path: Path) -> None:
    """A table of counts and the candidate, and whether that was there already."""
    root = tmp_path / "root"
    shutil.copytree(log, root)
    result = headrace("train", "--root", root, "--algorithm", "snips", "--epochs", "1")
    assert result.returncode == 0
    assert re.search(rf"trained on +│ +{trained['rows_trained']} │", result.stdout)
    assert "\nAction rule: sample, temperature 1\n" in result.stdout
    (candidate,) = {*WeightStore(root, "default").candidates()} - {trained["candidate"]}
    assert result.stdout.endswith(f"Candidate {candidate}\n")
    again = headrace("train", "--root", root, "--algorithm", "snips", "--epochs", "1").stdout
    assert f"Candidate {candidate}\nIt was there already: trained on the same rows" in again
    assert "`latest`" not in again
    later = headrace("train", "--root", root, "--algorithm", "snips", "--epochs", "2").stdout
    (latest,) = {*WeightStore(root, "default").candidates()} - {trained["candidate"], candidate}
    assert later.endswith(f"Candidate {latest}\n")
    repeated = headrace("train", "--root", root, "--algorithm", "snips", "--epochs", "1").stdout
    assert f"Candidate {candidate}\n" in repeated
    assert f"`latest` is {latest}, which was added after it" in repeated
    assert trained["unchanged"] is False


def test_the_settings_used_stand_in_the_manifest(log: Path, tmp_path: Path) -> None:
    """All of them: what was set, and the defaults."""
    root = shutil.copytree(log, tmp_path / "root")
    words = ("--algorithm", "dm", "--set", "updates=3", "--json")
    digest = answer(headrace("train", "--root", root, *words))["candidate"]
    metrics = WeightStore(root, "default").candidate(digest).metrics
    assert metrics["algorithm"] == "DMConfig"
    assert metrics["config"] == asdict(DMConfig(updates=3))


def test_evaluate_judges_by_several_logs(
    log: Path, other: Path, trained: dict[str, Any], tmp_path: Path
) -> None:
    """`evaluate` uses the held-out episodes of the training log and all of the other one. It writes
    estimates with intervals, a PNG and a page."""
    plot = tmp_path / "plots" / "intervals.png"
    html = tmp_path / "pages" / "judged.html"
    words = ("--root", log, "--log", other, "--plot", plot, "--html", html)
    found = answer(headrace("evaluate", trained["candidate"][:12], *words, "--json"))
    own, second = found["logs"]
    assert (own["label"], second["label"]) == ("first", "second")
    assert (own["episodes"], second["episodes"]) == (trained["rows_held_out"], EPISODES)
    for result in found["logs"]:
        estimates = {one["name"]: one for one in result["target"]}
        low, high = estimates["snips"]["interval"]
        assert low <= estimates["snips"]["value"] <= high
        assert 0 < estimates["snips"]["ess"] <= result["episodes"]
    assert plot.read_bytes().startswith(b"\x89PNG")
    text = html.read_text()
    reason = results.in_words(own["reasons"][0])
    for phrase in ("never logged nearby", "dropped by clients", "largest weight", reason[:20]):
        assert phrase in text
    assert " steps not held out" in text, "what was trained on is not judged"
    assert "http" not in text
    by = ("evaluate", "--root", log, trained["candidate"][:12], "--cluster")
    by_tag = headrace(*by, "tag:visitor")
    decisive = by_tag.stdout.partition("Decisive differences")[2]
    assert " units " in decisive.partition("Checks")[0], by_tag.stderr
    assert refused(headrace(*by, "tag:user"), "expected a tag of the episodes, ['visitor'], got")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("freeze",), "expected shards of schema"),
        (("train",), "found no shard yet"),
        (("evaluate",), "no candidate yet"),
        (("evaluate", "live"), "expected a live version"),
        (("publish",), "no candidate yet"),
    ],
)
def test_before_the_first_traffic_another_try_may_go_well(
    words: tuple[str, ...], expected: str, tmp_path: Path
) -> None:
    """Status 7, for a scheduler that skips; 2 for a mistyped policy or root."""
    declare(tmp_path, "box:2", f"discrete:{ARMS}")
    early = headrace(*words, "--root", tmp_path)
    assert (early.returncode, early.stdout) == (7, ""), early.stderr
    assert expected in early.stderr
    mistyped = headrace(*words, "--root", tmp_path, "--policy-id", "defualt")
    assert refused(mistyped, "--policy-id: expected a policy of")
    assert refused(headrace(*words, "--root", tmp_path / "none"), "--root: expected a folder")


def test_evaluate_names_the_versions_there_are(log: Path) -> None:
    """For an unknown number the error says which versions there are, here none, as that of
    `rollback`."""
    refusal = headrace("evaluate", "9", "--root", log)
    assert refused(refusal, "default: expected a version to judge, got 9, and there is none yet")


def test_the_gate_refuses_what_is_not_proven(
    log: Path, trained: dict[str, Any], tmp_path: Path
) -> None:
    """Too small a sample is "cannot tell": status 4, the reason, nothing published, a record."""
    root = tmp_path / "root"
    shutil.copytree(log, root)
    words = ("publish", trained["candidate"][:12], "--root", root, "--min-ess", "1000000")
    result = headrace(*words)
    assert (result.returncode, result.stdout) == (4, "")
    assert "cannot tell: effective sample size: expected 1e+06" in result.stderr
    assert "note: this was look 1 at the candidate" in result.stderr
    again = headrace(*words, "--json")
    assert (again.returncode, json.loads(again.stdout)["published"]) == (4, False)
    assert WeightStore(root, "default").live() is None
    listed = answer(headrace("decisions", "--root", root, "--json"))["decisions"]
    assert [one["verdict"] for one in listed] == ["cannot tell"] * 2
    mistyped = headrace("publish", "--root", root, "--cluster", "tag:user")
    assert refused(mistyped, "expected a tag of the episodes, ['visitor'], got 'user'")
    assert len(answer(headrace("decisions", "--root", root, "--json"))["decisions"]) == 2
    assert "cannot tell" in headrace("decisions", "--root", root).stdout


def test_publish_and_versions(log: Path, trained: dict[str, Any], tmp_path: Path) -> None:
    """The gate accepts a better policy; the output says if there is no gate; repeats do nothing."""
    root = tmp_path / "root"
    shutil.copytree(log, root)
    longer = ("train", "--root", root, "--algorithm", "snips", "--epochs", "100")
    candidate = answer(headrace(*longer, "--json"))["candidate"]
    words = ("--root", root, "--reward-range", "0", "1", "--min-ess", "1")
    first = answer(headrace("publish", "latest", *words, "--json"))
    assert (first["published"], first["version"]) == (True, 1)
    assert (first["gate"]["verdict"], first["gate"]["approximate"]) == ("better", False)
    assert results.why_published(first) == "better than the logging policy"
    again = headrace("publish", "--root", root, "--no-gate")
    assert again.stdout == (
        "Version 1 of default is wanted, no collector is registered (it was live already).\n"
    )
    listed = answer(headrace("versions", "--root", root, "--json"))
    assert listed["live"]["version"] == 1
    assert [one["candidate"] for one in listed["versions"]] == [candidate]
    table = headrace("versions", "--root", root).stdout
    assert candidate[:12] in table
    assert "wanted" in table
    shown = headrace("evaluate", "live", "--root", root, "--estimator", "ips").stdout
    assert "logging policy" in shown
    assert "95% interval" in shown
    assert headrace("verify", "--root", root).returncode == 0


def test_a_file_is_published_as_a_candidate_that_the_gate_judges(log: Path, tmp_path: Path) -> None:
    """In the declared spaces, with the head and rule of the options, which no candidate takes."""
    root, file = tmp_path / "root", tmp_path / "best.onnx"
    shutil.copytree(log, root)
    weight = np.zeros((2, ARMS), np.float32)
    bias = np.arange(ARMS, dtype=np.float32)  # the last arm is the best
    nodes = [node("Gemm", ("obs", "weight", "bias"), "dist_inputs")]
    constants = [constant("weight", weight), constant("bias", bias)]
    made = model(nodes, constants, inputs=[tensor("obs", 2)], outputs=ARMS)
    file.write_bytes(made.SerializeToString())
    words = ["publish", "--root", root, "--onnx", file]
    how = ("--head", "q_values", "--reward-range", "0", "1", "--min-ess", "1")
    found = answer(headrace(*words, *how, "--json"))
    assert (found["version"], found["gate"]["verdict"]) == (1, "better")
    store = WeightStore(root, "default")
    assert store.manifest(1).metrics == {"algorithm": "own model", "onnx": "best.onnx"}
    assert store.manifest(1).spec["action_rule"] == {"kind": "epsilon_greedy", "epsilon": 0.05}
    assert refused(headrace("publish", "--root", root, *how[:2]), "expected them with --onnx alone")
    assert refused(headrace(*words, "0123456"), "no digest of another candidate")
    file.write_bytes(HOSTILE["endless loop"][0]())
    assert refused(headrace(*words), "expected an operator on the gate's list")
    assert store.versions() == [1]


def test_ls_lists_what_there_is(log: Path, tmp_path: Path) -> None:
    """Streams with their counts and times. A running collector reports the open steps, and those
    being written, which wait here because the writer is stopped."""
    root = tmp_path / "root"
    shutil.copytree(log, root)
    words = ("ls", "--root", root)
    with CollectorProcess(root) as collector:
        collector.post("/v1/episodes", {"episode_id": "late"})
        live = answer(headrace(*words, "--json"))
        writer = collector.writer_pid()
        assert writer is not None
        os.kill(writer, signal.SIGSTOP)
        step = {"type": "log_action", "episode_id": "over", "obs": [0, 0], "action": 1}
        start, end = ({"type": kind, "episode_id": "over"} for kind in ("start", "end"))
        assert collector.post("/v1/events", {"events": [start, step, end]})[1]["accepted"] == 3
        writing = answer(headrace(*words, "--json"))
        os.kill(writer, signal.SIGCONT)
        assert collector.stop() == 0
    (stream,) = live["streams"]
    assert (stream["rows"], stream["parts"], stream["policies"]) == (
        EPISODES,
        EPISODES,
        ["default"],
    )
    assert stream["first_ts"] <= stream["last_ts"]
    assert (live["open_episodes"], live["steps_being_written"]) == ({"default": 1}, 0)
    assert (writing["streams"], writing["open_episodes"]) == (live["streams"], {"default": 1})
    assert writing["steps_being_written"] == 1
    assert answer(headrace(*words, "--json"))["open_episodes"] == {"default": 1}
    table = headrace(*words).stdout
    assert stream["stream"] in table
    assert "Episodes in the journal\n" in table
    assert "open, or waiting for late rewards" in table
    assert "Steps not in shards yet: 0 in these episodes, 0 being written\n" in table


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("train", "--algorithm", "sac"), "dr, ips, snips"),
        (("evaluate", "feedfeed"), "feedfeed"),
        (("publish", "--reward-range", "1", "0"), "low < high"),
        (("ls", "--root", "no/such/root"), "no/such/root"),
        (("verify", "--root", "no/such/root"), "no/such/root"),
        (("train", "--epochs", "many"), "--epochs"),
    ],
)
def test_bad_options_are_refused(
    log: Path, trained: dict[str, Any], words: tuple[str, ...], text: str
) -> None:
    """A message with the expected value, status 2, no traceback, nothing on stdout."""
    assert refused(headrace(*words, env={"HEADRACE_ROOT": str(log)}), text)


def test_help_lists_every_command() -> None:
    """Each command explains its options."""
    help_text = headrace("--help").stdout
    commands = ["demo", "collect", "import", "train", "evaluate", "publish", "versions", "ls"]
    assert [name for name in [*commands, "verify"] if f" {name} " not in help_text] == []
    for name in ("publish", "verify"):
        options = headrace(name, "--help").stdout
        assert "--json" in options
        assert "HEADRACE_ROOT" in options


def test_decisions_say_what_their_counts_are(capsys: pytest.CaptureFixture[str]) -> None:
    """Looks at the candidate before this one, and other candidates on the same episodes."""
    one = {"decided": 0, "candidate": "c0ffee", "verdict": "worse", "published": False}
    one |= {"episodes": 5, "looks": 1, "others": 2, "reasons": ["-0.1"]}
    results.decisions({"policy_id": "default", "decisions": [one], "damaged": {}})
    shown = capsys.readouterr().out
    assert "worse, not published, 5 episodes, 1 earlier look, 2 other candidates" in shown
    assert "\n  -0.1\n" in shown, "a reason has a line of its own"
