"""Airflow's home is a temporary folder, set before anything of Airflow is imported."""

# ruff: noqa: PLC0415 - Airflow reads its settings when it is imported, so fixtures import it

import os
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.loaded_python import loaded_python

PROJECT = Path(__file__).parents[2]
DAGS = PROJECT / "airflow_dags"
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
