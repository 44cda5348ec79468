"""Every DAG: what a file may load, what each has to have, and what each does on real shards."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from alerts import missed, to_address, to_file
from headrace_dags import headrace_dags
from headrace_triggers import AfterSeconds, SealedShards

from tests.airflow.commands import headrace

PROJECT = Path(__file__).parents[2]
DAGS = PROJECT / "airflow_dags"
IDS = {path.stem for path in (DAGS / "dags").glob("*.py")}


def test_the_dags_load_without_errors(dag_bag):
    """Airflow's own processor finds one in each file, by the file's name."""
    assert dag_bag.import_errors == {}
    assert dag_bag.dags.keys() == IDS
    assert len(IDS) == 8


def test_each_dag_has_what_the_team_on_call_needs(dag_bag):
    """An owner, tags, a text, retries, a limit of time; runs do not overlap and do not pile up.

    A cron string has no data interval in Airflow 3: jobs of an interval name a timetable.
    """
    for name, dag in dag_bag.dags.items():
        assert (dag.max_active_runs, dag.catchup) == (1, False), name
        assert {"headrace", "default"} == set(dag.tags), name
        assert len(dag.doc_md) > 60, name
        assert dag.description, name
        for task in dag.tasks:
            assert (task.owner, task.retries) == ("headrace", 2), task
            assert task.execution_timeout is not None, task
            assert task.words[0], task
        text = "".join(word for task in dag.tasks for word in task.words)
        if "data_interval" in text:
            assert type(dag.timetable).__name__ == "CronDataIntervalTimetable", name


def test_a_dag_file_loads_only_the_sdk_its_trigger_and_the_standard_library():
    """Airflow parses a DAG file every few seconds: what is heavy is left to the commands."""
    code = (
        f"import sys; sys.path.insert(0, {str(DAGS)!r})\n"
        "import airflow.sdk, airflow.triggers.base\n"
        "from airflow.sdk import *\n"
        "before = set(sys.modules)\n"
        "import runpy, pathlib\n"
        f"for path in pathlib.Path({str(DAGS / 'dags')!r}).glob('*.py'):\n"
        "    runpy.run_path(str(path))\n"
        "known = {*sys.stdlib_module_names, 'airflow'}\n"
        "more = set(sys.modules) - before\n"
        "new = {name.partition('.')[0] for name in more} - known\n"
        "print(sorted(new), [name for name in more if name.startswith('airflow.providers')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=DAGS
    )
    own = ["cli_task", "headrace_dags", "headrace_triggers"]
    assert done.stdout.splitlines()[-1] == f"{own} []"


def test_the_dags_follow_airflows_own_rules():
    """`ruff --select AIR` finds nothing that a later Airflow lacks."""
    words = ["check", "--isolated", "--select", "AIR", DAGS]
    assert subprocess.run([PROJECT / ".venv/bin/ruff", *words], check=False).returncode == 0


@pytest.mark.parametrize(
    ("numbers", "state", "done"),
    [
        ((3000, 0.8, 0.4), "better", "promote"),
        ((3000, 0.2, 0.8), "worse", "roll_back"),
        ((200, 0.5, 0.5), "cannot tell", None),
        ((0, 0, 0), "too young", None),
    ],
)
def test_a_canary_is_promoted_ended_or_goes_on(
    run_dag, quick, canary_traffic, tmp_path, numbers, state, done
):
    """By its verdict, once: a second run on the same event finds another generation, is skipped
    with the reason, and changes nothing."""
    quick()
    event = canary_traffic(tmp_path, *numbers)
    params = {"root": str(tmp_path), "hours": 0, "age": 20, **event}
    assert run_dag("canary_promotion", **params)[0] == "success"
    live = headrace(tmp_path, "versions")["live"]
    changed = {"promote": (2, None), "roll_back": (1, None), None: (1, 2)}[done]
    assert (live["version"], live["canary_version"], live["pinned"]) == (*changed, None)
    again, found = run_dag("canary_promotion", **params)
    assert (again, headrace(tmp_path, "versions")["live"]) == ("success", live)
    if done is None:
        assert found["wait"][1]["state"] == state
    else:
        assert (found["wait"][0], "expected generation" in found["wait"][2]) == ("skipped", True)


def test_a_rollback_needs_a_reason_and_happens_once(run_dag, quick, canary_traffic, tmp_path):
    """Without a reason no run begins; the reason is kept with the decision."""
    quick()
    canary_traffic(tmp_path, 0, 0, 0)
    headrace(tmp_path, "promote", "--no-gate", "--wait", "none")
    with pytest.raises(Exception, match="why"):
        run_dag("rollback_weights", root=str(tmp_path))
    state, found = run_dag("rollback_weights", root=str(tmp_path), why="fewer clicks", to=1)
    assert (state, found["roll_back"][1]["version"]) == ("success", 3)
    assert headrace(tmp_path, "versions")["live"]["pinned"]["why"] == "fewer clicks"
    assert headrace(tmp_path, "decisions")["decisions"][-1]["reasons"][-1] == "fewer clicks"


def test_the_upkeep_of_a_root(run_dag, quick, write_log, tmp_path):
    """Compaction joins shards; retention only plans unless it is told to apply, and removes what
    its plan named; a queue of requests gets proofs; a scorecard has each policy. Twice is once."""
    quick()
    root = tmp_path / "root"
    for first in (0, 50):
        write_log(root, first, 50)
    at = {"root": str(root)}
    states = [run_dag("compact_shards", **at)[1]["apply"][0] for _ in range(2)]
    assert states == ["success", "skipped"]
    _, planned = run_dag("retain_shards", keep="1d", **at)
    assert (planned["plan"][1]["rows"], planned["apply"][0]) == (100, "skipped")
    queue = tmp_path / "requests"
    queue.mkdir()
    (queue / "7.txt").write_text("e17\n")
    _, erased = run_dag("erase_requests", queue=str(queue), **at)
    (proof,) = erased["erase"][1]["done"]
    assert json.loads(Path(proof).read_text())["proof"]["clear"]
    assert run_dag("erase_requests", queue=str(queue), **at)[1]["erase"][0] == "skipped"
    _, told = run_dag("scorecard", reports=str(tmp_path / "reports"), **at)
    assert told["judge"][1]["policies"]["default"]["checks"]
    assert [path.suffix for path in (tmp_path / "reports").iterdir()] == [".html"]
    states = [run_dag("retain_shards", keep="1d", apply=True, **at)[1] for _ in range(2)]
    assert [one["apply"][0] for one in states] == ["success", "skipped"]
    assert states[0]["apply"][1]["applied"]["removed"] == 99


def test_a_days_import_is_repeated_without_a_row_twice(run_dag, quick, loaded_file, tmp_path):
    """By the run's interval, into a collector; an interval without rows is skipped."""
    quick()
    log = tmp_path / "log.csv"
    rows = [f"0.5,{day % 2},1,2026-11-{day:02}T05:00:00Z" for day in range(1, 11)]
    log.write_text("\n".join(["x,a,r,at", *rows, ""]))
    root = tmp_path / "root"
    spaces = ("--observation", "box:1", "--action", "discrete:2", "--port", "0")
    words = [os.environ["HEADRACE_COMMAND"], "collect", "--root", root, *spaces, "--json"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as collector:
        address = json.loads(collector.stdout.readline())["address"]
        columns = ["--observation=x", "--action=a", "--reward=r", "--time=at", "--uniform"]
        imports = [str(log), f"--address={address}", "--name=log", *columns]
        settings = {"only": ["import_history"], "imports": imports}
        bag = loaded_file(
            "# airflow\nfrom headrace_dags import headrace_dags\n"
            f"headrace_dags({str(root)!r}, 'default', None, **{settings})\n"
        )
        at = {"since": "2026-11-03", "until": "2026-11-05"}
        found = [run_dag("import_history", bag, **at)[1]["import"][1] for _ in range(2)]
        assert [(one["steps"], one["skipped_known"]) for one in found] == [(2, 0), (0, 2)]
        later = {"since": "2027-01-01", "until": "2027-01-02"}
        state, skipped, reason = run_dag("import_history", bag, **later)[1]["import"]
        assert (state, skipped, "no episode" in reason) == ("skipped", None, True)
        collector.terminate()


def test_twenty_policies_are_twenty_calls(loaded_file):
    """Each has its own DAGs and assets; the DAGs of a root are made once."""
    bag = loaded_file(
        "# airflow\nfrom headrace_dags import headrace_dags, root_dags\n"
        "for at in range(20):\n"
        "    headrace_dags('/r', f'p{at}', '@daily', prefix=f'p{at}_', on_shards=True)\n"
        "root_dags('/r', 'p7')\n"
    )
    assert bag.dags["scorecard"].params["policy_id"] == "p7"
    assert len(bag.dags) == 20 * 3 + 4
    assets = {name for dag in bag.dags.values() for task in dag.tasks for name in task.outlets}
    assert len({asset.name for asset in assets}) == 60


def test_a_root_may_be_an_address(loaded_file):
    """What needs a folder says so, or is left out: a watch would be silent for ever."""
    with pytest.raises(ValueError, match="watch=False"):
        headrace_dags("s3://bucket/r", "p", on_shards=True)
    with pytest.raises(ValueError, match="expected `reports`"):
        headrace_dags("s3://bucket/r", "p", only=["scorecard"])
    bag = loaded_file(
        "# airflow\nfrom headrace_dags import headrace_dags, root_dags\n"
        "headrace_dags('s3://bucket/r', 'p', on_shards=True, watch=False)\n"
        "root_dags('s3://bucket/r', 'p', reports='/var/reports')\n"
    )
    assert IDS - set(bag.dags) == {"erase_requests", "import_history"}


def test_shards_fire_once_however_often_the_triggerer_starts(tmp_path):
    """The mark is in the asset's state; below `min_parts` new parts nothing fires."""

    class Store(dict):
        async def aget(self, key, default):
            return self.get(key, default)

        async def aset(self, key, value):
            self[key] = value

    def shard(first, last):
        folder = tmp_path / "shards" / "0123456789ab-s"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{first:012}-{last:012}-0123456789abcdef.parquet").touch()

    def heard(store, then=None):
        found = []

        async def run():
            trigger = SealedShards(str(tmp_path), "a", min_parts=10, poll=0.001)
            trigger.asset_state_store = store
            async for event in trigger.run():
                found.append(event.payload["streams"]["0123456789ab-s"])
                if then is not None:
                    then()

        with pytest.raises(TimeoutError):
            asyncio.run(asyncio.wait_for(run(), 0.3))
        return found

    store = Store()
    assert heard(store) == []
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards" / ".nfs0001").touch()
    shard(0, 9)
    assert heard(store, then=lambda: shard(10, 14)) == [9]
    assert heard(store) == []
    shard(15, 20)
    assert heard(store) == [20]
    for trigger in (SealedShards("/r", "a"), AfterSeconds(2.0)):
        path, values = trigger.serialize()
        assert path == f"headrace_triggers.{type(trigger).__name__}"
        assert type(trigger)(**values).serialize() == (path, values)


def test_alerts_reach_a_file_and_an_address(hook, tmp_path):
    """A failure, and a missed deadline, each one line or one post."""
    file = tmp_path / "alerts.jsonl"
    context = {"exception": ValueError("disk full")}
    to_file(str(file))(context)
    to_address(hook.url)(context)
    run = {"dag_run": {"dag_id": "train_and_publish", "dag_run_id": "r1"}}
    asyncio.run(missed(file=str(file), url=hook.url, context=run))
    failure, late = (json.loads(line) for line in file.read_text().splitlines())
    assert (failure["what"], failure["why"]) == ("failure", "disk full")
    assert (late["what"], late["dag"]) == ("deadline", "train_and_publish")
    assert [body for _, _, _, body in hook.calls] == [failure, late]
