"""Counters and log lines of a client."""

from __future__ import annotations

import logging
import subprocess
import sys
from typing import Any

import pytest
from opentelemetry import metrics
from prometheus_client.parser import text_string_to_metric_families

from ingest.client.policy_client import PolicyClient
from ingest.delivery import sender
from ingest.delivery.client_stats import METRICS, ClientStats, export
from ingest.protocol.errors import Refusal
from tests.ingest.scripted_collector import ScriptedCollector, answering, cut_before

OBS = [0.5, -1.0]


def test_the_text_is_what_prometheus_reads() -> None:
    """Every counter has a line with its type; `refused` has a line for each code."""
    stats = ClientStats(waiting=3, acknowledged=7, refused={"invalid": 2}, oldest_waiting=1.5)
    found = {
        (sample.name, sample.labels.get("code")): sample.value
        for family in text_string_to_metric_families(stats.prometheus())
        for sample in family.samples
    }
    assert found["headrace_client_events_waiting", None] == 3
    assert found["headrace_client_oldest_waiting_seconds", None] == 1.5
    assert found["headrace_client_events_acknowledged_total", None] == 7
    assert found["headrace_client_events_refused_total", "invalid"] == 2
    assert len(found) == 15


def test_refusals_are_of_queued_events_only() -> None:
    """A value that the call refuses is not counted; one that the collector refuses is."""
    with ScriptedCollector() as collector, PolicyClient(collector.address) as client:
        client.connect()
        with pytest.raises(ValueError, match="expected finite float32"):
            client.log_step([0.5], 1, 1.0)
        assert client.stats.refused == {}
        client.log_step(OBS, 1, 1.0, episode_id="a")
        client.flush()
        with PolicyClient(collector.address) as other:
            other.log_step(OBS, 1, 1.0, episode_id="a")
            with pytest.raises(Refusal):
                other.flush()
            assert other.stats.refused


def test_an_outage_is_two_log_lines(caplog: pytest.LogCaptureFixture) -> None:
    """An outage logs one line at its first failure and one at its end, however many attempts
    failed. The last line says how many events waited; resent events and the age of the oldest are
    counted."""
    with (
        caplog.at_level(logging.WARNING, "headrace.client"),
        ScriptedCollector() as collector,
        PolicyClient(collector.address) as client,
    ):
        client.log_step(OBS, 1, 1.0)
        client.flush()
        assert (client.stats.resent, client.stats.oldest_waiting) == (0, 0.0)
        collector.faults.extend([cut_before, answering(503, "draining"), cut_before])
        client.log_step(OBS, 1, 1.0)
        assert client.stats.oldest_waiting >= 0.0
        client.flush()
        assert (client.stats.acknowledged, client.stats.resent) == (6, 9)
    texts = [record.getMessage() for record in caplog.records]
    first, last = texts
    assert first.endswith("; logged events wait")
    assert last.endswith(" answers again; 3 events wait")


class Recording(metrics.NoOpMeterProvider):
    """A meter provider that keeps the callbacks of its observable instruments."""

    def __init__(self) -> None:
        self.callbacks: dict[str, Any] = {}

    def get_meter(self, *_: Any, **__: Any) -> metrics.Meter:
        provider = self

        class Meter(metrics.NoOpMeter):
            def create_observable_gauge(self, name: str, callbacks: Any = None, **_: Any) -> Any:
                provider.callbacks[name] = callbacks[0]

            create_observable_counter = create_observable_gauge

        return Meter("recording")

    def observed(self, name: str, address: str) -> dict[str | None, float]:
        found = self.callbacks[f"headrace.client.{name}"](metrics.CallbackOptions())
        return {
            (one.attributes or {}).get("code"): one.value
            for one in found
            if (one.attributes or {}).get("address") == address
        }


def test_opentelemetry_observes_the_same_counts() -> None:
    """The counts go to whichever provider the service has set; refusals are labelled by code."""
    provider = Recording()
    assert export(sender._clients, provider)
    assert len(provider.callbacks) == len(METRICS) + 1
    with ScriptedCollector() as collector, PolicyClient(collector.address) as client:
        client.log_step(OBS, 1, 1.0)
        collector.judge = lambda event: "invalid" if event.episode_id == "bad" else None
        client.log_step(OBS, 1, 1.0, episode_id="bad")
        with pytest.raises(Refusal):
            client.flush()
        assert provider.observed("events_acknowledged", collector.address) == {None: 3}
        assert provider.observed("events_waiting", collector.address) == {None: 0}
        assert provider.observed("events_refused", collector.address) == client.stats.refused


def test_a_service_without_opentelemetry_goes_on() -> None:
    """The client looks for OpenTelemetry once, at import."""
    program = (
        "import sys; sys.modules['opentelemetry'] = None\n"
        f"from {export.__module__} import export\n"
        "print(export(lambda: []))"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert found.stdout == "False\n"
