"""Airflow's four components on loopback, a collector and a client: from a decision to a version.

python -m tests.airflow.e2e, in Airflow's environment (`make airflow-e2e`). Prints the seconds of
each stage as a table, and ends with status 1 at the first stage that does not come.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

PROJECT = Path(__file__).parents[2]
MAIN = PROJECT / ".venv" / "bin"
AIRFLOW = Path(sys.executable).parent / "airflow"
PATIENCE = 900.0  # s; only a broken build needs them
PARTS = {
    "api-server": ("-w", "1"),
    "dag-processor": (),
    "scheduler": ("--skip-serve-logs",),
    "triggerer": ("--skip-serve-logs",),
}
DAG_FILE = """
# The DAGs of one policy, for airflow
from datetime import timedelta
from alerts import deadline, to_file
from headrace_dags import headrace_dags

headrace_dags(
    {root!r}, "default", None, on_shards=True, min_parts=1000, poll=1.0,
    only=["train_and_publish", "canary_promotion"], retry_delay=timedelta(seconds=1),
    on_failure=[to_file({alerts!r})], deadline=timedelta(seconds=1),
    on_deadline=deadline(file={alerts!r}),
    params={{"algorithm": "ips", "min_ess": 5.0, "age": 2.0, "margin": {margin!r}}},
)
headrace_dags(
    {root!r}, "default", None, prefix="pushed_", on_shards=True, watch=False,
    only=["train_and_publish"], params={{"algorithm": "ips", "min_ess": 5.0}},
)
headrace_dags(
    {root!r}, "default", None, only=["import_history"], import_schedule="@daily",
    imports=[{log!r}, "--address", {address!r}, "--name", "log", "--observation", "x",
             "--action", "a", "--reward", "r", "--uniform", "--time", "at"],
)
"""
DAYS, A_DAY = 3, 20


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


class Stack:
    """The components, as processes with groups of their own, and Airflow's REST API."""

    def __init__(self, home):
        self.home, self.port, self.running = home, free_port(), {}
        url = f"http://127.0.0.1:{self.port}"
        self.url, self.root = url, home / "root"
        self.alerts = home / "alerts.jsonl"
        self.environment = {
            **os.environ,
            "AIRFLOW_HOME": str(home),
            "AIRFLOW__CORE__DAGS_FOLDER": str(home / "dags"),
            "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
            "AIRFLOW__CORE__DAGS_ARE_PAUSED_AT_CREATION": "False",
            "AIRFLOW__CORE__PARALLELISM": "4",
            "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_ALL_ADMINS": "True",
            "AIRFLOW__CORE__EXECUTION_API_SERVER_URL": f"{url}/execution/",
            "AIRFLOW__API__BASE_URL": url,
            "AIRFLOW__API__PORT": str(self.port),
            "AIRFLOW__API__HOST": "127.0.0.1",
            "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"sqlite:///{home}/airflow.db",
            "AIRFLOW__DAG_PROCESSOR__REFRESH_INTERVAL": "5",
            "AIRFLOW__DAG_PROCESSOR__MIN_FILE_PROCESS_INTERVAL": "30",
            "AIRFLOW__USAGE_DATA_COLLECTION__ENABLED": "False",
            "HEADRACE_COMMAND": str(MAIN / "headrace"),
            "PYTHONPATH": f"{PROJECT / 'airflow_dags'}",
            "HEADRACE_AIRFLOW_URL": url,
        }

    def airflow(self, *words):
        subprocess.run(
            [AIRFLOW, *words], env=self.environment, check=True, stdout=subprocess.DEVNULL
        )

    def start(self, name):
        log = (self.home / f"{name}.log").open("ab")
        self.running[name] = subprocess.Popen(
            [AIRFLOW, name, *PARTS[name]],
            env=self.environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=self.home,
            start_new_session=True,
        )
        log.close()

    def kill(self, name, number=signal.SIGKILL):
        """End a component with its children; SIGTERM gets 25 s."""
        process = self.running.pop(name)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(25)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def ask(self, method, path, body=None):
        """The JSON of a request; None while the server does not answer."""
        token = self.environment.get("HEADRACE_AIRFLOW_TOKEN")
        headers = {"Content-Type": "application/json"}
        headers |= {"Authorization": f"Bearer {token}"} if token else {}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}{path}", data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return json.loads(answer.read())
        except urllib.error.HTTPError as error:
            if error.code < 500:
                text = error.read().decode()[:500]
                raise RuntimeError(f"{method} {path}: {error.code}: {text}") from error
        except OSError:
            pass
        return None

    def is_healthy(self):
        found = self.ask("GET", "/api/v2/monitor/health") or {}
        parts = ("metadatabase", "scheduler", "triggerer", "dag_processor")
        return all((found.get(part) or {}).get("status") == "healthy" for part in parts)

    def runs(self, dag_id):
        found = self.ask("GET", f"/api/v2/dags/{dag_id}/dagRuns?limit=100") or {}
        return found.get("dag_runs", [])

    def tasks(self, dag_id, run_id):
        path = f"/api/v2/dags/{dag_id}/dagRuns/{run_id}/taskInstances"
        return {one["task_id"]: one for one in self.ask("GET", path)["task_instances"]}

    def trigger(self, dag_id, **conf):
        body = {"logical_date": None, "conf": conf}
        return self.ask("POST", f"/api/v2/dags/{dag_id}/dagRuns", body)["dag_run_id"]

    def events(self, kind):
        found = self.ask("GET", "/api/v2/assets/events?limit=100")["asset_events"]
        return [one for one in found if one["name"] == f"headrace/default/{kind}"]

    def live(self):
        """What is live, from the file that says so: it is looked at several times a second."""
        file = self.root / "weights" / "default" / "live.json"
        return json.loads(file.read_text())["body"] if file.exists() else {}


