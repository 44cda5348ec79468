"""The import of a shop's log by days for Airflow; headrace_dags.py describes it."""

import os

from headrace_dags import headrace_dags

headrace_dags(
    os.environ.get("HEADRACE_ROOT", "/var/lib/headrace"),
    "default",
    only=["import_history"],
    import_schedule="@daily",
    imports=[
        "/var/lib/shop/clicks",  # a folder of Parquet files, one more each day
        "--name=clicks",
        "--observation=age",
        "--action=offer",
        "--reward=bought",
        "--action-prob=probability",
        "--time=at",
    ],
)
