"""The DAG end to end on real shards, by Headrace's own command line; each task twice."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TASKS = ("freeze", "train", "evaluate", "publish")
DAGS = Path(__file__).parents[2] / "airflow_dags"


@pytest.fixture
def run(dag_bag):
    """run(root, **params): one run of the DAG; gives task -> (state, XCom)."""
    dag = dag_bag.dags["train_and_publish"]
    for task in dag.tasks:
        task.retries = 0  # dag.test() would wait for the delay

    def once(root, **params):
        settings = {"root": str(root), "algorithm": "ips", "min_ess": 5}
        done = dag.test(run_conf=settings | params)
        tasks = {one.task_id: one for one in done.get_task_instances()}
        found = {}
        for name in TASKS:
            value = tasks[name].xcom_pull(task_ids=name)
            found[name] = (tasks[name].state, value)
        return str(done.state), found

    return once


@pytest.fixture
def quick(loaded, monkeypatch):
    """quick(): the tasks' commands from now on, from a process with torch loaded."""
    return lambda: monkeypatch.setenv("HEADRACE_COMMAND", str(loaded / "headrace"))


def headrace(root, *words):
    result = subprocess.run(
        [os.environ["HEADRACE_COMMAND"], *words, "--root", root, "--json"],
        check=True,
        capture_output=True,
        text=True,
    )
    return json.loads(result.stdout)


def versions(root):
    return [one["version"] for one in headrace(root, "versions")["versions"]]


def test_the_dags_load_without_errors(dag_bag):
    """Airflow's own processor finds them, in the order freeze, train, evaluate, publish."""
    assert dag_bag.import_errors == {}
    (dag,) = dag_bag.dags.values()
    assert [task.task_id for task in dag.topological_sort()] == list(TASKS)
    assert (dag.max_active_runs, dag.catchup) == (1, False)


def test_a_dag_file_imports_nothing_heavy():
    """Airflow parses a DAG file every few seconds, so that it leaves the heavy imports to
    Headrace's commands."""
    heavy = ["torch", "pyarrow", "pandas", "numpy", "headrace", "storage", "policy", "ingest"]
    code = (
        f"import sys; sys.path.insert(0, {str(DAGS)!r})\n"
        "import airflow.sdk, airflow.providers.standard.operators.bash\n"
        "before = set(sys.modules)\n"
        f"import runpy; runpy.run_path({str(DAGS / 'dags' / 'train_and_publish.py')!r})\n"
        f"print([name for name in {heavy} if name in set(sys.modules) - before])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=DAGS
    )
    assert done.stdout.splitlines()[-1] == "[]"


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
    assert {first[name][1]["manifest"] for name in TASKS[1:]} == {first["freeze"][1]["hash"]}
    files = sorted((tmp_path / "manifests").glob("*.json"))
    assert len(files) == 4

    quick()
    state, second = run(tmp_path)
    assert state == "success"
    for found in (first, second):  # the serving collectors are queried each time, which varies
        assert found["publish"][1]["served"].pop("seconds") >= 0
    for name in TASKS:
        assert second[name] == ("success", first[name][1] | {"unchanged": True})
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