class Stages:
    """Waits, and how long each took."""

    def __init__(self):
        self.took, self.began = [], time.monotonic()

    def wait(self, what, found):
        """What `found()` returns, once it is true."""
        end = time.monotonic() + PATIENCE
        while not (value := found()):
            if time.monotonic() > end:
                raise TimeoutError(f"{what}: not within {PATIENCE:.0f} s")
            threading.Event().wait(0.25)
        self.note(what)
        return value

    def note(self, what):
        now = time.monotonic()
        self.took.append((what, now - self.began))
        print(f"{now - self.began:7.1f} s  {what}", flush=True)
        self.began = now


def client(*words, **more):
    script = Path(__file__).with_name("live_client.py")
    return subprocess.Popen([MAIN / "python", script, *map(str, words)], text=True, **more)


def run(home):
    """All stages. Raises TimeoutError, RuntimeError."""
    stack, stages, children = Stack(home), Stages(), []
    try:
        if client(stack.root, "declare").wait():
            raise RuntimeError("the policy could not be declared")
        (home / "dags").mkdir()
        stack.collector = f"http://127.0.0.1:{free_port()}"
        history = home / "history.csv"
        hours = [(day, hour) for day in range(3, 3 + DAYS) for hour in range(A_DAY)]
        lines = [f"0.5,{hour % 2},1,2026-11-{day:02}T{hour:02}:00:00Z" for day, hour in hours]
        history.write_text("\n".join(["x,a,r,at", *lines, ""]))
        names = {"root": str(stack.root), "alerts": str(stack.alerts), "margin": "-30%"}
        names |= {"log": str(history), "address": stack.collector}
        (home / "dags" / "ads.py").write_text(DAG_FILE.format(**names))
        stack.airflow("db", "migrate")
        stages.note("database")
        for name in PARTS:
            stack.start(name)
        stages.wait("four components healthy", stack.is_healthy)
        stack.environment["HEADRACE_AIRFLOW_TOKEN"] = stack.ask("GET", "/auth/token")[
            "access_token"
        ]
        stack.kill("scheduler", signal.SIGTERM)
        stack.start("scheduler")  # its tasks write notes with the token
        stages.wait("DAGs parsed", lambda: has_dags(stack))
        _from_event_to_version(stack, stages, children)
        _a_canary(stack, stages, children)
        _restarts(stack, stages)
        _notes(stack, stages)
        _backfill(stack, stages)
    finally:
        for child in children:
            child.terminate()
            child.wait()
        for name in list(stack.running):
            stack.kill(name, signal.SIGTERM)
        stages.note("stopped")
    return stages.took


