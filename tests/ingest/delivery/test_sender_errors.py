"""The sending thread survives any error: no error of its own stops delivery or loses events.

Also of `ingest.delivery.results`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import pytest

from ingest.client.policy_client import PolicyClient
from ingest.delivery.declarations import Draft
from ingest.protocol.errors import CollectorUnavailable, Refusal
from ingest.protocol.messages import Event
from tests.ingest.scripted_collector import Gate, ScriptedCollector, answering, pass_by

SHORT = [0.5, -1.0]


@pytest.fixture
def collector() -> Iterator[ScriptedCollector]:
    with ScriptedCollector() as running:
        yield running


class Broken:
    """A planted bug in the handling of answers: it raises for batches with events of the episode
    `bad` (None: for any request), as long as errors are left."""

    def __init__(self, client: PolicyClient, errors: list[BaseException], bad: str | None) -> None:
        self.errors, self.bad = errors, bad
        self._release = client._sender.results.release
        client._sender.results.release = self.release  # type: ignore[method-assign]  # the planted bug

    def release(self, durable: Sequence[Event]) -> None:
        hits = self.bad is None or any(event.episode_id == self.bad for event in durable)
        if hits and self.errors:
            raise self.errors.pop()
        self._release(durable)


@pytest.mark.parametrize("error", [KeyError("planted"), MemoryError(), OSError("planted")])
def test_an_unexpected_error_passes(
    collector: ScriptedCollector, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    """The error is counted, logged once, and all events are sent again when it is over, even if it
    hits every request. None is refused."""
    with caplog.at_level(logging.WARNING), PolicyClient(collector.address) as client:
        broken = Broken(client, [error] * 12, None)
        for number in range(3):
            client.log_step(SHORT, 1, 1.0, episode_id=f"e{number}")
        client.flush(60)
        assert not broken.errors
        assert client.stats.errors >= 3
        assert (client.stats.waiting, client.stats.acknowledged) == (0, 9)
        assert client.stats.refused == {}
    assert all(record.rewards == [1.0] for record in collector.episodes.values())
    assert [record.exc_info is not None for record in caplog.records] == [True, False]
    assert "sending 9 events again" in caplog.messages[0]
    assert "sending resumed after" in caplog.messages[1]


@pytest.mark.parametrize("others", [0, 5])
def test_an_event_that_causes_an_error_does_not_block_the_others(
    collector: ScriptedCollector, others: int
) -> None:
    """The events of its episode are counted as refused and reported; the others arrive."""
    refusals: list[Refusal] = []
    with PolicyClient(collector.address, on_error=refusals.append) as client:
        client.connect()
        Broken(client, [KeyError("planted")] * 1000, "bad")
        for number in range(others):
            client.log_step(SHORT, 1, 1.0, episode_id=f"before{number}")
        client.start_episode("bad")
        client.log_action("bad", SHORT, 1)
        for number in range(others):
            client.log_step(SHORT, 1, 1.0, episode_id=f"behind{number}")
        with pytest.raises(Refusal, match=r"cannot be sent: KeyError\('planted'\)"):
            client.flush(60)
        assert client.stats.refused == {"client_error": 2}
        assert [refusal.episode_id for refusal in refusals] == ["bad", "bad"]
        with pytest.raises(Refusal, match="cannot be sent"):
            client.log_action("bad", SHORT, 1)
        client.log_step(SHORT, 1, 1.0, episode_id="last")
        client.flush(60)
        assert client.stats.waiting == 0
    ended = {name for name, record in collector.episodes.items() if record.ended}
    assert ended == {*(f"{w}{n}" for w in ("before", "behind") for n in range(others)), "last"}


def test_a_value_that_cannot_be_encoded_later_breaks_its_episode_alone(
    collector: ScriptedCollector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sending thread encodes values while the declaration is not known."""
    encode = Draft.encode

    def planted(draft: Draft, where: str) -> bytes:
        if where == "bad":
            raise KeyError("planted")
        return encode(draft, where)

    monkeypatch.setattr(Draft, "encode", planted)
    gate = Gate()
    collector.chance = lambda: gate
    with PolicyClient(collector.address) as client:
        for name in ("good", "bad", "late"):
            client.log_step(SHORT, 1, 1.0, episode_id=name)
        gate.opened.set()
        with pytest.raises(Refusal, match="planted"):
            client.flush(60)
        assert client.stats.refused == {"invalid": 1, "broken": 1}
    assert collector.episodes["good"].ended
    assert collector.episodes["late"].ended


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_was_ended_starts_again(collector: ScriptedCollector) -> None:
    """A callback that raises SystemExit ends the thread; its successor sends what was in flight."""
    with PolicyClient(collector.address) as client:
        client.connect()
        thread = client._sender._thread
        assert thread is not None
        Broken(client, [SystemExit()], None)
        client.log_step(SHORT, 1, 1.0, episode_id="e")
        thread.join(60)
        client.flush(60)
        assert client.stats.waiting == 0
    assert collector.episodes["e"].rewards == [1.0]


def test_a_pause_that_is_longer_than_the_wait_is_told(collector: ScriptedCollector) -> None:
    """connect does not wait for a request that comes too late; it says when that is."""
    busy = answering(503, "busy", **{"Retry-After": "50"})
    collector.chance = lambda: busy
    with PolicyClient(collector.address) as client:
        with pytest.raises(CollectorUnavailable, match=r"busy; the next request is in 50 s$"):
            client.connect(20)
        collector.chance = lambda: pass_by
        client._sender.transport.closing.set()


def test_a_flush_by_id_raises_what_was_refused_of_that_episode_alone(
    collector: ScriptedCollector,
) -> None:
    """Handlers that share a client each get the refusals of their own events once, in any order of
    flushing. A flush that times out reports nothing, and leaves the refusals for the next one."""
    collector.judge = lambda event: "invalid" if event.episode_id.startswith("bad") else None
    with PolicyClient(collector.address) as client:
        client.connect()
        for name in ("bad", "fine", "bad-too"):
            client.log_step(SHORT, 1, 1.0, episode_id=name)
        client.flush(60, episode_id="fine")
        with pytest.raises(Refusal, match="3 events were refused") as caught:
            client.flush(60, episode_id="bad")
        assert caught.value.episode_id == "bad"
        client.flush(60, episode_id="bad")
        gate = Gate()
        collector.faults.append(gate)
        client.log_step(SHORT, 1, 1.0, episode_id="fine-too")
        assert gate.reached.wait(60)
        with pytest.raises(TimeoutError):
            client.flush(0)
        gate.opened.set()
        with pytest.raises(Refusal) as caught:
            client.flush(60)
        assert caught.value.episode_id == "bad-too"
        client.flush(60)
