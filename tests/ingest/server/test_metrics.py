"""`/metrics` has one metric for every promise, and its values are the collector's own.

Also of `ingest.collector.statistics`.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import urllib3
from prometheus_client.parser import text_string_to_metric_families

from ingest.histogram import BOUNDS, Histogram
from ingest.server.logs import JsonLines, TextLines, configure
from tests.collector_process import CollectorProcess, declare

OBS = [0.1, -0.2, 0.3, 0.4]


@pytest.fixture(scope="module")
def collector(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CollectorProcess]:
    root = tmp_path_factory.mktemp("root")
    declare(root)
    with CollectorProcess(root) as process:
        yield process


def scraped(collector: CollectorProcess) -> dict[str, float]:
    """Every sample of /metrics: its name with labels, and its value."""
    answer = urllib3.request("GET", f"{collector.address}/metrics")
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    return {
        sample.name + "".join(f" {key}={value}" for key, value in sample.labels.items()): value
        for sample in (
            sample
            for family in text_string_to_metric_families(answer.data.decode())
            for sample in family.samples
        )
        for value in [sample.value]
    }


def test_what_happens_is_counted(collector: CollectorProcess) -> None:
    """Accepted, repeated and refused events, steps, endings, refusals by code: each once."""
    instance = collector.post("/v1/instances")[1]["instance"]
    step = {"type": "log_action", "episode_id": "m", "seq": 1, "obs": OBS, "action": 0}
    events = [{"type": "start", "episode_id": "m", "start": 0}, step]
    for _ in range(2):
        collector.post("/v1/events", {"instance": instance, "events": events})
    collector.post("/v1/episodes", {"episode_id": "open"})
    collector.post("/v1/events", {"instance": instance, "events": [{**step, "seq": 7}]})
    collector.post(
        "/v1/events", {"instance": instance, "events": [{**step, "seq": 2, "action": 9}]}
    )
    collector.post("/v1/episodes/m/end", {})
    collector.get("/nowhere")
    found = scraped(collector)
    assert found["headrace_events_total outcome=accepted"] == 3
    assert found["headrace_events_total outcome=duplicate"] == 2
    assert found["headrace_refused_events_total code=gap"] == 1
    assert found["headrace_refused_events_total code=invalid"] == 1
    assert found["headrace_refused_requests_total code=broken"] == 1
    assert found["headrace_refused_requests_total code=no_route"] == 1
    assert found["headrace_steps_accepted_total"] == 1
    assert found["headrace_episodes_ended_total ending=broken"] == 1
    assert found["headrace_episodes_ended_total ending=terminated"] == 0
    assert found["headrace_open_episodes"] == 1
    assert found["headrace_acknowledge_seconds_count"] == 6
    assert found["headrace_commit_seconds_count"] >= 4
    assert found["headrace_durable_lag_rows"] == 0
    assert found["headrace_live_version policy=default"] == -1
    assert found["headrace_internal_errors_total"] == 0
    assert found["headrace_ready"] == 1


def test_waiting_for_late_rewards_is_counted(tmp_path: Path) -> None:
    """An episode counts as ended at once, and its steps as waiting until their window closes.

    `/readyz` and `/metrics` agree, before the window closes, after it and after a restart.
    """
    declare(tmp_path, reward_window=1800.0)
    names = ("episodes_awaiting_rewards", "steps_awaiting_rewards", "episodes_ended")
    events = [
        {"type": "start", "episode_id": "m", "start": 0},
        {"type": "log_action", "episode_id": "m", "seq": 1, "obs": OBS, "action": 0},
        {"type": "end", "episode_id": "m", "seq": 2},
    ]

    def counts(process: CollectorProcess) -> list[float]:
        found, ready = scraped(process), process.get("/readyz")[1]
        ended = [n for name, n in found.items() if name.startswith("headrace_episodes_ended_total")]
        waiting = [found[f"headrace_{name}"] for name in names[:2]]
        assert [ready[name] for name in names] == [*waiting, sum(ended)]
        return [*waiting, sum(ended)]

    with CollectorProcess(tmp_path) as process:
        instance = process.post("/v1/instances")[1]["instance"]
        process.post("/v1/events", {"instance": instance, "events": events})
        assert counts(process) == [1, 1, 1]
        process.kill()
        process.restart()
        assert counts(process) == [1, 1, 0]
        process.turn_clock()
        process.settle(1)
        assert counts(process) == [0, 0, 0]
        assert process.stop() == 0


def test_a_registry_belongs_to_its_collector(collector: CollectorProcess, tmp_path: Path) -> None:
    """Two collectors count separately, and each scrape is consistent with itself."""
    declare(tmp_path)
    with CollectorProcess(tmp_path) as other:
        assert scraped(other)["headrace_steps_accepted_total"] == 0


def test_a_histogram_counts_cumulatively() -> None:
    histogram = Histogram()
    for seconds in (0.0001, 0.0005, 0.003, 99.0):
        histogram.observe(seconds)
    buckets = dict(histogram.buckets())
    assert (buckets[str(BOUNDS[0])], buckets["0.005"], buckets["5.0"], buckets["+Inf"]) == (
        2,
        3,
        3,
        4,
    )
    assert histogram.total == pytest.approx(99.0036)


def record(text: str, *args: object, error: bool = False) -> logging.LogRecord:
    caught = None
    if error:
        try:
            raise ValueError("two\nlines")
        except ValueError:
            caught = sys.exc_info()
    return logging.LogRecord("headrace.x", logging.WARNING, "f", 1, text, args, caught)


def test_a_log_line_cannot_be_forged() -> None:
    """An id with a line break stays on its line, in text and in JSON."""
    forged = record("episode %s is broken", "e\n2026 ERROR forged\x1b[31m\u2028")
    assert "\n" not in TextLines().format(forged)
    assert "\\x0a2026 ERROR forged\\x1b[31m" in TextLines().format(forged)
    line = JsonLines().format(forged)
    assert "\n" not in line
    assert json.loads(line)["message"].startswith("episode e\n2026")


def test_a_json_line_holds_the_whole_event() -> None:
    """Time with its zone, level, logger and message; a traceback stays within the line."""
    line = JsonLines().format(record("it %s", "failed", error=True))
    document = json.loads(line)
    assert document["level"] == "warning"
    assert document["logger"] == "headrace.x"
    assert document["message"] == "it failed"
    assert document["time"].endswith("+00:00")
    assert "ValueError" in document["error"]
    assert "\n" not in line


@pytest.mark.parametrize(("kind", "level"), [("xml", "info"), ("json", "loud")])
def test_an_unknown_form_or_level_is_refused(kind: str, level: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        configure(kind, level)  # type: ignore[arg-type]
