"""The DAGs of a policy and of a root: a DAG file of Airflow calls the functions at the end.

    from headrace_dags import headrace_dags, root_dags

    headrace_dags("/var/lib/headrace", "banner", "@hourly", prefix="banner_", canary="10%")
    root_dags("/var/lib/headrace", "banner", keep="400d", retain=True)

Each DAG below has its text in Airflow. A DAG only names commands: whatever is retried, started
twice or cleared finds the first result, by a manifest's hash, a candidate's digest or a generation.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from airflow.sdk import (
    DAG,
    Asset,
    AssetOrTimeSchedule,
    AssetWatcher,
    CronDataIntervalTimetable,
    CronTriggerTimetable,
    DeadlineAlert,
    DeadlineReference,
    Param,
)
from cli_task import SKIPPED, cli_task
from headrace_triggers import SealedShards

START = datetime(2026, 1, 1, tzinfo=UTC)
CRON = {"@hourly": "0 * * * *", "@daily": "0 0 * * *", "@weekly": "0 0 * * 0"}
ROOT, POLICY = "{{ params.root }}", "{{ params.policy_id }}"
WHERE = ("--root={root}", "--policy-id={policy_id}")
OF = {"root": ROOT, "policy_id": POLICY}


@dataclass(frozen=True, kw_only=True)
class Config:
    """What the DAGs of a policy share; docs of each field: `headrace_dags`."""

    root: str
    policy: str
    schedule: str | None
    prefix: str = ""
    on_shards: bool = False
    watch: bool = True
    min_parts: int = 1
    canary: str = ""
    canary_hours: float = 72.0
    imports: Sequence[str] = ()
    import_schedule: str = "@daily"
    keep: str = "400d"
    cap_bytes: int = 10_000_000_000
    retain: bool = False
    queue: str = ""
    reports: str = ""
    nightly: str = "0 3 * * *"
    owner: str = "headrace"
    retries: int = 2
    retry_delay: timedelta = timedelta(seconds=30)
    pool: str = "default_pool"
    poll: float = 60.0
    on_failure: Collection[Callable[[Any], None]] = ()
    deadline: timedelta = timedelta(hours=6)
    on_deadline: Any = None
    params: dict[str, Any] = field(default_factory=dict)

    def asset(self, kind: str) -> str:
        """The name of an asset of this policy."""
        return f"headrace/{self.prefix}{self.policy}/{kind}"

    def dag(self, name: str, schedule: Any, doc: Callable[..., None], **params: Any) -> DAG:
        """A DAG without tasks; `doc` is the function that adds them."""
        text = " ".join((doc.__doc__ or "").split())
        alert = self.on_deadline and DeadlineAlert(
            DeadlineReference.DAGRUN_QUEUED_AT, self.deadline, self.on_deadline
        )
        known = {
            "root": Param(
                self.root,
                type="string",
                pattern="^(/|[a-z0-9+]+://)",
                description="The root: an absolute path, as a task has no home, or an address",
            ),
            "policy_id": Param(self.policy, type="string", pattern="^[A-Za-z0-9]"),
        }
        for key in self.params.keys() & params.keys():
            params[key].value = self.params[key]
        return DAG(
            dag_id=f"{self.prefix}{name}",
            description=text.partition(". ")[0],
            doc_md=doc.__doc__,
            schedule=schedule,
            start_date=START,
            catchup=False,  # one run with the current shards replaces all missed ones
            max_active_runs=1,
            default_args={
                "owner": self.owner,
                "retries": self.retries,
                "retry_delay": self.retry_delay,
                "on_failure_callback": list(self.on_failure) or None,
            },
            deadline=alert,
            params={**known, **params},
            tags=["headrace", self.policy],
        )

    def ran(self, schedule: str | None) -> Any:
        """A schedule whose runs have a data interval."""
        if schedule is None:
            return None
        return CronDataIntervalTimetable(CRON.get(schedule, schedule), timezone="UTC")


def pulled(task: str, *keys: str) -> str:
    """A template of a part of an earlier task's JSON."""
    path = "".join(f"[{key!r}]" for key in keys)
    return f"{{{{ ti.xcom_pull(task_ids={task!r}){path} }}}}"


