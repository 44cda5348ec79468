"""While `weights/` hangs, steps are logged, and the collector answers, starts and ends."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import urllib3
from urllib3.exceptions import HTTPError

from ingest.client.async_client import AsyncPolicyClient
from ingest.client.policy_client import PolicyClient
from ingest.collector.weights_thread import WeightsThread
from ingest.protocol.errors import Refusal
from policy.inference.spec import PolicySpec
from policy.inference.weight_store import WeightStore
from policy.networks.policy import Policy
from storage.spaces.descriptors import parse_space
from storage.weights.manifest import Live
from tests.collector_process import CollectorProcess, declare, shard_rows

SPEC = PolicySpec(parse_space("box:4"), parse_space("discrete:2"))
TRIES = 1500


def publish(root: Path, seed: int) -> Live:
    store = WeightStore(root, "default")
    weights = Policy(SPEC, seed=seed).get_weights()
    return store.publish(store.add_candidate(weights, spec=SPEC.to_json(), metrics={}, lineage={}))


def until(holds: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(TRIES):
        if holds():
            return
        pause.wait(0.02)
    raise AssertionError("it never held")


def log_steps(collector: CollectorProcess, count: int) -> None:
    with PolicyClient(collector.address) as client:
        episode = client.start_episode()
        for _ in range(count):
            client.log_action(episode, [0.0] * 4, 1)
        client.end_episode(episode)


def standing(collector: CollectorProcess) -> dict[str, Any]:
    found: dict[str, Any] = collector.get("/v1/spec")[1]["policies"]["default"]["weights"]
    return found


def test_a_fifo_as_the_live_pointer_stops_nothing(tmp_path: Path) -> None:
    """A running collector and one that starts both continue from the copy, and repair the
    pointer.
    """
    declare(tmp_path)
    publish(tmp_path, 1)
    path = tmp_path / "weights" / "default" / "live.json"

    def spoil() -> None:
        os.mkfifo(tmp_path / "fifo")
        os.replace(tmp_path / "fifo", path)

    with CollectorProcess(tmp_path) as collector:
        until(lambda: standing(collector)["served"] is not None)
        spoil()
        until(path.is_file)
        assert collector.get("/healthz")[0] == 200
        log_steps(collector, 5)
        assert standing(collector)["served"]["version"] == 1
        assert collector.stop() == 0
        spoil()
        collector.restart()
        log_steps(collector, 5)
        assert collector.get("/healthz")[0] == 200
        until(lambda: standing(collector)["served"] is not None)
        assert path.is_file()
        assert collector.stop() == 0
    assert len(shard_rows(tmp_path)) == 10


def test_long_polls_end_with_the_collector(tmp_path: Path) -> None:
    """A client that waits for a version is released, and later polls do not delay the end."""
    declare(tmp_path)
    publish(tmp_path, 1)
    log, over = tmp_path / "log", threading.Event()
    answered: list[int] = []

    def poll(address: str) -> None:
        with urllib3.PoolManager(retries=False) as pool, contextlib.suppress(HTTPError):
            known: dict[str, str] = {}
            while not over.is_set():
                url = f"{address}/v1/policies/default/weights"
                got = pool.request("GET", url, headers={"Prefer": "wait=25", **known})
                answered.append(got.status)
                known = {"If-None-Match": got.headers["ETag"]} if "ETag" in got.headers else {}

    with CollectorProcess(tmp_path, log=log) as collector:
        until(lambda: standing(collector)["served"] is not None)
        pollers = [threading.Thread(target=poll, args=[collector.address]) for _ in range(8)]
        for poller in pollers:
            poller.start()
        until(lambda: len(answered) >= 8)
        assert collector.stop() == 0
        over.set()
        for poller in pollers:
            poller.join()
    assert "Traceback" not in log.read_text()


def test_who_asks_after_the_end_of_the_thread_is_not_kept_waiting() -> None:
    async def scene() -> None:
        thread = WeightsThread(lambda: None, 0.01)
        thread.start()
        thread.stop()
        await thread.ended()
        with pytest.raises(Refusal, match="the collector is shutting down"):
            await thread.ask(int, 3600.0)

    asyncio.run(asyncio.wait_for(scene(), 60.0))


def test_jobs_without_end_keep_no_policy_from_being_followed() -> None:
    """The tick comes between jobs, even if another one waits each time."""

    async def scene() -> None:
        ticked = asyncio.Event()
        thread = WeightsThread(lambda: thread.tell(ticked.set), 0.01)

        def job() -> None:
            if not ticked.is_set():
                thread.submit(job)

        thread.start()
        thread.submit(job)
        await asyncio.wait_for(ticked.wait(), 60.0)
        thread.stop()
        await thread.ended()

    asyncio.run(scene())


@pytest.mark.parametrize("started", ["before", "during"])
def test_a_folder_that_hangs_stops_nothing(tmp_path: Path, started: str) -> None:
    """The thread for weights waits for a lock that is never released, as in a hung file system.

    Steps are acknowledged, `/healthz` and `/metrics` answer, SIGTERM ends with status 0.
    """
    declare(tmp_path)
    publish(tmp_path, 1)
    directory = tmp_path / "weights" / "default"
    program = ("-c", HANGING.format(root=str(tmp_path)))
    hang = directory / "hang"
    with (directory / "hold").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        if started == "during":
            hang.touch()
        with CollectorProcess(tmp_path, program=program) as collector:
            if started == "before":
                until(lambda: standing(collector)["served"] is not None)
                hang.touch()
                os.utime(directory / "live.json")
            until(lambda: metric(collector, "headrace_weights_look_seconds") > 1.0)
            log_steps(collector, 5)
            assert collector.get("/healthz")[0] == 200
            assert (standing(collector)["served"] is None) == (started == "during")
            assert collector.stop() == 0
    assert len(shard_rows(tmp_path)) == 5


def test_until_the_first_look_at_weights_requests_are_to_be_repeated(tmp_path: Path) -> None:
    """A collector that starts on a slow folder does not claim that nothing is published: it answers
    429, and a client's repeated request succeeds."""
    declare(tmp_path)
    publish(tmp_path, 1)
    directory = tmp_path / "weights" / "default"
    (directory / "hang").touch()
    program = ("-c", HANGING.format(root=str(tmp_path)))
    with (directory / "hold").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with CollectorProcess(tmp_path, program=program) as collector:
            collector.post("/v1/episodes", {"episode_id": "e"})
            ask = {"episode_id": "e", "obs": [0.0] * 4}
            answers = [
                collector.post("/v1/episodes/e/action", {"obs": ask["obs"]}),
                collector.get("/v1/policies/default/weights"),
            ]
            answers += [(429, collector.post("/v1/actions", {"actions": [ask]})[1]["actions"][0])]
            codes = [(status, answer["error"]["code"]) for status, answer in answers]
            assert codes == [(429, "busy")] * 3
            chosen = asyncio.run(
                act_meanwhile(collector.address, lambda: fcntl.flock(held, fcntl.LOCK_UN))
            )
            assert chosen in (0, 1)
            for mode in ("remote", "local"):
                with PolicyClient(collector.address, mode, timeout=60.0) as client:
                    assert client.get_action(client.start_episode(), ask["obs"]) in (0, 1)
            assert collector.stop() == 0


async def act_meanwhile(address: str, release: Callable[[], None]) -> Any:
    """An action that an AsyncPolicyClient asks for before the weights are released."""
    async with AsyncPolicyClient(address, "remote", timeout=60.0) as client:
        asked = asyncio.create_task(client.get_action(client.start_episode(), [0.0] * 4))
        await asyncio.wait([asked], timeout=2.0)  # the collector answers `busy` after 0.5 s
        assert not asked.done()
        release()
        return await asked


HANGING = """
import fcntl, os, sys
from pathlib import Path
from tests.plain_collector.command import run

folder = Path({root!r}) / "weights" / "default"

def hang(event, arguments):
    if event == "open" and str(arguments[0]).endswith("live.json") and (folder / "hang").exists():
        with open(folder / "hold", "a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)

sys.addaudithook(hang)
sys.exit(run(sys.argv[1:]))
"""


def metric(collector: CollectorProcess, name: str) -> float:
    text = collector._pool.request("GET", collector.address + "/metrics").data.decode()
    (line,) = [one for one in text.splitlines() if one.startswith(name + " ")]
    return float(line.split()[1])
