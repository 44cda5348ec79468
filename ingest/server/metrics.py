"""`/metrics`: one metric for each guarantee, read from the collector's counters at a scrape.

Each count is kept in one place, and nothing is global: a registry belongs to its collector. The
table in docs/metrics.md says what each metric is for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from ingest.collector.collector import Collector
from ingest.collector.live_policies import LivePolicies
from ingest.collector.trainer_watch import TrainerWatch, number_in
from ingest.histogram import Histogram
from ingest.server.action_routes import Acting
from ingest.server.disk_space import DiskSpace
from ingest.web.asgi import Router
from ingest.web.connections import ConnectionWatch
from storage.experience.endings import ENDINGS
from storage.experience.reward_history import BEFORE

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True)
class Sources:
    """The objects whose counters are read; `connections` is None if this serves no sockets."""

    collector: Collector
    live: LivePolicies
    router: Router
    acting: Acting
    connections: ConnectionWatch | None = None
    trainers: TrainerWatch | None = None
    disks: DiskSpace | None = None


class Metrics:
    """The registry of one collector."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def text(self) -> bytes:
        """All metrics in Prometheus's text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics; prometheus-client calls this at a scrape."""
        yield from _events(self._sources.collector)
        yield from _journal(self._sources.collector, self._sources.live.root)
        yield from _shards(self._sources.collector)
        if self._sources.disks is not None:
            yield from _disks(self._sources.disks)
        yield from _episodes(self._sources.collector)
        yield from _policies(self._sources.collector, self._sources.live)
        yield from _training(self._sources.collector, self._sources.trainers)
        yield from _acting(self._sources.acting)
        yield from _requests(self._sources.router)
        if self._sources.connections is not None:
            yield from _connections(self._sources.connections)


def _events(collector: Collector) -> Iterator[Metric]:
    stats, steps = collector.stats, collector.assembler.steps
    outcomes = {"accepted": stats.accepted, "duplicate": stats.duplicates, "refused": stats.refused}
    yield _counters("headrace_events", "Events judged since the start.", "outcome", outcomes)
    yield _counters("headrace_refused_events", "Refused events.", "code", stats.refused_by)
    dropped = {"episodes": collector.dropped.episodes, "steps": collector.dropped.steps}
    yield _counters(
        "headrace_client_dropped", "Dropped by clients with full queues.", "what", dropped
    )
    yield _counter("headrace_unsampled_rewards", "Rewards for unsampled episodes.", stats.unsampled)
    yield _counter("headrace_steps_accepted", "Accepted steps, over the journal's life.", steps)


def _journal(collector: Collector, root: Path | None) -> Iterator[Metric]:
    journal = collector.journal
    latency = journal.committer.latency
    yield _histogram("headrace_commit_seconds", "Time of a commit with its sync.", latency)
    kept = len(collector.assembler.needed) + len(collector.sealing.idle_rows)
    lag = journal.submitted_row - journal.durable_row
    yield _gauge("headrace_durable_lag_rows", "Rows that are not on disk yet.", lag)
    yield _gauge("headrace_journal_rows", "Rows that are not in shards yet.", kept)
    files = [] if root is None else (root / "journal").glob("journal.db*")
    size = sum(file.stat().st_size for file in files)
    yield _gauge("headrace_journal_bytes", "Size of the journal's files.", size)
    damage = collector.damage
    found = {
        "missing": damage.missing_rows,
        "lost": damage.lost_rows,
        "damaged": damage.damaged_rows,
        "state": len(damage.lost_state),
        "set_aside": int(damage.set_aside is not None),
    }
    yield _gauges("headrace_journal_damage", "Damage found in the journal.", "kind", found)
    yield _counter("headrace_rebuilds", "States rebuilt from the journal.", journal.rebuilds)


def _shards(collector: Collector) -> Iterator[Metric]:
    totals = collector.sealing.totals
    yield _counter("headrace_steps_in_shards", "Steps in shards.", totals.rows)
    yield _counter("headrace_shards", "Shards recorded.", totals.shards)
    restored = totals.restored
    yield _counter(
        "headrace_restored_steps", "Steps of restored journals found in shards.", restored
    )
    pending = collector.sealing.pending_bytes
    yield _gauge("headrace_pending_bytes", "Bytes of parts that wait for a shard.", pending)
    failures = collector.sealer.failures
    yield _counter("headrace_writer_failures", "Shard writes that were retried.", failures)