def train_and_publish(config: Config) -> None:
    """Train on the data in the shards, judge the candidate, and publish it if the gate allows it.

    `freeze` writes the stored ordinals to a manifest; with a run that an asset event started, up to
    those of the event. All later steps are keyed by the manifest's hash, so that a run without new
    shards, a retry, or a run that was started twice does nothing. If a candidate is worse, or the
    episodes cannot tell, or a canary or a pin holds the policy, `publish` is skipped, the run
    succeeds, and the reason is in the task's note. With `canary`, a candidate that is not worse
    acts in that share of the episodes, and `canary_promotion` goes on.
    """
    watched = config.on_shards and config.watch
    if watched and not config.root.startswith("/"):
        raise ValueError(
            f"{config.root}: expected a folder to watch; with an address say watch=False, and let "
            "the collector's --on-seal post the events"
        )
    shards = Asset(
        config.asset("shards"),
        watchers=[
            AssetWatcher(
                name=config.asset("watcher"),
                trigger=SealedShards(config.root, config.asset("shards"), config.min_parts),
            )
        ]
        if watched
        else [],
    )
    schedule: Any = config.schedule
    if config.on_shards:
        schedule = [shards]
        if config.schedule is not None:
            cron = CronTriggerTimetable(CRON.get(config.schedule, config.schedule), timezone="UTC")
            schedule = AssetOrTimeSchedule(timetable=cron, assets=[shards])
    since = Param(
        "live",
        type="string",
        pattern="^(live|[0-9])",
        description="Judge by episodes from this time on; live: newer than those that the live "
        "version was trained on",
    )
    optional = {"type": "string"}
    dag = config.dag(
        "train_and_publish",
        schedule,
        train_and_publish,
        algorithm=Param("dr", type="string", pattern="^[a-z]"),
        settings=Param([], type="array", items={"type": "string", "pattern": "^[a-z_.]+=.+"}),
        seed=Param(0, type="integer", minimum=0),
        cluster=Param("", pattern="^(tag:.+)?$", **optional),
        train_since=Param("", pattern="^([0-9].*)?$", **optional),
        train_until=Param("", pattern="^([0-9].*)?$", **optional),
        action_rule=Param("", **optional),
        estimator=Param([], type="array", items={"type": "string", "pattern": "^[a-z]"}),
        gamma=Param(1.0, type="number", minimum=0, maximum=1),
        min_ess=Param(100.0, type="number", minimum=0),
        margin=Param("0", type="string", pattern="^-?[0-9.]+%?$", description="The bar"),
        alpha_budget=Param(None, type=["number", "null"], minimum=0, maximum=1),
        since=since,
        canary=Param(
            config.canary,
            pattern=r"^([0-9.]+%?)?$",
            description="Share of the episodes, such as 10%; empty: the gate decides",
            **optional,
        ),
    )
    manifest, candidate = pulled("freeze", "manifest"), pulled("train", "candidate")
    judged = ("--manifest={manifest}", "--since={since}", "--gamma={gamma}", "--margin={margin}")
    judges = {
        "manifest": manifest,
        "since": "{{ params.since }}",
        "gamma": "{{ params.gamma }}",
        "margin": "{{ params.margin }}",
        "candidate": candidate,
    }
    with dag:
        freeze = cli_task("freeze", *WHERE, **OF, operator={"up_to": True})
        train = cli_task(
            "train",
            *WHERE,
            "--manifest={manifest}",
            "--algorithm={algorithm}",
            "--seed={seed}",
            manifest=manifest,
            algorithm="{{ params.algorithm }}",
            seed="{{ params.seed }}",
            operator={
                "pool": config.pool,
                "event": config.asset("candidates"),
                "keep": ("candidate", "manifest", "rows_trained", "unchanged"),
                "options": {
                    "--set": "settings",
                    "--cluster": "cluster",
                    "--since": "train_since",
                    "--until": "train_until",
                    "--action-rule": "action_rule",
                },
            },
            timeout=timedelta(hours=12),
            **OF,
        )
        evaluate = cli_task(
            "evaluate",
            *WHERE,
            *judged,
            "{candidate}",
            **OF,
            **judges,
            operator={"options": {"--estimator": "estimator", "--cluster": "cluster"}},
        )
        publish = cli_task(
            "publish",
            *WHERE,
            *judged,
            "--min-ess={min_ess}",
            f"--refused-exit={SKIPPED}",
            "{candidate}",
            min_ess="{{ params.min_ess }}",
            operator={
                "event": config.asset("live"),
                "unless": "canary",
                "options": {"--alpha-budget": "alpha_budget", "--cluster": "cluster"},
            },
            **OF,
            **judges,
        )
        start = cli_task(
            "publish",
            *WHERE,
            "--manifest={manifest}",
            "{candidate}",
            manifest=manifest,
            candidate=candidate,
            task_id="start_canary",
            operator={
                "event": config.asset("canary"),
                "only_if": ("evaluate", "verdict", ("better", "cannot tell")),
                "options": {"--canary": "canary"},
                "unless": "!canary",
            },
            **OF,
        )
        freeze >> train >> evaluate >> [publish, start]


