"""What a client has done so far, as attributes and as text for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(frozen=True)
class ClientStats:
    """Counts since the client was made, of events where nothing else is said.

    Attributes:
        waiting: not acknowledged yet.
        acknowledged: on the collector's disk, once each.
        duplicates: of those, what the collector had already.
        resent: sent again, because there was no answer or another one than yes or no.
        refused: by error code, what the collector refused, or what did not fit its policy.
        dropped_episodes: episodes of which nothing was logged, or not all, with `on_full="drop"`.
        dropped_steps: steps of theirs that were not logged.
        dropped_rewards: rewards for named steps of other episodes that were not logged.
        unsampled_episodes: episodes that `sample_rate` left out.
        unsampled_rewards: rewards for named steps of theirs, whichever client left them out.
        spooled: waiting on disk with `on_full="spool"`, what earlier processes left included; they
            are among those that wait.
        spooled_bytes: what the spool of this process takes on disk.
        oldest_waiting: for how long the oldest event that waits has done so, in seconds, about.
        batches, retries: requests that were answered, and attempts that were not.
        weights_refused: published weights that were not taken up: damaged, or older than those
            that act.
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
    oldest_waiting: float = 0.0
    batches: int = 0
    retries: int = 0
    weights_refused: int = 0

    @property
    def pending(self) -> int:
        """The older name of `waiting`."""
        return self.waiting

    def prometheus(self) -> str:
        """The counts in Prometheus's text format, as `headrace_client_...`."""
        return "".join(f"{line}\n" for line in self._lines())

    def _lines(self) -> Iterator[str]:
        for name, kind, says, value in (
            ("events_waiting", "gauge", "Events not acknowledged yet.", self.waiting),
            ("oldest_waiting_seconds", "gauge", "Age of the oldest.", self.oldest_waiting),
            ("events_spooled", "gauge", "Events that wait on disk.", self.spooled),
            ("spooled_bytes", "gauge", "What they take there.", self.spooled_bytes),
            ("events_acknowledged_total", "counter", "Events on disk.", self.acknowledged),
            ("events_resent_total", "counter", "Events sent again.", self.resent),
            ("episodes_dropped_total", "counter", "Not logged whole.", self.dropped_episodes),
            ("steps_dropped_total", "counter", "Steps not logged.", self.dropped_steps),
            ("rewards_dropped_total", "counter", "Late rewards lost.", self.dropped_rewards),
            ("episodes_unsampled_total", "counter", "Left out.", self.unsampled_episodes),
            ("rewards_unsampled_total", "counter", "Of these.", self.unsampled_rewards),
            ("weights_refused_total", "counter", "Weights not taken up.", self.weights_refused),
        ):
            yield from _head(name, kind, says)
            yield f"headrace_client_{name} {value}"
        yield from _head("events_refused_total", "counter", "Events refused.")
        for code, count in sorted(self.refused.items()):
            yield f'headrace_client_events_refused_total{{code="{code}"}} {count}'


def _head(name: str, kind: str, says: str) -> Iterator[str]:
    yield f"# HELP headrace_client_{name} {says}"
    yield f"# TYPE headrace_client_{name} {kind}"