def _disks(disks: DiskSpace) -> Iterator[Metric]:
    free, hours = disks.free(), disks.hours_left()
    yield _gauges("headrace_disk_free_bytes", "Free space on the disk of a folder.", "folder", free)
    says = "Hours until it is full at the rate of the last 6 hours."
    yield _gauges("headrace_disk_hours_left", says, "folder", hours)


def _episodes(collector: Collector) -> Iterator[Metric]:
    assembler = collector.assembler
    yield _gauge(
        "headrace_open_episodes",
        "Open episodes; with several agents, each agent counts.",
        len(assembler.episodes),
    )
    waiting, steps = len(assembler.closing), assembler.steps_awaiting_rewards
    yield _gauge(
        "headrace_episodes_awaiting_rewards",
        "Ended episodes that wait for late rewards; with several agents, each agent counts.",
        waiting,
    )
    yield _gauge("headrace_steps_awaiting_rewards", "The steps that wait with them.", steps)
    held = assembler.open_bytes
    yield _gauge(
        "headrace_open_bytes", "Approximate memory of open episodes and those that wait.", held
    )
    ended = dict.fromkeys(ENDINGS, 0) | collector.stats.ended
    yield _counters("headrace_episodes_ended", "Ended episodes since the start.", "ending", ended)
    yield _gauge("headrace_instances", "Known client instances.", len(assembler.instances))


def _policies(collector: Collector, live: LivePolicies) -> Iterator[Metric]:
    names = list(live.policies)
    versions = {name: -1 if (v := live.version(name)) is None else v for name in names}
    yield _gauges("headrace_live_version", "The live version, -1 for none.", "policy", versions)
    generations = {name: live.generation(name) for name in names}
    yield _gauges("headrace_live_generation", "Its generation.", "policy", generations)
    yield from _wanted(live, names)
    yield from _played(collector, live, names)
    family = CounterMetricFamily(
        "headrace_imported_steps", "Steps of imports in shards.", labels=["policy"]
    )
    for name in names:
        family.add_metric([name], collector.played.imported(name))
    yield family
    held = collector.flow.held()
    holds = {name: int(name in held) for name in names}
    yield _gauges("headrace_policy_held", "1 while clients wait for weights.", "policy", holds)
    ready = collector.journal.failure is None and not collector.draining
    yield _gauge("headrace_ready", "1 while events are accepted.", int(ready))


def _played(collector: Collector, live: LivePolicies, names: list[str]) -> Iterator[Metric]:
    """The episodes' returns by role, so that versions do not add to the number of series."""
    versions = GaugeMetricFamily(
        "headrace_role_version", "The version in each role, -1 for none.", labels=["policy", "role"]
    )
    says = {
        "episode_return": "Returns of the episodes in shards, by the version of their first step.",
        "step_reward": "Rewards of the steps in shards.",
        "action_propensity": "Probabilities of the actions taken, where they are known.",
    }
    labels = ["policy", "role"]
    families = {
        (measure, statistic): GaugeMetricFamily(
            f"headrace_{measure}_{statistic}", f"{text} ({words})", labels=labels
        )
        for measure, text in says.items()
        for statistic, words in (
            ("n", "How many."),
            ("sum", "Their sum."),
            ("sum_of_squares", "The sum of their squares."),
        )
    }
    for name in names:
        for role, version in {**live.roles(name), "before": BEFORE}.items():
            versions.add_metric([name, role], -1 if version is None else version)
            for measure, found in collector.played.of(name, version).items():
                families[measure, "n"].add_metric([name, role], found.n)
                families[measure, "sum"].add_metric([name, role], found.sum)
                families[measure, "sum_of_squares"].add_metric([name, role], found.squares)
    yield versions
    yield from families.values()


