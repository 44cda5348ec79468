"""The process returns the memory of many bodies, episodes or parts."""

from __future__ import annotations

import json
import re
import threading
from collections import Counter
from pathlib import Path

import pytest
import urllib3
from hypothesis import example, given
from hypothesis import strategies as st

from ingest.server.memory import MUCH, SPARE, WRITER, Ebb, shortages
from ingest.web.limits import ServerLimits
from storage.system.memory import MemoryCap
from tests.collector_process import CollectorProcess, declare
from tests.ingest.web.test_limits import wait_until

EPISODES, STEPS = 60, 4


@pytest.mark.parametrize(
    ("looks", "expected"),
    [
        ([(MUCH - 1, 0), (0, 0)], [False, False]),  # little
        ([(3 * MUCH, 2 * MUCH), (2 * MUCH, 2 * MUCH)], [False, False]),  # most of it is there
        ([(3 * MUCH, MUCH), (MUCH, MUCH), (MUCH, 0), (0, 0)], [True, False, True, False]),
        ([(0, MUCH), (MUCH, 0)], [False, True]),  # it fell later
    ],
)
def test_it_is_told_once_that_much_is_gone(
    looks: list[tuple[int, int]], expected: list[bool]
) -> None:
    ebb = Ebb()
    assert [ebb.fell(*look) for look in looks] == expected


def test_episodes_that_are_sealed_leave_no_memory_behind(tmp_path: Path) -> None:
    """Blocks of 80 kB, with small long-lived ones between them."""
    declare(tmp_path, observation="box:20000")
    with CollectorProcess(tmp_path, env={}) as collector:
        before = _resident(collector)
        obs = [0.5] * 20_000
        for step in range(STEPS):
            for number in range(EPISODES):
                name = f"e{number}"
                if not step:
                    collector.post("/v1/episodes", {"episode_id": name})
                    collector.post("/v1/episodes", {"episode_id": f"stays{number}"})
                collector.post(f"/v1/episodes/{name}/log_action", {"obs": obs, "action": 0})
        assert _resident(collector) - before > 15
        for number in range(EPISODES):
            collector.post(f"/v1/episodes/e{number}/end", {})
        wait_until(lambda: collector.get("/readyz")[1]["steps_in_shards"] == EPISODES * STEPS)
        wait_until(lambda: _resident(collector) - before < 12)


def _resident(collector: CollectorProcess) -> float:
    """Resident memory in MB."""
    text = Path(f"/proc/{collector.process.pid}/status").read_text()
    return int(text.partition("VmRSS:")[2].split()[0]) / 1_000


MB = 1_000_000


def words_in(text: str) -> list[str]:
    return re.findall(r"--limit ([a-z_]+=[0-9]+)", text)


@given(st.integers(MB, 4_000 * MB), st.integers(60 * MB, 500 * MB))
@example(size=22_105_264, used=60 * MB)  # where both limits round to the same
def test_proposed_limits_fit(size: int, used: int) -> None:
    """They take no more memory than there is, and are proposed only if the given ones take more.

    A message of the largest size finds room among the bodies, and one that the proposed limits
    refuse for its size is one that could not be kept.
    """
    cap = MemoryCap("RLIMIT_AS", used + size, used)
    (text,) = list(shortages(ServerLimits(), [cap])) or [""]
    limits, room = ServerLimits.of(words_in(text)), size - SPARE
    assert bool(text) == (ServerLimits().memory > room)
    if room > MB:
        assert limits.memory <= room
        assert not list(shortages(limits, [cap]))
        assert limits.max_message * 8 // 7 <= limits.max_bodies
        assert limits.max_bulk * 8 // 7 <= limits.max_bodies
    if room > 200 * MB:
        assert limits.max_message == ServerLimits().max_message
        assert limits.max_open > room / 8