def canary_promotion(config: Config) -> None:
    """Wait for a canary's verdict, then promote it, end it, or let it go on.

    A canary's event names its candidate and generation, so that no other canary is touched.
    `wait` asks `headrace canary`, deferred in between, until the verdict is better or worse, or
    `hours` are over: then the canary goes on, and a later run may ask again. A worse canary is
    rolled back, with the reasons, and the pin of that ends at once.
    """
    canary = config.asset("canary")
    event = "(triggering_asset_events.values() | list)[0][-1].extra"
    both = {
        name: f"{{{{ params.{name} or {event}[{name!r}] }}}}"
        for name in ("candidate", "generation")
    }
    named = (*WHERE, "--candidate={candidate}", "--expect-generation={generation}")
    dag = config.dag(
        "canary_promotion",
        [Asset(canary)],
        canary_promotion,
        candidate=Param("", type="string", pattern="^([0-9a-f]{6,64})?$"),
        generation=Param(None, type=["integer", "null"], minimum=1),
        hours=Param(config.canary_hours, type="number", minimum=0),
        age=Param(None, type=["number", "null"], description="Seconds; see `headrace canary`"),
        margin=Param("0", type="string", pattern="^-?[0-9.]+%?$"),
    )
    options = {"options": {"--age": "age", "--margin": "margin"}}
    keys = ("state", "verdict", "reasons", "candidate", "generation", "canary", "episodes")
    with dag:
        wait = cli_task(
            "canary",
            *named,
            task_id="wait",
            operator={
                **options,
                "answers": (1, 4),
                "undecided_for": "{{ params.hours * 3600 }}",
                "poll": config.poll,
                "keep": keys,
            },
            timeout=timedelta(hours=config.canary_hours + 1),
            **OF,
            **both,
        )
        promote = cli_task(
            "promote",
            *named,
            operator={
                **options,
                "only_if": ("wait", "state", ("better",)),
                "event": config.asset("live"),
            },
            **OF,
            candidate=pulled("wait", "candidate"),
            generation=pulled("wait", "generation"),
        )
        rollback = cli_task(
            "rollback",
            *named,
            "--why={why}",
            task_id="roll_back",
            operator={"only_if": ("wait", "state", ("worse",))},
            why="worse: {{ ti.xcom_pull(task_ids='wait')['reasons'] | join('; ') }}",
            **OF,
            candidate=pulled("wait", "candidate"),
            generation=pulled("wait", "generation"),
        )
        resume = cli_task(
            "resume",
            *WHERE,
            "--expect-generation={generation}",
            generation=pulled("roll_back", "generation"),
            **OF,
        )
        wait >> [promote, rollback]
        rollback >> resume


