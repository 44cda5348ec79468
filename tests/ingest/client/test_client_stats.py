"""What a client says that it did."""

from __future__ import annotations

import logging

import pytest
from prometheus_client.parser import text_string_to_metric_families

from ingest.client.client_stats import ClientStats
from ingest.client.policy_client import PolicyClient
from tests.ingest.scripted_collector import ScriptedCollector, answering, cut_before

OBS = [0.5, -1.0]


def test_the_text_is_what_prometheus_reads() -> None:
    """Every count has a line with its kind, refusals one for each code."""
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
    assert len(found) == 13
    assert stats.pending == stats.waiting


def test_an_outage_is_two_log_lines(caplog: pytest.LogCaptureFixture) -> None:
    """One at its first failure, one at its end, however often was tried; what was sent again and
    how old the oldest event is are counted."""
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
    assert [("wait" in text, "answers again" in text) for text in texts] == [
        (True, False),
        (False, True),
    ]