def has_dags(stack):
    found = stack.ask("GET", "/api/v2/dags") or {}
    return found.get("total_entries", 0) >= 4


def succeeded(stack, dag_id, run_id=None):
    """The id of a run that succeeded. Raises RuntimeError for one that failed."""
    for one in stack.runs(dag_id):
        if run_id in (None, one["dag_run_id"]):
            if one["state"] == "failed":
                raise RuntimeError(f"{dag_id} {one['dag_run_id']} failed")
            if one["state"] == "success":
                return one["dag_run_id"]
    return None


def _from_event_to_version(stack, stages, children):
    """A client logs, shards are sealed, the watcher's event starts training, and clients act."""
    name = "headrace/pushed_default/shards"
    assets = stack.ask("GET", "/api/v2/assets?limit=100")["assets"]
    (asset,) = [one["id"] for one in assets if one["name"] == name]
    address = stack.collector
    words = ["--root", stack.root, "--port", address.rpartition(":")[2]]
    words += ["--on-seal", f"{stack.url}/api/v2/assets/events#{asset}"]
    variable = {"HEADRACE_COLLECT_ON_SEAL_TOKEN": stack.environment["HEADRACE_AIRFLOW_TOKEN"]}
    log = (stack.home / "collector.log").open("wb")
    collector = subprocess.Popen(
        [MAIN / "headrace", "collect", *map(str, words)],
        env={**os.environ, **variable},
        stdout=log,
        stderr=log,
    )
    children.append(collector)
    stages.wait("collector", lambda: answers(address))
    if client(address, "log", 1500).wait():
        raise RuntimeError("the client could not log")
    stages.note("1,500 decisions logged")
    shards = stack.root / "shards"
    stages.wait("shards sealed", lambda: [*shards.glob("*/*.parquet")])
    stages.wait("watcher's event", lambda: stack.events("shards"))
    stages.wait("its run started", lambda: stack.runs("train_and_publish"))
    stages.wait("published", lambda: stack.live().get("version"))
    run_id = stages.wait("run done", lambda: succeeded(stack, "train_and_publish"))
    acting = client(address, "act", 3600, stdout=subprocess.PIPE)
    children.append(acting)
    stages.wait("client acts with version 1", lambda: acting.stdout.readline().strip() == "1")
    tasks = stack.tasks("train_and_publish", run_id)
    spent = sum(tasks[name]["duration"] for name in ("freeze", "train", "evaluate", "publish"))
    print(f"          of these runs {spent:.1f} s in four commands", flush=True)
    stages.wait("pushed event's run done", lambda: succeeded(stack, "pushed_train_and_publish"))


def answers(address):
    with contextlib.suppress(OSError):
        return bool(urllib.request.urlopen(f"{address}/v1/spec", timeout=5).read())
    return False


