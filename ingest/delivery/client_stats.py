"""A client's counts: as attributes, as text for Prometheus, and for OpenTelemetry."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any, TypeAlias

try:  # now, and not by a thread: a child that is forked meanwhile would have half of it
    from opentelemetry import metrics
except ImportError:
    metrics = None  # type: ignore[assignment]  # a module or nothing


@dataclass(frozen=True)
class ClientStats:
    """Counts since the client was made; events, unless the description says otherwise.

    Attributes:
        waiting: not acknowledged yet.
        acknowledged: on the collector's disk.
        duplicates: acknowledged ones that the collector had already: after a lost answer, or
            because they had travelled with a remote `get_action` and were not known to be on disk.
        resent: sent again, because there was no answer or the collector asked for it.
        refused: queued events by error code that the collector refused, or that did not fit the
            policy when its declaration became known; as `unreadable` those that are damaged or
            unreadable in the spool. A value that a call itself refuses is never queued, and is not
            counted.
        dropped_episodes: episodes that were not or not completely logged, with `on_full="drop"`.
        dropped_steps: steps of these episodes that were not logged.
        dropped_rewards: dropped rewards for named steps of other episodes.
        unsampled_episodes: episodes that `sample_rate` left out.
        unsampled_rewards: rewards for named steps of episodes that any client left out.
        spooled: waiting on disk with `on_full="spool"`, including those of earlier processes; they
            are included in `waiting`.
        spooled_bytes: bytes of this process's spool on disk.
        unwritten: not on disk yet, because the disk took longer than `max_wait`.
        oldest_waiting: the approximate age of the oldest waiting event, in seconds.
        batches, retries: requests with an answer, and attempts without one.
        errors: unexpected errors of the sending thread, which continues; the first of a series is
            logged.
        weights_refused: published weights that were refused, because they were damaged or older
            than those in use.
    """

    waiting: int = 0
    acknowledged: int = 0
    duplicates: int = 0
    resent: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    dropped_episodes: int = 0
    dropped_steps: int = 0
    dropped_rewards: int = 0
    unsampled_episodes: int = 0
    unsampled_rewards: int = 0
    spooled: int = 0
    spooled_bytes: int = 0
    unwritten: int = 0
    oldest_waiting: float = 0.0
    batches: int = 0
    retries: int = 0
    errors: int = 0
    weights_refused: int = 0

    def prometheus(self) -> str:
        """The counts in Prometheus's text format, as `headrace_client_...`."""
        return "".join(f"{line}\n" for line in self._lines())

    def _lines(self) -> Iterator[str]:
        for name, kind, says, field_ in METRICS:
            yield from _head(name, kind, says)
            yield f"headrace_client_{name} {getattr(self, field_)}"
        yield from _head("events_refused_total", "counter", "Events refused.")
        for code, count in sorted(self.refused.items()):
            yield f'headrace_client_events_refused_total{{code="{code}"}} {count}'


METRICS = (
    ("events_waiting", "gauge", "Events not acknowledged yet.", "waiting"),
    ("oldest_waiting_seconds", "gauge", "Age of the oldest waiting event.", "oldest_waiting"),
    ("events_spooled", "gauge", "Events that wait on disk.", "spooled"),
    ("spooled_bytes", "gauge", "Bytes of spooled events.", "spooled_bytes"),
    ("events_unwritten", "gauge", "Events on their way to the disk.", "unwritten"),
    ("events_acknowledged_total", "counter", "Events on disk.", "acknowledged"),
    ("events_resent_total", "counter", "Events sent again.", "resent"),
    ("episodes_dropped_total", "counter", "Episodes dropped.", "dropped_episodes"),
    ("steps_dropped_total", "counter", "Steps dropped.", "dropped_steps"),
    ("rewards_dropped_total", "counter", "Late rewards dropped.", "dropped_rewards"),
    ("episodes_unsampled_total", "counter", "Episodes not sampled.", "unsampled_episodes"),
    ("rewards_unsampled_total", "counter", "Rewards for unsampled episodes.", "unsampled_rewards"),
    ("errors_total", "counter", "Unexpected errors in sending.", "errors"),
    ("weights_refused_total", "counter", "Weights refused.", "weights_refused"),
)
"""Name, kind, help text and attribute of each metric, except the refused events by code."""

Clients: TypeAlias = Callable[[], Iterable[tuple[Mapping[str, str], ClientStats]]]
"""The clients of a process: labels that tell them apart, and their counts."""


def export(clients: Clients, provider: Any = None) -> bool:
    """Export the counts through OpenTelemetry's API; return False if it is not installed.

    The instruments are `headrace.client.events_waiting` and so on. `provider`: a MeterProvider;
    default: the one that the service sets, before or after this call.
    """
    if metrics is None:
        return False
    meter = metrics.get_meter("headrace.client", meter_provider=provider)

    def observed(values: Callable[[ClientStats], Mapping[str, float]], _: Any) -> Iterator[Any]:
        for labels, stats in clients():
            for code, value in values(stats).items():
                yield metrics.Observation(value, {**labels, **({"code": code} if code else {})})

    def make(kind: str, name: str, says: str, values: Any) -> None:
        create = (
            meter.create_observable_gauge if kind == "gauge" else meter.create_observable_counter
        )
        create(f"headrace.client.{name}", [partial(observed, values)], description=says)

    for name, kind, says, attribute in METRICS:
        get = attrgetter(attribute)
        make(kind, name.removesuffix("_total"), says, lambda stats, get=get: {"": get(stats)})
    make("counter", "events_refused", "Events refused.", attrgetter("refused"))
    return True


def _head(name: str, kind: str, says: str) -> Iterator[str]:
    yield f"# HELP headrace_client_{name} {says}"
    yield f"# TYPE headrace_client_{name} {kind}"
