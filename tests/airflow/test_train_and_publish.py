"""The DAG end to end on real shards, by Headrace's own command line; each task twice."""

import json
from pathlib import Path

import pytest

from tests.airflow.commands import headrace

TASKS = ("freeze", "train", "evaluate", "publish")
DAGS = Path(__file__).parents[2] / "airflow_dags"


@pytest.fixture
def run(run_dag):
    """run(root, **params): one run of the DAG; gives task -> (state, XCom)."""
    return lambda root, **params: run_dag(
        "train_and_publish", root=str(root), **{"algorithm": "ips", "min_ess": 5, **params}
    )


def versions(root):
    return [one["version"] for one in headrace(root, "versions")["versions"]]


def test_a_run_publishes_and_a_second_one_does_nothing(run, quick, write_log, tmp_path):
    """The same shards: every answer is the first one's, unchanged. New shards: a version that
    is better than a live one that has hardly learned."""
    write_log(tmp_path, 0, 1_000)  # enough for the verdict "better"
    state, first = run(tmp_path)
    assert state == "success"
    assert [first[name][0] for name in TASKS] == ["success"] * 4
    assert first["freeze"][1]["rows"] == 1_000
    assert first["publish"][1]["published"]
    assert [first[name][1]["unchanged"] for name in TASKS] == [False] * 4
    assert first["start_canary"][0] == "skipped"
    assert {first[name][1]["manifest"] for name in TASKS[1:]} == {first["freeze"][1]["hash"]}
    files = sorted((tmp_path / "manifests").glob("*.json"))
    assert len(files) == 4

    quick()
    state, second = run(tmp_path)
    assert state == "success"
    for found in (first, second):  # the serving collectors are queried each time, which varies
        assert found["publish"][1]["served"].pop("seconds") >= 0
    for name in TASKS:
        assert second[name][:2] == ("success", first[name][1] | {"unchanged": True})
    assert sorted((tmp_path / "manifests").glob("*.json")) == files
    assert versions(tmp_path) == [1]

    headrace(tmp_path, "train", "--set", "updates=1")
    headrace(tmp_path, "publish", "latest", "--no-gate", "--wait", "none")
    write_log(tmp_path, 1_000, 2_000)
    _, third = run(tmp_path)
    assert third["freeze"][1]["rows"] == 3_000
    assert third["publish"][1]["version"] == 3
    gate = third["publish"][1]["gate"]
    assert (gate["after_live"], gate["others"]) == (2, 0), "no candidate was judged by new rows"
    assert gate["excluded"]["before_live"] > 0


def test_a_closed_gate_is_a_green_run_with_a_record(run, quick, write_log, tmp_path):
    """Status 4: publish is skipped, the decision is kept with its reasons, nothing is live."""
    quick()
    write_log(tmp_path, 0, 200)
    for _ in range(2):
        state, found = run(tmp_path, min_ess=1e9)
        assert state == "success"
        assert [found[name][0] for name in TASKS] == ["success"] * 3 + ["skipped"]
        assert "effective sample size" in found["publish"][2]
        (record,) = (tmp_path / "manifests").glob("*.publish-*.json")
        decided = json.loads(record.read_text())
        assert not decided["published"]
        assert decided["gate"]["verdict"] == "cannot tell"
        assert len(list((tmp_path / "decisions" / "default").glob("*.json"))) == 1
        assert "effective sample size" in decided["gate"]["reasons"][0]
        assert versions(tmp_path) == []


def test_a_parameter_is_a_value_and_never_a_command(run, quick, write_log, tmp_path):
    """A parameter with shell syntax is only an unknown algorithm's name."""
    quick()
    write_log(tmp_path, 0, 50)
    planted = tmp_path / "planted"
    _, found = run(tmp_path, algorithm=f'x";touch {planted};$(touch {planted})`touch {planted}`"')
    assert found["freeze"][0] == "success"
    assert found["train"][0] == "failed"
    assert not planted.exists()


def test_before_the_first_traffic_a_run_is_skipped_with_the_reason(run, quick, write_log, tmp_path):
    """Green, not red after three tries; so is a run while a person's pin holds the policy."""
    quick()
    write_log(tmp_path, 0, 0)
    state, found = run(tmp_path)
    assert (state, found["freeze"][0]) == ("success", "skipped")
    assert "expected shards of schema" in found["freeze"][2]
    write_log(tmp_path, 0, 1_000)
    digest = headrace(tmp_path, "train", "--set", "updates=1")["candidate"]
    headrace(tmp_path, "publish", digest, "--no-gate", "--wait", "none")
    headrace(tmp_path, "pause", "--why", "a release of the shop")
    state, found = run(tmp_path, since="2020-01-01")
    assert (state, found["publish"][0]) == ("success", "skipped")
    assert "a release of the shop" in found["publish"][2]
    assert versions(tmp_path) == [1]


def test_a_candidate_that_is_not_worse_becomes_a_canary_once(run, quick, write_log, tmp_path):
    """A second run, and one that is cleared after the canary's end, start no other."""
    quick()
    write_log(tmp_path, 0, 1_000)
    digest = headrace(tmp_path, "train", "--set", "updates=1")["candidate"]
    headrace(tmp_path, "publish", digest, "--no-gate", "--wait", "none")
    first, second = (run(tmp_path, canary="30%", since="2020-01-01")[1] for _ in range(2))
    assert (first["start_canary"][0], first["publish"][0]) == ("success", "skipped")
    assert first["start_canary"][1]["canary"] == 2
    assert second["start_canary"][1]["unchanged"]
    headrace(tmp_path, "rollback", "--why", "fewer clicks", "--wait", "none")
    _, cleared = run(tmp_path, canary="30%", since="2020-01-01")
    assert cleared["start_canary"][1]["unchanged"]
    live = headrace(tmp_path, "versions")["live"]
    assert (live["version"], live["canary_version"]) == (1, None)
