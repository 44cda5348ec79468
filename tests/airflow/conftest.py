"""Airflow's home is a temporary folder, set before anything of Airflow is imported."""

# ruff: noqa: PLC0415 - Airflow reads its settings when it is imported, so fixtures import it

import json
import os
import subprocess
import sys
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from tests.loaded_python import loaded_python

PROJECT = Path(__file__).parents[2]
DAGS = PROJECT / "airflow_dags"
sys.path.append(str(DAGS))  # PYTHONPATH of all of Airflow's components
MAIN = PROJECT / ".venv" / "bin"
_HOME = tempfile.TemporaryDirectory(prefix="airflow-")
os.environ |= {
    "AIRFLOW_HOME": _HOME.name,
    "AIRFLOW__CORE__DAGS_FOLDER": str(DAGS),
    "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
    "AIRFLOW__CORE__UNIT_TEST_MODE": "False",
    "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"sqlite:///{_HOME.name}/airflow.db",
    "AIRFLOW__USAGE_DATA_COLLECTION__ENABLED": "False",
    "HEADRACE_COMMAND": str(MAIN / "headrace"),
}


@pytest.fixture(scope="session")
def dag_bag():
    """The DAGs as Airflow's own processor loads them, over a fresh database."""
    from airflow.dag_processing.dagbag import BundleDagBag
    from airflow.utils.db import initdb

    initdb()
    return BundleDagBag(DAGS, bundle_path=DAGS, bundle_name="dags-folder")


@pytest.fixture
def run_dag(dag_bag):
    """run_dag(dag_id, **params): one run; gives (state, task -> (state, XCom, reason))."""

    def once(dag_id, bag=dag_bag, **params):
        dag = bag.dags[dag_id]
        for task in dag.tasks:
            task.retries = 0  # dag.test() would wait for the delay
        done = dag.test(run_conf=params)
        found = {}
        for one in done.get_task_instances():
            name = one.task_id
            value = one.xcom_pull(task_ids=name)
            reason = one.xcom_pull(task_ids=name, key="reason")
            found[name] = (str(one.state), value, reason)
        return str(done.state), found

    return once


@pytest.fixture
def loaded_file(dag_bag, tmp_path):
    """loaded_file(text): the DAGs of a file with this text."""
    kind = type(dag_bag)

    def load(text):
        folder = tmp_path / "own_dags"
        folder.mkdir()
        (folder / "own.py").write_text(text)
        bag = kind(folder, bundle_path=folder, bundle_name="dags-folder")
        assert bag.import_errors == {}
        return bag

    return load


@pytest.fixture
def quick(loaded, monkeypatch):
    """quick(): the tasks' commands from now on, from a process with torch loaded."""
    return lambda: monkeypatch.setenv("HEADRACE_COMMAND", str(loaded / "headrace"))


@pytest.fixture
def hook():
    """A server on loopback: `calls` has (method, path, authorization, JSON) of each request."""

    class Handler(BaseHTTPRequestHandler):
        def answer(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            server.calls.append((self.command, self.path, self.headers["Authorization"], body))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_POST = do_PATCH = answer

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        server.calls, server.url = [], f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture(scope="session")
def loaded(tmp_path_factory):
    """The folder of a `python` and a `headrace` with torch loaded: two seconds less per command."""
    folder = tmp_path_factory.mktemp("commands")
    return loaded_python(folder, str(MAIN / "python"), os.getpid())


@pytest.fixture
def write_log(loaded):
    """write_log(root, first, count): decisions as one shard, written by Headrace itself."""

    def write(root, first, count):
        script = Path(__file__).with_name("write_log.py")
        subprocess.run([loaded / "python", script, root, str(first), str(count)], check=True)

    return write


@pytest.fixture
def canary_traffic(loaded):
    """canary_traffic(root, count, canary, live): a canary's candidate and generation."""

    def write(root, *numbers):
        script = Path(__file__).with_name("canary_traffic.py")
        done = subprocess.run(
            [loaded / "python", script, root, *map(str, numbers)],
            check=True,
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": str(PROJECT)},
        )
        return json.loads(done.stdout)

    return write
