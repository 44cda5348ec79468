"""Retention at night for Airflow; headrace_dags.py describes it."""

import os

from headrace_dags import headrace_dags

headrace_dags(
    os.environ.get("HEADRACE_ROOT", "/var/lib/headrace"),
    "default",
    only=["retain_shards"],
    nightly="30 3 * * *",
    keep="400d",
    cap_bytes=10_000_000_000,
    retain=False,  # True: plans are applied
)
