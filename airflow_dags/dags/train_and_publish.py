"""Train on the data in the shards, judge the candidate, and publish it if the gate allows it.

`freeze` writes the stored ordinals to a manifest. All later steps are keyed by the manifest's hash,
so that a run without new shards, a retry, or a run that was started twice does nothing: these
return the first run's answers with `"unchanged": true`. If a candidate is worse, or the episodes
cannot tell, `publish` is skipped, the run succeeds, and the decision with its reasons is stored
under `decisions/` next to the data.
"""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta

from airflow.sdk import DAG, Param
from cli_task import CANNOT_TELL, SKIPPED, cli_task

RETRY = {"retries": 2, "retry_delay": timedelta(seconds=30)}
ROOT, POLICY = "{{ params.root }}", "{{ params.policy_id }}"
WHERE = ("--root={root}", "--policy-id={policy_id}")
SINCE = "{{ params.since }}"
MANIFEST = "{{ ti.xcom_pull(task_ids='freeze')['manifest'] }}"
CANDIDATE = "{{ ti.xcom_pull(task_ids='train')['candidate'] }}"

with DAG(
    dag_id="train_and_publish",
    description="Freeze the shards, train, judge off-policy, publish through the gate",
    doc_md=__doc__,
    schedule=os.environ.get("HEADRACE_DAG_SCHEDULE", "@hourly"),
    start_date=datetime(2026, 1, 1, tzinfo=UTC),
    catchup=False,  # one run with the current shards replaces all missed ones
    max_active_runs=1,
    default_args=RETRY,
    params={
        "root": Param(
            os.environ.get("HEADRACE_ROOT", "/var/lib/headrace"),
            type="string",
            pattern="^/",
            description="The folder of shards and weights; absolute, a task has no home",
        ),
        "policy_id": Param("default", type="string", pattern="^[A-Za-z0-9]"),
        "algorithm": Param("dr", type="string", pattern="^[a-z]"),
        "seed": Param(0, type="integer", minimum=0),
        "min_ess": Param(100.0, type="number", minimum=0),
        "since": Param(
            "live",
            type="string",
            pattern="^(live|[0-9])",
            description="Judge by episodes from this time on; live: newer than those that the "
            "live version was trained on",
        ),
    },
    tags=["headrace"],
) as dag:
    freeze = cli_task("freeze", *WHERE, root=ROOT, policy_id=POLICY)
    train = cli_task(
        "train",
        *WHERE,
        "--manifest={manifest}",
        "--algorithm={algorithm}",
        "--seed={seed}",
        root=ROOT,
        policy_id=POLICY,
        manifest=MANIFEST,
        algorithm="{{ params.algorithm }}",
        seed="{{ params.seed }}",
    )
    evaluate = cli_task(
        "evaluate",
        *WHERE,
        "--manifest={manifest}",
        "--since={since}",
        "{candidate}",
        root=ROOT,
        policy_id=POLICY,
        manifest=MANIFEST,
        since=SINCE,
        candidate=CANDIDATE,
    )
    publish = cli_task(
        "publish",
        *WHERE,
        "--manifest={manifest}",
        "--since={since}",
        "--min-ess={min_ess}",
        f"--refused-exit={SKIPPED}",
        "{candidate}",
        root=ROOT,
        policy_id=POLICY,
        manifest=MANIFEST,
        since=SINCE,
        min_ess="{{ params.min_ess }}",
        candidate=CANDIDATE,
        skip_on=(SKIPPED, CANNOT_TELL),
    )
    freeze >> train >> evaluate >> publish
