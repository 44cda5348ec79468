"""A task's process that runs a long training: hold_task.py VALUES tied|loose."""

import json
import os
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "airflow_dags"))

from cli_task import cli_task

task = cli_task(
    "train",
    "--root={root}",
    "--manifest={manifest}",
    "--epochs=1000000",
    **json.loads(sys.argv[1]),
)
if sys.argv[2] == "loose":  # as with a command that has another parent than the task
    os.environ["HEADRACE_COMMAND"] = sys.argv[3]
task.execute({"params": {}})
