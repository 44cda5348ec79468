"""A request's trace is in the shard, as an info of the steps that it caused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, use_span

from ingest.client.policy_client import PolicyClient
from storage.reading.shard_reader import ShardReader
from tests.collector_process import CollectorProcess, declare
from tests.ingest.client.test_local_inference import publish

OBS = np.zeros(4, np.float32)


def span(number: int) -> NonRecordingSpan:
    return NonRecordingSpan(SpanContext(0xABC, number, is_remote=False, trace_flags=TraceFlags(1)))


def test_a_trace_goes_from_the_call_to_the_shard(tmp_path: Path) -> None:
    """Logged actions, those of the client's own policy, and whole steps carry the span in which
    they were called; infos of rewards join them; a step outside of any span has none."""
    declare(tmp_path)
    publish(tmp_path, 1)
    with CollectorProcess(tmp_path) as process:
        with PolicyClient(process.address, trace=True) as client:
            episode = client.start_episode("mixed")
            with use_span(span(1)):
                client.log_action(episode, OBS, 1, action_prob=0.5)
            client.log_returns(episode, 1.0, info={"user": "u"})
            with use_span(span(2)):
                client.get_action(episode, OBS)
            client.log_action(episode, OBS, 0)
            client.end_episode(episode)
            with use_span(span(3)):
                client.log_step(OBS, 1, 1.0, info={"n": 1})
        process.settle(4)
    with ShardReader(tmp_path, columns=("infos",)) as reader:
        infos = [one for batch in reader for one in batch["infos"].tolist()]
    trace = "00-00000000000000000000000000000abc-000000000000000"
    assert [json.loads(one) if one else None for one in infos] == [
        {"traceparent": f"{trace}1-01", "user": "u"},
        {"traceparent": f"{trace}2-01"},
        None,
        {"traceparent": f"{trace}3-01", "n": 1},
    ]


def test_a_client_that_traces_names_the_extra_that_it_needs() -> None:
    code = (
        "import sys; sys.modules['opentelemetry'] = None\n"
        "from headrace import PolicyClient\n"
        "PolicyClient('http://127.0.0.1:1').close()\n"
        "PolicyClient('http://127.0.0.1:1', trace=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "install headrace[otel]" in done.stderr
