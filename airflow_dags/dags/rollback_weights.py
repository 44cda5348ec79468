"""A rollback by hand for Airflow; headrace_dags.py describes it."""

import os

from headrace_dags import headrace_dags

headrace_dags(
    os.environ.get("HEADRACE_ROOT", "/var/lib/headrace"),
    "default",
    only=["rollback_weights"],
)