def test_the_tightest_cap_counts() -> None:
    """A control group has the shard writer in it too; without a cap nothing is said."""
    assert not list(shortages(ServerLimits(), []))
    space, group = MemoryCap("RLIMIT_AS", 3_000 * MB, 0), MemoryCap("cgroup", 3_000 * MB, 0)
    assert not list(shortages(ServerLimits(), [space]))
    assert list(shortages(ServerLimits(max_open=1_100 * MB), [space, group])) == []
    (text,) = shortages(ServerLimits(max_open=1_500 * MB), [space, group])
    assert f"but cgroup (3,000 MB) leaves {(3_000 * MB - SPARE - WRITER) // MB:,} MB" in text


CAPPED = """
import os, resource, sys
os.environ["OPENBLAS_NUM_THREADS"] = "1"  # each takes address space, on every machine another sum
from tests.plain_collector.command import run
resource.setrlimit(resource.RLIMIT_AS, ({cap}, {cap}))
sys.exit(run(sys.argv[1:]))
"""
KINDS = ("text", "numbers", "objects", "events")
THREADS = 24
JSON = {"content-type": "application/json"}


def body(kind: str, size: int) -> bytes:
    """A batch of about `size` bytes that starts the episode NAME."""
    objects = [{"a": 1}] * min(size // 10, 200_000)  # more than `max_values` would get 413
    found = {"text": "a" * size, "numbers": [1] * (size // 3), "objects": objects}
    rest = 1 if kind != "events" else size // 1_000
    info = {"x": found.get(kind, "b" * 900)}
    event = {"type": "log_action", "episode_id": "NAME", "obs": [0.0] * 4, "action": 1}
    events = [{"type": "start", "episode_id": "NAME"}, *[{**event, "info": info}] * rest]
    return json.dumps({"events": events}).encode()


@pytest.mark.parametrize(
    ("cap", "rounds"),
    [(500, 2), pytest.param(700, 20, marks=pytest.mark.long)],
    ids=["short", "long"],
)
def test_proposed_limits_hold_under_long_bodies(tmp_path: Path, cap: int, rounds: int) -> None:
    """Under an RLIMIT_AS of `cap` MB the collector says at its start that its limits are too high.
    With those that it proposes it says nothing, and 24 threads with bodies of 1 to 7 MB get 200,
    429, 503 or 507. Then it works as before.
    """
    declare(tmp_path)
    log, program = tmp_path / "log", ("-c", CAPPED.format(cap=cap * MB))
    with CollectorProcess(tmp_path, program=program, log=log):
        wait_until(lambda: f"but RLIMIT_AS ({cap} MB) leaves" in log.read_text())
    left = int(log.read_text().partition("leaves ")[2].partition(" MB")[0])
    assert cap - left < 350  # what a start takes: the threads share the allocator's arenas
    limits = words_in(log.read_text())
    assert {"max_bodies", "max_open"} <= {word.partition("=")[0] for word in limits}
    options = [word for limit in limits for word in ("--limit", limit)]
    log.unlink()
    bodies = [body(kind, size * MB) for size in (1, 3, 5, 7) for kind in KINDS]
    statuses: Counter[int] = Counter()
    with CollectorProcess(tmp_path, program=program, log=log, options=options) as collector:
        url = f"{collector.address}/v1/events"

        def send(number: int) -> None:
            with urllib3.PoolManager(retries=False, timeout=60.0) as pool:
                for turn in range(rounds):
                    chosen = bodies[(number * 5 + turn * 3) % len(bodies)]
                    data = chosen.replace(b"NAME", b"e%d-%d" % (number, turn))
                    statuses[pool.request("POST", url, body=data, headers=JSON).status] += 1

        threads = [threading.Thread(target=send, args=[number]) for number in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert statuses.total() == THREADS * rounds
        assert set(statuses) <= {200, 429, 503, 507}
        assert statuses[200] > 0
        assert collector.process.poll() is None
        assert collector.get("/healthz")[0] == 200
        assert "leaves" not in log.read_text()