def _a_canary(stack, stages, children):
    """A run with a canary; its event starts the DAG that waits, and promotes it."""
    for name in ("train_and_publish", "pushed_train_and_publish"):
        stack.ask("PATCH", f"/api/v2/dags/{name}?update_mask=is_paused", {"is_paused": True})
    stages.wait("training is idle", lambda: is_idle(stack))
    stack.ask("PATCH", "/api/v2/dags/train_and_publish?update_mask=is_paused", {"is_paused": False})
    before = stack.live()
    conf = {"canary": "50%", "seed": 3, "settings": ["l2=0.5"], "since": "2020-01-01"}
    run_id = stack.trigger("train_and_publish", **conf)
    stages.wait("canary's run done", lambda: succeeded(stack, "train_and_publish", run_id))
    started = stages.wait("canary started", lambda: stack.live().get("canary_version"))
    stages.wait("promoted by its DAG", lambda: stack.live()["version"] == started)
    stages.wait("its run done", lambda: succeeded(stack, "canary_promotion"))
    if stack.live()["generation"] != before["generation"] + 2:
        raise RuntimeError(f"expected two generations more than {before}, got {stack.live()}")
    wait = stack.tasks("canary_promotion", stack.runs("canary_promotion")[0]["dag_run_id"])["wait"]
    if wait["state"] != "success":
        raise RuntimeError(f"wait ended as {wait['state']}")


def is_idle(stack):
    names = ("train_and_publish", "pushed_train_and_publish")
    states = [one["state"] for name in names for one in stack.runs(name)]
    return "running" not in states


def _restarts(stack, stages):
    """A scheduler killed during a run, and a triggerer: one version more at most, no event."""
    events = len(stack.events("canary"))
    run_id = stack.trigger("train_and_publish", seed=4, min_ess=1e9, since="2020-01-01")
    stages.wait(
        "training", lambda: stack.tasks("train_and_publish", run_id)["train"]["state"] == "running"
    )
    stack.kill("scheduler")
    stack.kill("triggerer")
    before = stack.live()
    stack.start("scheduler")
    stack.start("triggerer")
    stages.wait("both restarted, run done", lambda: succeeded(stack, "train_and_publish", run_id))
    if (stack.live(), len(stack.events("canary"))) != (before, events):
        raise RuntimeError(f"a restart changed {before} to {stack.live()}")


def _notes(stack, stages):
    """A run while a person holds the policy is green, and says why; the deadline was told."""
    words = ["--root", stack.root, "--why", "a release of the shop"]
    subprocess.run([MAIN / "headrace", "pause", *words], check=True, stdout=subprocess.DEVNULL)
    run_id = stack.trigger("train_and_publish", seed=5, since="2020-01-01")
    stages.wait("held run done", lambda: succeeded(stack, "train_and_publish", run_id))
    publish = stack.tasks("train_and_publish", run_id)["publish"]
    if publish["state"] != "skipped" or "a release of the shop" not in (publish["note"] or ""):
        raise RuntimeError(f"publish is {publish['state']}, with the note {publish['note']!r}")
    stages.wait("deadline's alert in the file", lambda: stack.alerts.exists())


def _backfill(stack, stages):
    """Each day of a log once, by its data interval."""
    words = ("--from-date", "2026-11-03", "--to-date", f"2026-11-{3 + DAYS:02}")
    stack.airflow("backfill", "create", "--dag-id", "import_history", *words)

    def imported():
        runs = [one for one in stack.runs("import_history") if one["run_type"] == "backfill"]
        if any(one["state"] == "failed" for one in runs):
            raise RuntimeError("a run of the backfill failed")
        return runs if len(runs) >= DAYS and {one["state"] for one in runs} == {"success"} else None

    runs = stages.wait("backfill of three days", imported)
    steps = []
    for one in runs:
        path = f"/api/v2/dags/import_history/dagRuns/{one['dag_run_id']}"
        path += "/taskInstances/import/xcomEntries/return_value"
        with contextlib.suppress(RuntimeError):  # a day without rows is skipped
            value = stack.ask("GET", path)["value"]
            steps.append((json.loads(value) if isinstance(value, str) else value)["steps"])
    if steps != [A_DAY] * DAYS:
        raise RuntimeError(f"expected {DAYS} days of {A_DAY} steps, got {steps}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="airflow-e2e-") as folder:
        try:
            run(Path(folder))
        except (TimeoutError, RuntimeError) as error:
            print(f"failed: {error}", file=sys.stderr)
            for log in sorted(Path(folder).glob("*.log")):
                print(f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}", file=sys.stderr)
            sys.exit(1)
