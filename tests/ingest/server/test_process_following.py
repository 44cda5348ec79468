"""The watchers of tokens, versions and connections while a collector serves.

Also of `ingest.collector.flow_control_file`.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ingest.client.policy_client import PolicyClient
from ingest.server.process import keep_following
from policy.inference.spec import PolicySpec
from policy.inference.weight_store import WeightStore
from policy.networks.policy import Policy
from storage.declarations.held_policies import held_version, say_held
from storage.spaces.descriptors import parse_space
from tests.collector_process import CollectorProcess, declare
from tests.faults.loop.running_loop import wait_until


class Stumbling:
    """A follower that fails at its first look."""

    def __init__(self) -> None:
        self.looks = 0
        self.went_on = asyncio.Event()

    async def follow(self) -> None:
        self.looks += 1
        if self.looks == 1:
            raise RuntimeError("planted")
        self.went_on.set()
        await asyncio.Event().wait()


def test_an_error_that_nobody_foresaw_is_told_and_ends_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An unexpected error of a follower is logged, and the follower goes on. Otherwise a revoked
    token would be accepted from then on."""

    async def body() -> None:
        one = Stumbling()
        task = asyncio.create_task(keep_following(one, again=0.0))
        async with asyncio.timeout(60):
            await one.went_on.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert one.looks == 2

    asyncio.run(body())
    assert "Stumbling failed; it will be tried again" in caplog.text
    assert "planted" in caplog.text


@pytest.mark.parametrize(
    "spoil",
    [lambda root: shutil.rmtree(root / "flow"), lambda root: say_held(root, "default", 7)],
    ids=["removed", "put-back"],
)
def test_a_collector_says_again_which_version_it_holds(
    tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    """The trainer waits for the collector's file alone, so a file that is lost or restored is soon
    rewritten."""
    declare(tmp_path, steps_per_version=4, seal_seconds=3600.0, part_seconds=3600.0)
    spec = PolicySpec(parse_space("box:4"), parse_space("discrete:2"))
    store = WeightStore(tmp_path, "default")
    described = {"spec": spec.to_json(), "metrics": {}, "lineage": {}}
    store.publish(store.add_candidate(Policy(spec).get_weights(), **described))
    with CollectorProcess(tmp_path) as collector, PolicyClient(collector.address) as client:
        episode = client.start_episode()
        for _ in range(4):
            client.get_action(episode, np.zeros(4, np.float32))
        client.end_episode(episode)
        assert wait_until(lambda: held_version(tmp_path, "default") == 1)
        spoil(tmp_path)
        assert wait_until(lambda: held_version(tmp_path, "default") == 1)