def _wanted(live: LivePolicies, names: list[str]) -> Iterator[Metric]:
    """Which version should be live, in addition to the served one, and which are refused."""
    standing = {name: live.standing(name) for name in names}
    versions = {name: one.wanted.version if one.wanted else -1 for name, one in standing.items()}
    yield _gauges(
        "headrace_wanted_version", "The version that live.json names.", "policy", versions
    )
    generations = {
        name: one.wanted.generation if one.wanted else -1 for name, one in standing.items()
    }
    yield _gauges("headrace_wanted_generation", "Its generation.", "policy", generations)
    pinned = {name: int(live.hold(name) is not None) for name in names}
    says = "1 while a rollback, a pause or a canary prevents trainers and jobs from publishing."
    yield _gauges("headrace_policy_pinned", says, "policy", pinned)
    family = CounterMetricFamily(
        "headrace_weights_refused", "Published weights not served.", labels=["policy", "why"]
    )
    for name, one in standing.items():
        for why, count in one.refused.items():
            family.add_metric([name, why], count)
    yield family
    busy = live.busy_seconds
    yield _gauge("headrace_weights_look_seconds", "Duration of the current read of weights/.", busy)


def _training(collector: Collector, trainers: TrainerWatch | None) -> Iterator[Metric]:
    text = "Time for which clients have been waiting for weights, else 0."
    yield _gauges("headrace_training_stalled_seconds", text, "policy", collector.flow.stalled())
    statuses = {} if trainers is None else trainers.status()
    lives = {name: int(alive) for name, (alive, _) in statuses.items()}
    yield _gauges("headrace_trainer_up", "1 while a trainer holds the lease.", "policy", lives)
    for metric, key, text in (
        ("headrace_training_rows", "rows_trained", "Rows that the weights were trained on."),
        ("headrace_training_excluded_shards", "excluded_shards", "Excluded shards."),
        ("headrace_training_retrying_shards", "retrying", "Shards that are retried."),
    ):
        values = {name: number_in(status.get(key)) for name, (_, status) in statuses.items()}
        yield _gauges(metric, text, "policy", values)
    family = GaugeMetricFamily(
        "headrace_training_excluded_rows", "Excluded rows, by reason.", labels=["policy", "reason"]
    )
    for name, (_, status) in statuses.items():
        excluded = status.get("excluded")
        for reason, rows in excluded.items() if isinstance(excluded, dict) else ():
            family.add_metric([name, str(reason)[:64]], number_in(rows))
    yield family


def _acting(acting: Acting) -> Iterator[Metric]:
    yield _counter("headrace_action_requests", "Requests for actions.", acting.requests)
    yield _counter("headrace_forwards", "Forward passes for actions.", acting.forwards)
    yield _counter("headrace_holds", "Requests that waited for weights.", acting.holds)
    given_up = acting.holds_given_up
    yield _counter("headrace_holds_given_up", "Held requests without newer weights.", given_up)


def _requests(router: Router) -> Iterator[Metric]:
    statuses = {str(status): count for status, count in sorted(router.statuses.items())}
    yield _counters("headrace_requests", "Answers.", "status", statuses)
    yield _counters("headrace_refused_requests", "Refused requests.", "code", router.refusals)
    errors = router.statuses[500]
    yield _counter("headrace_internal_errors", "Answers with 500: each is a bug.", errors)
    yield _histogram(
        "headrace_acknowledge_seconds", "Time from a complete body to its answer.", router.latency
    )
    yield _gauge("headrace_body_bytes", "Bytes of bodies in memory.", router.budget.held)
    yield _counter(
        "headrace_body_refusals", "Bodies refused for lack of memory.", router.budget.refused
    )
    charged = router.penalties.charged
    yield _counter("headrace_refused_work_seconds", "Time spent on refused long bodies.", charged)


def _connections(watch: ConnectionWatch) -> Iterator[Metric]:
    yield _gauge("headrace_connections", "Open connections.", len(watch.open))
    yield _gauge("headrace_connections_limit", "Most connections.", watch.max_connections)
    yield _counter("headrace_connections_refused", "New connections refused.", watch.refused)
    yield _counters(
        "headrace_connections_cut", "Connections closed by a limit.", "why", watch.cut_off
    )
    yield _counter("headrace_malformed_requests", "Malformed HTTP requests.", watch.malformed)


def _gauge(name: str, says: str, value: float) -> Metric:
    return GaugeMetricFamily(name, says, value=value)


def _gauges(name: str, says: str, label: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(name, says, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def _counter(name: str, says: str, value: float) -> Metric:
    return CounterMetricFamily(name, says, value=value)


def _counters(name: str, says: str, label: str, values: Mapping[str, float]) -> Metric:
    family = CounterMetricFamily(name, says, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def _histogram(name: str, says: str, values: Histogram) -> Metric:
    return HistogramMetricFamily(name, says, buckets=values.buckets(), sum_value=values.total)
