"""Calls from a signal handler or a finalizer that interrupts another call.

None waits for a lock held by its own thread, and no event is lost.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dis import opname
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from ingest.client.policy_client import PolicyClient
from ingest.delivery import dropped, outbox, shared_spool
from ingest.protocol.errors import ClientError, Refusal
from tests.ingest.scripted_collector import ScriptedCollector

OBS = [0.5, -1.0]
PLACES = ("CALL", "RESUME", "JUMP_BACKWARD")
SECTIONS = tuple(one.__file__ for one in (dropped, outbox, shared_spool))


@pytest.fixture
def collector() -> Iterator[ScriptedCollector]:
    with ScriptedCollector() as running:
        yield running


class Interruption:
    """Sends this process a signal at the `point`-th place, with the queue's lock held, at which
    Python may run its handler. `came` says whether it was sent.

    Such places are the return from a call, the entry of a function and the backward jump of a loop.
    """

    def __init__(self, client: PolicyClient, point: int, handler: Callable[[], None]) -> None:
        self.came = False
        self._lock, self._left, self._handler = client._outbox.lock, point, handler

    def _run(self) -> None:
        signal.raise_signal(signal.SIGUSR1)

    def __enter__(self) -> Interruption:
        self._before = signal.signal(signal.SIGUSR1, lambda *_: self._handler())
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        signal.signal(signal.SIGUSR1, self._before)

    def _trace(self, frame: FrameType, kind: str, _: Any) -> Any:
        if frame.f_code.co_filename not in SECTIONS:
            return None
        frame.f_trace_opcodes = True
        code, before = frame.f_code.co_code, ""

        def trace(frame: FrameType, kind: str, _: Any) -> Any:
            nonlocal before
            if kind == "opcode":
                if before.startswith(PLACES) and self._lock._is_owned() and not self.came:
                    self._left -= 1
                    if not self._left:
                        self.came = True
                        self._run()
                before = opname[code[frame.f_lasti]]
            return trace

        return trace


class Finalizer(Interruption):
    """The same in the client's sending thread, which starts within the block: a finalizer, which
    the garbage collector runs there."""

    def _run(self) -> None:
        self._handler()

    def __enter__(self) -> Interruption:
        threading.settrace(self._trace_sender)
        return self

    def __exit__(self, *_: object) -> None:
        threading.settrace(None)  # type: ignore[arg-type]  # as documented
        self._left = -1  # the thread goes on

    def _trace_sender(self, frame: FrameType, kind: str, value: Any) -> Any:
        is_sender = threading.current_thread().name == "headrace-sender"
        return self._trace(frame, kind, value) if is_sender else None


def nothing_waits(client: PolicyClient) -> bool:
    """Whether the queue is empty by its own counts."""
    box = client._outbox
    return (client.stats.waiting, box.pending, box.nbytes) == (0, 0, 0)


def log(client: PolicyClient, name: str) -> None:
    """Make every kind of call: two steps with a reward of 3 each, and a one-step episode."""
    client.start_episode(name)
    for _ in range(2):
        client.log_action(name, OBS, 1)
        client.log_returns(name, 1.0)
        client.log_returns(name, 2.0, {"more": 1})
    client.end_episode(name, OBS)
    client.log_step(OBS, 1, 3.0, episode_id=f"{name}-step")


@pytest.mark.parametrize("flushes", [False, True])
@pytest.mark.parametrize("on_full", ["raise", "drop", "spool"])
def test_a_signal_handler_may_log_and_flush_at_any_point_of_a_call(
    collector: ScriptedCollector, tmp_path: Path, on_full: Any, flushes: bool
) -> None:
    """The events of both calls arrive once, as logged, whichever line is interrupted."""
    folder = tmp_path if on_full == "spool" else None
    with PolicyClient(collector.address, on_full=on_full, spool_dir=folder, timeout=60) as client:
        client.connect()
        for point in count(1):

            def handle(point: int = point) -> None:
                log(client, f"in-{point}")
                if flushes:
                    client.flush(60)

            with Interruption(client, point, handle) as interruption:
                log(client, f"out-{point}")
            if not interruption.came:
                break
        client.flush(60)
        assert client.stats.refused == {}
        assert nothing_waits(client)
    assert point > 50
    names = {f"out-{n}" for n in range(1, point + 1)} | {f"in-{n}" for n in range(1, point)}
    assert set(collector.episodes) == names | {f"{name}-step" for name in names}
    assert all(record.ended for record in collector.episodes.values())
    assert all(collector.episodes[name].rewards == [3.0, 3.0] for name in names)


def test_a_signal_handler_may_close_the_client_at_any_point_of_a_call(
    collector: ScriptedCollector,
) -> None:
    """The interrupted call raises, or its event arrives."""
    for point in count(1):
        client = PolicyClient(collector.address, timeout=60)
        client.connect()
        client.start_episode(f"e-{point}")
        done = 1  # calls whose events are queued

        with Interruption(client, point, client.close) as interruption:
            try:
                client.log_action(f"e-{point}", OBS, 1)
                done = 2
                client.log_step(OBS, 1, 3.0, episode_id=f"step-{point}")
                done = 3
            except ClientError as error:
                assert "the client is closed" in str(error)  # noqa: PT017 - it may not come
        client.close()
        assert client.stats.waiting == 0
        assert len(collector.episodes[f"e-{point}"].events) == (done > 1)
        assert (f"step-{point}" in collector.episodes) == (done == 3)
        if not interruption.came:
            break
    assert point > 20


@pytest.mark.parametrize("forgets", [False, True])
def test_a_finalizer_may_log_at_any_point_of_the_sending_thread(
    collector: ScriptedCollector, forgets: bool
) -> None:
    """All events arrive once and leave the counts, also if the collector forgets the instance."""
    for point in count(1):
        with PolicyClient(collector.address, timeout=60, linger=0.0) as client:

            def handle(client: PolicyClient = client, point: int = point) -> None:
                log(client, f"in-{point}")

            with Finalizer(client, point, handle) as finalizer:
                client.connect()
                if forgets:
                    log(client, f"early-{point}")
                    client.flush(60)
                    collector.instances.clear()
                log(client, f"out-{point}")
                client.flush(60)
            client.flush(60)
            assert client.stats.refused == {}
            assert nothing_waits(client)
        if not finalizer.came:
            break
    assert point > 50
    names = {f"out-{n}" for n in range(1, point + 1)} | {f"in-{n}" for n in range(1, point)}
    names |= {f"early-{n}" for n in range(1, point + 1)} if forgets else set()
    assert set(collector.episodes) == names | {f"{name}-step" for name in names}
    assert all(record.ended for record in collector.episodes.values())
    assert all(collector.episodes[name].rewards == [3.0, 3.0] for name in names)


def test_a_flush_that_interrupts_a_get_action_gives_up_at_once(
    collector: ScriptedCollector,
) -> None:
    """There nothing can be delivered: a flush without a limit raises instead of spinning."""
    client = PolicyClient(collector.address, "remote", timeout=60)
    client.connect()
    name = client.start_episode()
    fits = client._outbox._fits_request
    errors: list[str] = []

    def interrupted(places: Any) -> bool:  # in the section that no other call may enter
        if not errors:
            client.log_step(OBS, 1, 3.0, episode_id="in")
            with pytest.raises(TimeoutError) as caught:
                client.flush(None)
            errors.append(str(caught.value))
        return fits(places)

    client._outbox._fits_request = interrupted  # type: ignore[method-assign]
    client.get_action(name, OBS)
    assert "still wait for" in errors[0]
    client.close()
    assert collector.episodes["in"].ended


@pytest.mark.parametrize("spools", [False, True])
def test_a_fork_does_not_open_a_closed_client(
    collector: ScriptedCollector, tmp_path: Path, spools: bool
) -> None:
    options: Any = {"on_full": "spool", "spool_dir": tmp_path} if spools else {}
    client = PolicyClient(collector.address, **options)
    client.log_step(OBS, 1, 3.0)
    client.close()
    child = os.fork()
    if not child:
        try:
            client.log_step(OBS, 1, 3.0, episode_id="child")
        except ClientError as error:
            os._exit(7 if "closed" in str(error) else 1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_a_finalizer_in_the_sending_thread_may_log_and_waits_for_nothing(
    collector: ScriptedCollector,
) -> None:
    """What a finalizer logs in the sending thread arrives. There `flush` raises, since it would
    wait for itself; `close` lets the thread deliver the queue and end."""
    called: list[str] = []

    def collected(client: PolicyClient) -> None:
        log(client, "in")
        for call in (client.flush, client.connect, lambda: client.get_action("open", OBS)):
            try:
                call()
            except ClientError as error:
                called.append(str(error))
        client.close()

    client = PolicyClient(collector.address, "remote", timeout=60)
    client.connect()
    client.start_episode("out")
    client.start_episode("open")
    client.flush(60)
    inner = client._outbox._cut

    def cut() -> Any:  # the garbage collector may run it there, with the lock held
        if not called:
            collected(client)
        return inner()

    client._outbox._cut = cut  # type: ignore[method-assign]  # where a finalizer may run
    thread = client._sender._thread
    assert thread is not None
    client.end_episode("out", OBS)
    thread.join(60)
    assert not thread.is_alive()
    assert {n for n, record in collector.episodes.items() if record.ended} == {
        "in",
        "in-step",
        "out",
    }
    assert "another thread" in called[0]
    assert len(called) == 2  # the connection was made
    with pytest.raises(ClientError, match="closed"):
        client.start_episode()


def test_on_error_may_close_the_client_and_must_not_flush(collector: ScriptedCollector) -> None:
    """`on_error` runs in the sending thread; the other events are delivered all the same."""
    errors: list[Exception] = []

    def on_error(refusal: Refusal) -> None:
        with pytest.raises(ClientError, match="another thread") as caught:
            client.flush()
        errors.append(caught.value)
        client.close()

    client = PolicyClient(collector.address, on_error=on_error, timeout=60)
    client.connect()
    thread = client._sender._thread
    assert thread is not None
    gone = threading.Event()
    collector.judge = lambda event: "invalid" if event.episode_id == "bad" else None
    for name in ("bad", *(f"fine-{n}" for n in range(5))):
        try:
            client.log_step(OBS, 1, 3.0, episode_id=name)
        except ClientError:  # closed in the meantime
            gone.set()
            break
    thread.join(60)
    assert not thread.is_alive()
    assert errors
    assert client.stats.waiting == 0
    assert gone.is_set() or len(collector.episodes) == 5
