"""Values that the collector would refuse raise in the call, and the episode is unchanged.

Also of `ingest.delivery.events`.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pytest

from ingest.client.policy_client import PolicyClient
from tests.ingest.scripted_collector import ScriptedCollector

OBS = [0.5, -1.0]
Call = Callable[[PolicyClient, str], Any]

TIMES = [1.5, "x", datetime(2026, 1, 1, tzinfo=UTC), 2**62 + 1, True]
REFUSED: list[tuple[str, Call]] = [
    *(("ts", lambda c, e, ts=ts: c.log_action(e, OBS, 1, ts=ts)) for ts in TIMES),
    ("ts", lambda c, e: c.start_episode(ts="x")),
    ("ts", lambda c, e: c.log_step(OBS, 1, 1.0, ts=0.5)),
    ("ts", lambda c, e: c.log_returns(e, 1.0, ts=1.5)),
    ("ts", lambda c, e: c.log_returns(e, 1.0, step=0, ts=1.5)),
    ("ts", lambda c, e: c.end_episode(e, ts=1.5)),
    ("policy_version", lambda c, e: c.log_action(e, OBS, 1, policy_version=-5)),
    ("policy_version", lambda c, e: c.log_action(e, OBS, 1, policy_version=2**70)),
    ("policy_version", lambda c, e: c.log_action(e, OBS, 1, policy_version=0.5)),
    ("action_logp", lambda c, e: c.log_action(e, OBS, 1, action_logp=5)),
    ("action_logp", lambda c, e: c.log_step(OBS, 1, 1.0, action_logp=5)),
    ("step", lambda c, e: c.log_returns(e, 1.0, step=0.5)),
    ("step", lambda c, e: c.log_returns(e, 1.0, step="0")),
    ("step", lambda c, e: c.log_returns(e, 1.0, step=-1)),
    ("step", lambda c, e: c.log_returns(e, 1.0, step=2**70)),
    ("step", lambda c, e: c.log_returns(e, 1.0, reward_id="a")),
    ("info", lambda c, e: c.log_returns(e, 1.0, {"a": float("nan")})),
    ("truncated", lambda c, e: c.end_episode(e, truncated="no")),
    ("terminated", lambda c, e: c.log_step(OBS, 1, 1.0, terminated="no")),
    ("training_enabled", lambda c, e: c.start_episode(training_enabled="no")),
    ("tags", lambda c, e: c.start_episode(tags={str(i): "x" for i in range(33)})),
    ("tags", lambda c, e: c.start_episode(tags={"a": "x" * 10_000_000})),
]


def test_a_value_that_no_collector_takes_raises_in_the_call() -> None:
    """The error names the argument, the expected and the given value, in a few lines at most."""
    with ScriptedCollector() as collector, PolicyClient(collector.address) as client:
        client.connect()
        episode = client.start_episode()
        client.log_action(episode, OBS, 1)
        for argument, call in REFUSED:
            with pytest.raises(ValueError, match=rf"\b{argument}\b.*expected") as caught:
                call(client, episode)
            assert len(str(caught.value)) < 400
        client.log_action(
            episode, OBS, 1, ts=np.int64(5), policy_version=np.int32(7), action_logp=0.0
        )
        client.end_episode(episode, truncated=np.True_)  # type: ignore[arg-type]
        client.flush(60)
        assert client.stats.refused == {}
        _, step, end = collector.episodes[episode].events
    assert (step.ts, step.policy_version, end.truncated) == (5, 7, True)
