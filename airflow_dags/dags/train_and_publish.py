"""Training and publication for Airflow; headrace_dags.py describes it."""

import os

from headrace_dags import headrace_dags

headrace_dags(
    os.environ.get("HEADRACE_ROOT", "/var/lib/headrace"),
    "default",
    os.environ.get("HEADRACE_DAG_SCHEDULE", "@hourly"),
    only=["train_and_publish"],
    on_shards=True,
)