def rollback_weights(config: Config) -> None:
    """Return to the version before, or to another one, and pin the policy to it.

    Started by hand, with a reason. `look` notes the generation that is live; `roll_back` acts in
    that generation only, so that a retry does not roll back twice. `headrace resume` ends the pin.
    """
    dag = config.dag(
        "rollback_weights",
        None,
        rollback_weights,
        why=Param(type="string", minLength=3, description="Kept with the decision; required"),
        to=Param(None, type=["integer", "null"], minimum=1, description="Default: the one before"),
    )
    with dag:
        look = cli_task("versions", *WHERE, task_id="look", operator={"keep": ("live",)}, **OF)
        back = cli_task(
            "rollback",
            *WHERE,
            "--why={why}",
            "--expect-generation={generation}",
            task_id="roll_back",
            why="{{ params.why }}",
            generation=pulled("look", "live", "generation"),
            operator={"options": {"--to": "to"}, "event": config.asset("live")},
            **OF,
        )
        look >> back


def import_history(config: Config) -> None:
    """Import the episodes that began in a run's data interval, once however often it runs.

    A backfill of Airflow imports past intervals. `imports` are the words of `headrace import`:
    the source, its columns with `--time`, and a `--name`, under which a longer source is known.
    """
    dag = config.dag(
        "import_history",
        config.ran(config.import_schedule),
        import_history,
        since=Param("", type="string", pattern="^([0-9].*)?$", description="Default: the interval"),
        until=Param("", type="string", pattern="^([0-9].*)?$"),
    )
    with dag:
        cli_task(
            "import",
            "--policy-id={policy_id}",
            "--since={since}",
            "--until={until}",
            since="{{ params.since or data_interval_start.isoformat() }}",
            until="{{ params.until or data_interval_end.isoformat() }}",
            policy_id=POLICY,
            operator={
                "more": list(config.imports),
                "keep": ("name", "rows", "steps", "skipped_known", "rows_left_out"),
            },
            timeout=timedelta(hours=12),
        )


def compact_shards(config: Config) -> None:
    """Join small shards, nightly: a plan, then its application, which may be interrupted."""
    with config.dag("compact_shards", config.ran(config.nightly), compact_shards):
        plan = cli_task("compact", "--root={root}", task_id="plan", root=ROOT)
        _applied("compact") << plan


def retain_shards(config: Config) -> None:
    """Remove whole old episodes: the plan is the report, and is applied only with `apply`.

    A plan removes at most about `cap_bytes`, so that a wrong limit is seen before much is gone.
    Replaced shards can be restored for a day.
    """
    dag = config.dag(
        "retain_shards",
        config.ran(config.nightly),
        retain_shards,
        keep=Param(config.keep, type="string", pattern="^[0-9.]+d$"),
        cap_bytes=Param(config.cap_bytes, type="integer", minimum=0),
        apply=Param(config.retain, type="boolean", description="False: only plan"),
    )
    with dag:
        plan = cli_task(
            "retain",
            "--root={root}",
            "--keep={keep}",
            "--cap-bytes={cap}",
            task_id="plan",
            root=ROOT,
            keep="{{ params.keep }}",
            cap="{{ params.cap_bytes }}",
        )
        _applied("retain", unless="!apply") << plan


def _applied(command: str, **more: Any) -> Any:
    """The task that applies the plan of the task `plan`, if there is one."""
    operator = {"only_if": ("plan", "plan", None), **more}
    words = ("--root={root}", "--apply={plan}", "--why={why}")
    why, plan = "DAG run {{ run_id }}", pulled("plan", "plan")
    return cli_task(
        command, *words, task_id="apply", root=ROOT, plan=plan, why=why, operator=operator
    )


