"""Erasure on request for Airflow; headrace_dags.py describes it."""

import os

from headrace_dags import headrace_dags

headrace_dags(
    os.environ.get("HEADRACE_ROOT", "/var/lib/headrace"),
    "default",
    only=["erase_requests"],
    nightly="0 4 * * *",
    queue="/var/lib/headrace-requests",
)