def erase_requests(config: Config) -> None:
    """Erase the persons whom the files of a queue name, and put the proof in place of each file.

    A run without a request is skipped. The XCom has counts and the proofs' places, and no name.
    """
    dag = config.dag(
        "erase_requests",
        config.ran(config.nightly),
        erase_requests,
        queue=Param(config.queue or f"{config.root}-requests", type="string", pattern="^/"),
    )
    with dag:
        cli_task(
            "erase",
            "--root={root}",
            "--queue={queue}",
            "--apply=new",
            "--why={why}",
            root=ROOT,
            queue="{{ params.queue }}",
            why="DAG run {{ run_id }}",
            operator={"keep": ("rows", "episodes", "trained", "done")},
        )


def scorecard(config: Config) -> None:
    """Judge every live version by its log, check all propensities and shards, write the report.

    One policy that cannot be judged does not hide the others. The report is kept by the interval's
    end in the folder `reports`.
    """
    reports = config.reports or f"{config.root}/reports"
    if not reports.startswith("/"):
        raise ValueError(f"{config.root}: with an address, expected `reports`, a folder")
    dag = config.dag(
        "scorecard",
        config.ran(config.nightly),
        scorecard,
        reports=Param(reports, type="string", pattern="^/"),
    )
    with dag:
        judge = cli_task("evaluate", "--root={root}", "--all", task_id="judge", root=ROOT)
        verify = cli_task("verify", "--root={root}", root=ROOT)
        report = cli_task(
            "report",
            *WHERE,
            "--output={reports}/{policy_id}-{day}.html",
            reports="{{ params.reports }}",
            day="{{ (data_interval_end or dag_run.run_after).strftime('%Y%m%dT%H%M') }}",
            operator={"trigger_rule": "all_done"},
            **OF,
        )
        [judge, verify] >> report


OF_A_POLICY = (train_and_publish, canary_promotion, rollback_weights, import_history)
OF_A_ROOT = (compact_shards, retain_shards, erase_requests, scorecard)
DAGS = {one.__name__: one for one in (*OF_A_POLICY, *OF_A_ROOT)}


def root_dags(root: str, policy: str = "default", **settings: Any) -> None:
    """Make the DAGs that concern a whole root, with the settings of `headrace_dags`.

    `policy` is the one of the scorecard's report. `headrace erase` needs a folder, not an address.
    """
    known = [one for one in OF_A_ROOT if one is not erase_requests or root.startswith("/")]
    headrace_dags(root, policy, only=[one.__name__ for one in known], **settings)


def headrace_dags(
    root: str,
    policy: str,
    schedule: str | None = "@hourly",
    *,
    only: Collection[str] | None = None,
    **settings: Any,
) -> None:
    """Make the DAGs of a policy under a root; a DAG file needs no more than this call.

    - `schedule` of training; None: only by hand, or with `on_shards` by new shards.
    - `only`: names of DAGs; default: those of a policy, `import_history` if `imports` are given.
    - `prefix` of the DAGs' ids, `owner`, `retries`, `retry_delay`, `pool` of training.
    - `on_shards`, `min_parts`: start a training when shards have that many more parts, which the
      triggerer watches; without `watch`, when a collector's `--on-seal` posts an event.
    - `canary`: the share of a canary, such as "10%"; `canary_hours`, `poll` of its wait.
    - `imports`: words of `headrace import`; `import_schedule`.
    - `keep`, `cap_bytes`, `retain` (apply its plans), `queue`, `nightly` of the upkeep.
    - `reports`: the scorecard's folder, by default `reports/` of the root.
    - `on_failure`, `deadline`, `on_deadline`: callbacks, such as those of `alerts`.
    - `params`: other defaults of the DAGs' parameters, by name.
    """
    config = Config(root=root, policy=policy, schedule=schedule, **settings)
    own = [one.__name__ for one in OF_A_POLICY if one is not import_history or config.imports]
    for name in own if only is None else only:
        DAGS[name](config)
