"""The assembler as a table and as properties: replay, retries, interleaving, conservation."""

from __future__ import annotations

import copy
import itertools
import math
from array import array
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingest.collector.recovery import policies_state, recover
from ingest.episodes.assembler import EpisodeAssembler
from ingest.episodes.client_instances import MOST_NAMED_RANGES, MOST_RANGES
from ingest.episodes.event_checks import CheckedValues
from ingest.episodes.journal_events import JournalEvent, encode_event, encode_row
from ingest.episodes.judge import Judge
from ingest.episodes.open_episode import Carry
from ingest.episodes.sealed_parts import Limits
from ingest.protocol import messages as wire
from ingest.protocol.agent_names import Name, name_of
from ingest.protocol.errors import Refusal
from storage.declarations.declaration import PolicyDeclaration
from storage.experience.episode import DEFAULT_AGENT, Part
from storage.experience.range_set import RangeSet
from storage.journal.memory_journal import MemoryJournal
from storage.spaces.descriptors import parse_space

STEPS = PolicyDeclaration(
    observation=parse_space("box:2"), action=parse_space("discrete:3"), part_steps=3
)
TEXTS = PolicyDeclaration(
    policy_id="texts",
    observation=parse_space("text:8"),
    action=parse_space("discrete:2"),
    part_steps=2,
)
RECEIVED = 1_700_000_000_000_000
POLICIES = {"default": STEPS, "texts": TEXTS}


class Shell:
    """The collector's part around an assembler: rows, cuts for size, the clock."""

    def __init__(
        self, policies: dict[str, PolicyDeclaration] = POLICIES, limits: Limits | None = None
    ) -> None:
        self.policies, self.limits = policies, limits
        self.assembler = EpisodeAssembler(policies, limits=limits)
        self.journal = MemoryJournal()
        self.now = 0.0
        self.instance = self.register()

    def register(self) -> str:
        opened = self.assembler.open_instance("token", None)
        self._commit([opened])
        return opened.instance

    def send(self, *events: wire.Event, instance: str | None = None) -> list[Any]:
        """Send one request; return "accepted", "retry" or the refusal's code for each event."""
        row = self.journal.last_row + 1
        encoded: list[bytes] = []
        answers: list[Any] = []
        for event in events:
            try:
                judged = self.judge(event, instance=instance)
            except Refusal as refusal:
                answers.append(refusal.code)
                continue
            answers.append("retry" if judged is None else "accepted")
            if judged is not None:
                self._apply(judged[0], row, encoded)
        self._append(row, encoded)
        return answers

    def judge(
        self, event: wire.Event, values: CheckedValues | None = None, *, instance: str | None = None
    ) -> tuple[JournalEvent, bytes] | None:
        sender = instance or self.instance
        return Judge(self.assembler).judge(sender, event, values, now=self.now)

    def tick(self, now: float) -> None:
        self.now = now
        self._commit(self.assembler.tick(now))

    def restart(self) -> None:
        """Forget everything but the journal, and read it back."""
        found = recover(self.journal.crash(), self.policies, self.limits, self.now)
        self.assembler, self.assembler.sealed = found.assembler, found.waiting
        self._check_bytes()

    def _commit(self, events: Iterable[JournalEvent]) -> None:
        row = self.journal.last_row + 1
        encoded: list[bytes] = []
        for event in events:
            self._apply(event, row, encoded)
        self._append(row, encoded)

    def _apply(self, event: JournalEvent, row: int, encoded: list[bytes]) -> None:
        blob = encode_event(event)
        self.assembler.apply(event, blob, row=row, received=RECEIVED, now=self.now)
        self._check_bytes()
        encoded.append(blob)
        cut = self.assembler.cut_for_size(getattr(event, "key", -1), self.now)
        if cut is not None:
            self._apply(cut, row, encoded)

    def _check_bytes(self) -> None:
        """The memory of open episodes, and the steps that await rewards, are counted correctly
        after every event and every start."""
        known = [*self.assembler.episodes.values(), *self.assembler.closing.values()]
        assert self.assembler.open_bytes == sum(episode.held for episode in known)
        waiting = sum(episode.steps for episode in self.assembler.closing.values())
        assert self.assembler.steps_awaiting_rewards == waiting

    def _append(self, row: int, encoded: list[bytes]) -> None:
        if encoded:
            blob = encode_row(RECEIVED, self.assembler.steps, encoded, self.now)
            self.journal.commit([(row, blob)])

    def parts(self, name: Name) -> list[Part]:
        parts = [x.part for x in self.assembler.sealed if x.part is not None]
        wanted = (name, DEFAULT_AGENT) if isinstance(name, str) else name
        return [part for part in parts if (part.episode_id, part.agent_id) == wanted]


class WatchedShell(Shell):
    """A shell that compares the state around each judgement: slow with much state."""

    def judge(self, *given: Any, **options: Any) -> tuple[JournalEvent, bytes] | None:
        """A judgement, whatever its result, does not change the state."""
        before = copy.deepcopy(picture(self.assembler))
        try:
            return super().judge(*given, **options)
        finally:
            assert picture(self.assembler) == before


def picture(assembler: EpisodeAssembler) -> dict[str, Any]:
    """All of an assembler's state but the clock."""
    open_episodes = {
        name: {
            slot: _plain(getattr(episode, slot))
            for slot in episode.__slots__
            if slot not in ("seen", "part_since", "rules", "whole")
        }
        for name, episode in assembler.episodes.items()
    }
    return {
        "open": open_episodes,
        "wholes": assembler.wholes,
        "finished": list(assembler.finished.values()),
        "instances": [(name, assembler.instances.get(name)) for name in assembler.instances],
        "needed": assembler.needed,
        "sealed": assembler.sealed,
        "next_key": assembler.next_key,
        "steps": assembler.steps,
    }


def _plain(value: Any) -> Any:
    """Arrays as bytes: an unknown logp is NaN, which equals nothing."""
    return value.tobytes() if isinstance(value, array) else value


# --- scripts: what a client may do ------------------------------------------------------------

floats = st.floats(-100, 100, width=32)
steps = st.lists(
    st.tuples(floats, st.integers(0, 1), st.lists(floats, max_size=2)), min_size=0, max_size=8
)
endings = st.sampled_from(["open", "terminated", "truncated", "final"])


def script(
    name: str,
    start: int,
    policy: str,
    taken: list[Any],
    ending: str,
    agent: str | None = None,
    agents: int | None = None,
) -> list[wire.Event]:
    """The events of an episode or a track, numbered as by a client."""
    texts = policy == "texts"
    events: list[wire.Event] = [
        wire.Start(episode_id=name, start=start, policy_id=policy, agent_id=agent)
    ]
    for reward, action, later in taken:
        obs: Any = "x" * (len(events) % 5) if texts else [reward, float(len(events))]
        events.append(
            wire.LogAction(
                episode_id=name,
                seq=len(events),
                obs=obs,
                action=action,
                reward=reward,
                ts=7,
                agent_id=agent,
                env_t=None if agent is None else 3 * len(events),
            )
        )
        for amount in later:
            info = {"n": len(events)} if amount > 0 else None
            events.append(
                wire.LogReturns(
                    episode_id=name, seq=len(events), reward=amount, info=info, agent_id=agent
                )
            )
    if ending != "open":
        obs = None if ending != "final" else ("end" if texts else [0.0, 0.0])
        events.append(
            wire.End(
                episode_id=name,
                seq=len(events),
                obs=obs,
                truncated=ending == "truncated",
                agent_id=agent,
                agents=agents,
            )
        )
    return events


SHARED = ("shared", "other")  # episodes of several agents; one of these is called agent0


def scripts_of(drawn: list[tuple[str, list[Any], str, str | None]]) -> list[list[wire.Event]]:
    """Episodes of one agent, and tracks of episodes with several."""
    made = []
    for i, (policy, taken, ending, shared) in enumerate(drawn):
        if shared is None:
            made.append(script(f"e{i}", i, policy, taken, ending))
        else:
            agents = sum(other[3] == shared for other in drawn)
            made.append(script(shared, i, policy, taken, ending, f"agent{i}", agents))
    return made


episodes = st.lists(
    st.tuples(
        st.sampled_from(["default", "texts"]), steps, endings, st.sampled_from([None, *SHARED])
    ),
    min_size=1,
    max_size=4,
).map(scripts_of)


@st.composite
def interleaved(draw: st.DrawFn, scripts: Sequence[list[wire.Event]]) -> list[wire.Event]:
    """The scripts interleaved, each in its own order."""
    order = draw(st.permutations([i for i, events in enumerate(scripts) for _ in events]))
    queues = [iter(events) for events in scripts]
    return [next(queues[i]) for i in order]


@st.composite
def requests(draw: st.DrawFn, events: Sequence[wire.Event]) -> list[list[wire.Event]]:
    """The events cut into batches."""
    batches, rest = [], list(events)
    while rest:
        size = draw(st.integers(1, 6))
        batches.append(rest[:size])
        rest = rest[size:]
    return batches


# --- properties -------------------------------------------------------------------------------


@given(st.data())
def test_replaying_the_rows_is_the_same_history(data: st.DataObject) -> None:
    """Rows through encode_row, a journal and recover give the live state and parts."""
    shell = Shell()
    events = data.draw(episodes.flatmap(interleaved))
    for batch in data.draw(requests(events)):
        shell.send(*batch)
        if data.draw(st.integers(0, 4)) == 0:
            shell.tick(shell.now + data.draw(st.sampled_from([1.0, 61.0, 601.0])))
    found = recover(shell.journal.crash(), shell.policies)
    found.assembler.sealed = found.waiting
    assert picture(found.assembler) == picture(shell.assembler)
    held = {number for number, _ in shell.journal.replay()}
    assert held == set(found.assembler.needed) | set(found.idle_rows)


@given(st.data())
def test_retries_change_nothing(data: st.DataObject) -> None:
    """Sending any earlier batch again is answered, and the parts are those of one sending."""
    scripts = data.draw(episodes)
    batches = data.draw(interleaved(scripts).flatmap(requests))
    once, often = Shell(), Shell()
    for at, batch in enumerate(batches):
        once.send(*batch)
        often.send(*batch)
        for again in data.draw(st.lists(st.integers(0, at), max_size=3)):
            assert set(often.send(*batches[again])) <= {"retry"}
    assert [i.part for i in often.assembler.sealed] == [i.part for i in once.assembler.sealed]
    assert often.assembler.steps == once.assembler.steps
    assert often.journal.last_row == once.journal.last_row


@given(st.data())
def test_interleaving_of_episodes_is_irrelevant(data: st.DataObject) -> None:
    """An episode's parts do not depend on events of other episodes in between."""
    scripts = data.draw(episodes)
    alone, mixed = Shell(), Shell()
    for events in scripts:
        alone.send(*events)
    mixed.send(*data.draw(interleaved(scripts)))
    for name in [name_of(events[0]) for events in scripts]:
        assert mixed.parts(name) == alone.parts(name)


@given(st.data())
def test_steps_rewards_and_observations_are_conserved(data: st.DataObject) -> None:
    """Parts join without a gap, and hold every step and every reward exactly once."""
    scripts = data.draw(episodes)
    shell = Shell()
    for batch in data.draw(interleaved(scripts).flatmap(requests)):
        shell.send(*batch)
        if data.draw(st.booleans()):
            shell.tick(shell.now + 61.0)
    shell.tick(shell.now + 10_000.0)
    for events in scripts:
        _check_conserved(shell, events)


def _check_conserved(shell: Shell, events: list[wire.Event]) -> None:
    parts = shell.parts(name_of(events[0]))
    rules = shell.assembler.policies.rules[events[0].policy_id]  # type: ignore[union-attr,index]
    expected: list[float] = []
    for event in events:
        if isinstance(event, wire.LogAction):
            expected.append(event.reward)
        elif isinstance(event, wire.LogReturns):
            expected[-1] += event.reward
    found = np.concatenate([np.frombuffer(part.rewards) for part in parts] or [np.zeros(0)])
    np.testing.assert_array_equal(found, expected)
    taken = [event for event in events if isinstance(event, wire.LogAction)]
    assert b"".join(part.obs for part in parts) == b"".join(
        rules.observation.encode(event.obs) for event in taken
    )
    assert b"".join(part.actions for part in parts) == b"".join(
        rules.action.encode(event.action) for event in taken
    )
    at = 0
    for number, part in enumerate(parts):
        assert (part.episode_id, part.part, part.t0) == (events[0].episode_id, number, at)
        assert part.steps <= rules.declaration.part_steps + 1
        at += part.steps
    for part, following in itertools.pairwise(parts):
        assert part.ended is None
        assert part.final_obs is not None
        assert following.obs.startswith(part.final_obs)
    if parts:
        last = events[-1]
        ended = isinstance(last, wire.End)
        how = ("truncated" if last.truncated else "terminated") if ended else "abandoned"  # type: ignore[union-attr]
        assert parts[-1].ended == how
        assert (parts[-1].final_obs is None) == (not ended or last.obs is None)  # type: ignore[union-attr]
        agents = last.agents if ended else None  # type: ignore[union-attr]
        assert parts[-1].agents == (-1 if agents is None else agents)
        assert parts[-1].agent_id == (events[0].agent_id or DEFAULT_AGENT)
    clock = [event.env_t for event in taken if event.env_t is not None]
    found_clock = b"".join(part.env_t for part in parts)
    assert np.frombuffer(found_clock, np.int64).tolist() == clock


@given(steps.filter(bool), st.integers(1, 4))
def test_a_part_never_outgrows_its_limit(taken: list[Any], limit: int) -> None:
    """With part_steps = n, every part but the last has n steps, and the last has at most n."""
    policy = PolicyDeclaration(observation=STEPS.observation, action=STEPS.action, part_steps=limit)
    shell = Shell({"default": policy})
    shell.send(*script("e", 0, "default", taken, "terminated"))
    sizes = [part.steps for part in shell.parts("e")]
    assert set(sizes[:-1]) <= {limit}
    assert 1 <= sizes[-1] <= limit
    assert sum(sizes) == len(taken)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_decision_of_numbers_that_are_not_finite_is_refused(value: float) -> None:
    """The distribution's inputs are checked like other values; masked actions have -inf."""
    inputs = np.array([0.5, value], "<f4").tobytes()
    shell = _in_state("IDLE")
    decision = msgspec.structs.replace(EVENTS["decision"], action_dist_inputs=inputs, seq=1)
    with pytest.raises(Refusal, match="expected finite numbers"):
        shell.judge(decision)
    for fine in (inputs[:4], np.array([0.5, -math.inf], "<f4").tobytes()):
        decision.action_dist_inputs = fine  # type: ignore[union-attr]
        assert shell.judge(decision) is not None


# --- the table --------------------------------------------------------------------------------

NAME = "e"
EVENTS: dict[str, wire.Event] = {
    "start": wire.Start(episode_id=NAME, start=9),
    "log_action": wire.LogAction(episode_id=NAME, obs=[0.0, 0.0], action=0),
    "decision": wire.Decision(
        episode_id=NAME, obs=[0.0, 0.0], action=0, action_logp=-1.0, policy_version=1
    ),
    "log_returns": wire.LogReturns(episode_id=NAME, reward=1.0),
    "end": wire.End(episode_id=NAME),
}


def _in_state(state: str) -> WatchedShell:
    shell = WatchedShell()
    if state != "ABSENT":
        shell.send(wire.Start(episode_id=NAME, start=0))
    if state not in ("ABSENT", "IDLE"):
        shell.send(EVENTS["log_action"])
    if state == "ended":
        shell.send(EVENTS["end"])
    if state == "abandoned":
        shell.tick(600.0)
    if state == "broken":
        shell._commit(shell.assembler.break_episode(NAME, "a bad obs"))
    return shell


TABLE = {
    "ABSENT": ("IDLE", "not_found", "not_found", "not_found", "not_found"),
    "IDLE": ("already_started", "ACTING", "ACTING", "no_action", "ended"),
    "ACTING": ("already_started", "ACTING", "ACTING", "ACTING", "ended"),
    "ended": ("completed",) * 5,
    "abandoned": ("abandoned",) * 5,
    "broken": ("broken",) * 5,
}


@pytest.mark.parametrize(
    ("state", "event", "expected"),
    [
        (state, event, outcome)
        for state, row in TABLE.items()
        for event, outcome in zip(EVENTS, row, strict=True)
    ],
)
def test_each_event_does_in_each_state_what_the_table_says(
    state: str, event: str, expected: str
) -> None:
    """The module's table, row by row."""
    shell = _in_state(state)
    before = picture(shell.assembler)["open"]
    (answer,) = shell.send(EVENTS[event])
    if expected.isupper() or expected == "ended":
        assert answer == "accepted"
        episode = shell.assembler.episodes.get(NAME)
        found = "ended" if episode is None else ("ACTING" if episode.steps else "IDLE")
        assert found == expected
    else:
        assert answer == expected
        assert picture(shell.assembler)["open"] == before


def test_a_second_action_closes_a_step_and_a_reward_adds_to_the_open_one() -> None:
    """Rewards belong to the last action; infos of one step are merged."""
    shell = _in_state("ACTING")
    shell.send(wire.LogReturns(episode_id=NAME, reward=1.0, info={"a": 1}))
    shell.send(EVENTS["log_action"])
    shell.send(wire.LogReturns(episode_id=NAME, reward=2.0, info={"a": 1, "b": 1}))
    shell.send(wire.LogReturns(episode_id=NAME, reward=0.5, info={"b": 2}))
    shell.send(EVENTS["end"])
    (part,) = shell.parts(NAME)
    assert np.frombuffer(part.rewards).tolist() == [1.0, 2.5]
    assert part.infos == {0: '{"a": 1}', 1: '{"a": 1, "b": 2}'}


def test_an_episode_without_a_step_is_sealed_without_a_part() -> None:
    """An episode of T = 0 leaves no rows, and its end is known."""
    shell = _in_state("IDLE")
    shell.send(EVENTS["end"])
    (sealed,) = shell.assembler.sealed
    assert sealed.part is None
    assert sealed.finished is not None


# --- numbers ----------------------------------------------------------------------------------


def _acting(count: int, **rules: Any) -> Shell:
    """An episode with `count` actions, numbered 1..count."""
    policy = PolicyDeclaration(observation=STEPS.observation, action=STEPS.action, **rules)
    shell = Shell({"default": policy})
    shell.send(wire.Start(episode_id=NAME, start=0), *(_action(n) for n in range(1, count + 1)))
    return shell


def _action(seq: int, action: int = 0) -> wire.LogAction:
    return wire.LogAction(episode_id=NAME, seq=seq, obs=[float(seq), 0.0], action=action)


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (_action(2), "retry"),
        (_action(2, action=1), "conflict"),
        (wire.LogAction(episode_id=NAME, seq=2, obs=[1.0], action=0), "conflict"),
        (wire.LogReturns(episode_id=NAME, seq=2, reward=1.0), "conflict"),
        (wire.End(episode_id=NAME, seq=3), "conflict"),
        (_action(0), "conflict"),
        (_action(5), "gap"),
        (_action(4), "accepted"),
    ],
)
def test_a_number_is_new_a_retry_a_conflict_or_a_gap(event: wire.Event, expected: str) -> None:
    """After events 0..3, 4 is next; an action cannot take the number of the start."""
    shell = _acting(3)
    assert shell.send(event) == [expected]
    assert shell.assembler.episodes[NAME].next_seq == 4 + (expected == "accepted")


def _seen(seq: int, **other: int) -> wire.Decision:
    """A long observation, which is not hashed; its last byte is the number by default."""
    pixels = bytes([*[7] * 1_599, other.get("last", seq)])
    return wire.Decision(
        episode_id=NAME, seq=seq, obs=pixels, action=bytes(8), action_logp=-0.5, policy_version=1,
        answered=True,
    )  # fmt: skip


def test_a_retry_of_a_long_observation_is_compared_by_its_bytes() -> None:
    """This holds after an earlier part was cut, and where one decision replaced another."""
    policy = PolicyDeclaration(
        observation=parse_space("box:40x40:uint8:0:255"), action=STEPS.action, part_steps=3
    )
    shell = Shell({"default": policy})
    shell.send(wire.Start(episode_id=NAME, start=0), *(_seen(n) for n in range(1, 6)))
    assert shell.assembler.episodes[NAME].first_seq > 1
    for seq in (4, 5):
        assert shell.send(_seen(seq)) == ["retry"]
    assert shell.send(_seen(4, last=0)) == ["conflict"]
    assert shell.send(_seen(5, last=0)) == ["accepted"]
    assert shell.send(_seen(5, last=0), _seen(4)) == ["retry", "retry"]
    shell.restart()
    assert shell.send(_seen(5, last=0), _seen(4), _seen(4, last=0)) == [
        "retry",
        "retry",
        "conflict",
    ]
    assert shell.parts(NAME)[0].obs == b"".join(_seen(n).obs for n in range(1, 4))


def test_a_gap_names_the_number_that_is_expected() -> None:
    """Row: episodes serial, env thread-safe"""
    shell = _acting(3)
    with pytest.raises(Refusal, match="expected seq 4, got 9") as caught:
        shell.judge(_action(9))
    assert caught.value.expected_seq == 4


def test_numbers_are_judged_after_a_cut_as_before() -> None:
    """Retries from before and after a cut change nothing; events still held are compared."""
    shell = _acting(5, part_steps=2)
    assert [part.steps for part in shell.parts(NAME)] == [2, 2]
    answers = shell.send(_action(1), _action(2), _action(5), _action(5, 1), _action(7), _action(6))
    assert answers == ["retry", "retry", "retry", "conflict", "gap", "accepted"]


@pytest.mark.parametrize("how", ["ended", "abandoned", "broken"])
def test_a_retry_of_an_acknowledged_event_is_a_retry_after_the_end(how: str) -> None:
    """An acknowledged event that is sent again after the episode's end is a retry; the next number
    is refused with the way the episode ended."""
    shell = _acting(2)
    next_seq = 3
    if how == "ended":
        shell.send(wire.End(episode_id=NAME, seq=3))
        next_seq = 4
    elif how == "abandoned":
        shell.tick(600.0)
    else:
        shell._commit(shell.assembler.break_episode(NAME, "bad"))
    assert shell.send(_action(1), _action(2)) == ["retry", "retry"]
    assert shell.send(_action(next_seq)) == ["completed" if how == "ended" else how]


def test_starts_are_known_by_instance_and_number() -> None:
    """A repeated start is a retry; its number for another episode, or another client, a conflict.

    Row: _finished set
    """
    shell = _acting(1)
    start = wire.Start(episode_id=NAME, start=0)
    assert shell.send(start) == ["retry"]
    shell.send(wire.Start(episode_id="f", start=1))
    assert shell.send(wire.Start(episode_id="f", start=0)) == ["conflict"]
    other = shell.register()
    assert shell.send(start, instance=other) == ["already_started"]
    assert shell.send(_action(2), instance=other) == ["conflict"]
    assert shell.send(wire.Start(episode_id="g"), instance=other) == ["invalid"]
    assert shell.send(wire.Start(episode_id="g", start=0), instance="ff-beef") == [
        "unknown_instance"
    ]


@pytest.mark.parametrize("agent", [None, "b"])
@pytest.mark.parametrize("kept", ["open", "restarted", "cut"])
@pytest.mark.parametrize("field", ["tags", "training_enabled", "continues", "policy_id"])
def test_a_start_again_with_other_content_is_a_conflict(
    field: str, kept: str, agent: str | None
) -> None:
    """All fields of an open episode's start but its time are compared, also after a replay."""
    shell = Shell()
    first = wire.Start(
        episode_id=NAME, start=0, tags={"b": "2", "a": "1"}, continues="x", ts=1, agent_id=agent
    )
    shell.send(first)
    if kept == "cut":
        steps = range(1, 6)
        env = {n: None if agent is None else n for n in steps}
        acts = [msgspec.structs.replace(_action(n), agent_id=agent, env_t=env[n]) for n in steps]
        assert shell.send(*acts) == ["accepted"] * 5
    if kept != "open":
        shell.restart()
    same = msgspec.structs.replace(
        first, tags={"a": "1", "b": "2"}, policy_id="default", training_enabled=True, ts=9
    )
    assert shell.send(first, same) == ["retry", "retry"]
    others: dict[str, list[Any]] = {
        "tags": [None, {"a": "1"}, {"a": "1", "b": "3"}, {"a": "x" * 257}],
        "training_enabled": [False],
        "continues": [None, "y"],
        "policy_id": ["texts", "nobody's"],
    }
    for value in others[field]:
        other = msgspec.structs.replace(first, **{field: value})
        assert shell.send(other) == ["conflict"]
        with pytest.raises(Refusal, match=f"start 0 was acknowledged with other {field}"):
            shell.judge(other)
    assert shell.send(first) == ["retry"]


@pytest.mark.parametrize("today", [["texts", "wide"], ["wide"], ["texts", "default"], ["default"]])
def test_a_start_that_named_no_policy_is_a_retry_whatever_there_is_by_now(today: list[str]) -> None:
    """The start meant the only policy that existed then, and stays a retry when there are other
    policies."""
    shell = Shell({"texts": TEXTS})
    shell.journal.commit(put=policies_state(shell.policies))
    start = wire.Start(episode_id=NAME, start=0)
    assert shell.send(start) == ["accepted"]
    shell.policies = {name: replace(TEXTS, policy_id=name) for name in today}
    shell.restart()
    assert shell.send(start) == ["retry"]
    assert shell.send(msgspec.structs.replace(start, policy_id="texts")) == ["retry"]
    assert shell.send(msgspec.structs.replace(start, policy_id=today[-1])) == ["conflict"]


def test_an_episode_in_its_reward_window_keeps_its_id() -> None:
    """Also if more episodes have ended since than are remembered: its late rewards arrive. Once it
    is stored and forgotten, the id is free."""
    policies = {"default": replace(STEPS, reward_window=60.0)}
    shell = Shell(policies, Limits(finished=1))
    second = shell.register()
    start = wire.Start(episode_id=NAME, start=0)
    shell.send(start, _action(1), wire.End(episode_id=NAME, seq=2))
    shell.send(wire.Start(episode_id="other", start=1), wire.End(episode_id="other", seq=1))
    assert NAME not in shell.assembler.finished
    assert shell.send(start, instance=second) == ["completed"]
    late = wire.LogReturns(episode_id=NAME, reward=2.0, step=0)
    assert shell.send(late) == ["accepted"]
    shell.tick(60.5)
    shell.send(wire.Start(episode_id="more", start=2), wire.End(episode_id="more", seq=1))
    assert shell.send(start, instance=second) == ["accepted"]
    known = shell.assembler.instances.get(shell.instance)
    assert known is not None
    assert known.names == {2: "more"}


def test_a_cut_of_an_ended_episode_leaves_the_steps_that_await_rewards() -> None:
    """The window of the first step has closed, that of the second has not."""
    shell = Shell({"default": replace(STEPS, reward_window=60.0)})
    shell.send(wire.Start(episode_id=NAME, start=0), _action(1))
    shell.tick(50.0)
    shell.send(_action(2), wire.End(episode_id=NAME, seq=3))
    assert shell.assembler.steps_awaiting_rewards == 2
    cut = shell.assembler.closing[NAME].cut_due(61.0)
    assert cut is not None
    shell._commit([cut])
    assert shell.assembler.steps_awaiting_rewards == 1
    shell.tick(110.0)
    assert shell.assembler.steps_awaiting_rewards == 0


@pytest.mark.parametrize("how", ["open", "ended", "restarted", "in its window"])
def test_a_start_number_is_one_episode_s(how: str) -> None:
    """No other episode is acknowledged under it, for as long as the first is known."""
    window = 60.0 if how == "in its window" else 0.0
    shell = Shell({"default": replace(STEPS, reward_window=window)}, Limits(finished=1))
    shell.send(wire.Start(episode_id=NAME, start=0), _action(1))
    if how != "open":
        shell.send(wire.End(episode_id=NAME, seq=2))
    if how == "restarted":
        shell.restart()
    for other in (
        wire.Start(episode_id="other", start=0),
        wire.Start(episode_id=NAME, start=0, agent_id="b"),
    ):
        assert shell.send(other) == ["conflict"]
        with pytest.raises(Refusal, match=f"was used by episode {NAME}"):
            shell.judge(other)
    assert shell.send(wire.Start(episode_id=NAME, start=0)) == ["retry"]
    if how == "open":
        return
    shell.send(wire.Start(episode_id="f", start=1), wire.End(episode_id="f", seq=1))
    assert shell.send(wire.Start(episode_id="other", start=0)) == ["retry"]  # forgotten
    known = shell.assembler.instances.get(shell.instance)
    assert known is not None
    assert known.names == {1: "f"}  # and no name is kept


def test_events_without_an_instance_are_taken_as_they_come() -> None:
    """A call with curl has no instance, no numbers and no protection against repetition."""
    assembler = EpisodeAssembler({"default": STEPS})
    action = wire.LogAction(episode_id="a", obs=[0.0, 0.0], action=0)
    events: list[wire.Event] = [wire.Start(episode_id="a"), action, action]
    for row, event in enumerate(events, 1):
        judged = Judge(assembler).judge(None, event)
        assert judged is not None
        assembler.apply(*judged, row=row, received=0, now=0.0)
    assert assembler.episodes["a"].steps == 2


# --- time and size ----------------------------------------------------------------------------


def test_an_episode_is_cut_by_time_and_the_open_step_stays() -> None:
    """After part_seconds the closed steps become a part, whose last row has the next obs."""
    shell = _acting(3, part_seconds=10.0)
    shell.tick(9.9)
    assert shell.parts(NAME) == []
    shell.tick(10.0)
    shell.tick(100.0)
    (part,) = shell.parts(NAME)
    assert (part.steps, part.t0, part.ended) == (2, 0, None)
    codec = shell.assembler.policies.rules["default"].observation
    assert part.final_obs == codec.encode([3.0, 0.0])


def test_an_episode_is_abandoned_by_its_time_out_only() -> None:
    """Every event restarts the time-out; the abandoned part records its ending."""
    shell = _acting(1, episode_timeout=10.0)
    shell.tick(9.0)
    shell.send(_action(2))
    shell.tick(18.0)
    assert NAME in shell.assembler.episodes
    shell.tick(19.0)
    (part,) = shell.parts(NAME)
    assert (part.ended, part.steps, part.final_obs) == ("abandoned", 2, None)


def test_a_cut_keeps_its_own_row_until_its_part_is_recorded() -> None:
    """Without that row a replay would not make the part that a durable plan names."""
    shell = _acting(3, part_seconds=10.0)
    shell.tick(10.0)
    row = shell.journal.last_row
    (sealed,) = shell.assembler.sealed
    assert row in sealed.rows
    assert row in shell.assembler.needed
    assert row in shell.assembler.release(sealed)


@given(st.data())
def test_rows_are_free_exactly_when_no_part_needs_them(data: st.DataObject) -> None:
    """Releasing every part, in order, frees every row that is not an open episode's."""
    shell = Shell()
    for batch in data.draw(episodes.flatmap(interleaved).flatmap(requests)):
        shell.send(*batch)
        if data.draw(st.booleans()):
            shell.tick(shell.now + 61.0)
    freed: dict[int, int] = defaultdict(int)
    for sealed in shell.assembler.sealed:
        for row in shell.assembler.release(sealed):
            freed[row] += 1
    held = {row for episode in shell.assembler.episodes.values() for row in episode.rows}
    assert set(freed.values()) <= {1}
    assert set(shell.assembler.needed) == held
    assert not held.intersection(freed)


# --- values -----------------------------------------------------------------------------------


def test_values_checked_together_are_bound_to_their_rules() -> None:
    """A refused start must not apply its policy's rules to another episode."""
    narrow = PolicyDeclaration(
        policy_id="narrow", observation=parse_space("box:2"), action=parse_space("discrete:2")
    )
    wide = PolicyDeclaration(
        policy_id="wide", observation=parse_space("box:2"), action=parse_space("discrete:9")
    )
    shell = Shell({"narrow": narrow, "wide": wide})
    action = wire.LogAction(episode_id=NAME, obs=bytes(8), action=(7).to_bytes(8, "little"), seq=1)
    batch = wire.Batch(
        instance=shell.instance,
        events=[
            wire.Start(episode_id=NAME, start=None, policy_id="wide"),
            wire.Start(episode_id=NAME, start=0, policy_id="narrow"),
            action,
        ],
    )
    values = Judge(shell.assembler).check_values(batch)
    assert shell.send(*batch.events[:2]) == ["invalid", "accepted"]
    with pytest.raises(Refusal, match="an integer of 0"):
        shell.judge(action, values.get(2))


def test_episodes_of_an_earlier_declaration_keep_its_rules() -> None:
    """One batch may hold episodes that began before and after a policy's file changed."""
    old = PolicyDeclaration(observation=parse_space("box:3"), action=parse_space("discrete:3"))
    shell = Shell({"default": old})
    shell.journal.commit(put=policies_state(shell.policies))
    shell.send(wire.Start(episode_id="old", start=0))
    shell.assembler = recover(shell.journal, {"default": STEPS}).assembler
    shell.send(wire.Start(episode_id="new", start=1))
    sizes = {"old": 12, "new": 8}
    events: list[wire.Event] = [
        wire.LogAction(episode_id=name, obs=bytes(sizes[name]), action=bytes(8))
        for name in ("old", "new", "old", "new")
    ]
    values = Judge(shell.assembler).check_values(wire.Batch(events=events))
    assert [len(values[index][1]) for index in range(4)] == [12, 8, 12, 8]
    assert shell.send(*events) == ["accepted"] * 4


# --- limits -----------------------------------------------------------------------------------


def test_ended_episodes_are_forgotten_beyond_their_limit() -> None:
    """Memory is bounded by a count; a forgotten start number is still a retry.

    Row: _finished set
    """
    shell = Shell(limits=Limits(finished=3))
    for number in range(10):
        shell.send(*script(f"e{number}", number, "default", [], "terminated"))
    assert list(shell.assembler.finished) == ["e7", "e8", "e9"]
    assert shell.send(wire.Start(episode_id="e0", start=0, policy_id="default")) == ["retry"]
    assert shell.send(wire.End(episode_id="e0", seq=1)) == ["not_found"]


def test_idle_instances_are_forgotten_and_busy_ones_kept() -> None:
    """Beyond the limit the least active are forgotten; a start under a forgotten one is refused."""
    shell = Shell(limits=Limits(instances=2))
    busy = shell.instance
    shell.send(wire.Start(episode_id="kept", start=0, policy_id="default"))
    later = [shell.register() for _ in range(4)]
    assert shell.assembler.forget_instances() == later[:3]
    start = wire.Start(episode_id="x", start=1, policy_id="default")
    assert shell.send(start, instance=later[0]) == ["unknown_instance"]
    assert shell.send(start, instance=busy) == ["accepted"]
    assert shell.assembler.forget_instances() == []


def test_start_numbers_with_too_many_gaps_are_refused() -> None:
    """The memory for an instance's starts is bounded; a filled gap frees some."""
    shell = Shell()

    def start(number: int) -> wire.Start:
        return wire.Start(episode_id=f"e{number}", start=number, policy_id="default")

    apart = [start(2 * n) for n in range(MOST_RANGES)]
    assert shell.send(*apart) == ["accepted"] * MOST_RANGES
    last = 2 * MOST_RANGES - 2
    assert shell.send(start(last + 2), start(10**9)) == ["unknown_instance"] * 2
    with pytest.raises(Refusal, match=rf"such as {last + 1}, got {last + 2}: register a new one"):
        shell.judge(start(last + 2))
    assert shell.send(start(last), start(4)) == ["retry", "retry"]
    assert shell.send(start(last + 1), start(5), start(last + 4)) == ["accepted"] * 3
    assert shell.send(start(last + 6)) == ["unknown_instance"]
    shell.restart()
    assert shell.send(start(last + 6)) == ["unknown_instance"]
    assert shell.send(start(last + 6), instance=shell.register()) == ["accepted"]


def test_an_import_may_leave_out_many_more_numbers_and_has_a_bound_too() -> None:
    """An import may leave out many more start numbers than another client; at its bound the next
    start is refused with `gap`, and whole episodes are judged one by one."""
    shell = Shell()
    shell._commit([opened := shell.assembler.open_instance("import", "log")])
    known = shell.assembler.instances.get(opened.instance)
    assert known is not None
    known.starts.update([(2 * n, 2 * n) for n in range(MOST_NAMED_RANGES - 1)])
    last = 2 * MOST_NAMED_RANGES
    starts = [wire.Start(episode_id=f"e{n}", start=last + 2 * n) for n in range(2)]
    assert shell.send(*starts, instance=opened.instance) == ["accepted", "gap"]
    whole, names = Judge(shell.assembler).judge_whole, ["x", "y"]
    assert whole(opened.instance, names, [], np.array([last + 1, last + 8]), "default") is None
    assert whole(opened.instance, names, [], np.array([last + 1, last + 2]), "default") is not None


def test_so_many_episodes_may_be_open() -> None:
    """A start beyond the limit of open episodes gets a retryable refusal, which changes nothing."""
    shell = Shell(limits=Limits(open_episodes=2))
    starts = [wire.Start(episode_id=f"e{i}", start=i, policy_id="default") for i in range(3)]
    assert shell.send(*starts) == ["accepted", "accepted", "busy"]
    shell.send(wire.End(episode_id="e0"))
    assert shell.send(starts[2]) == ["accepted"]


@settings(max_examples=30)
@given(st.data())
def test_a_history_with_lost_rows_is_replayed_as_far_as_it_goes(data: st.DataObject) -> None:
    """Damage never stops a start: an episode with a gap is broken, the others are whole."""
    shell = Shell()
    scripts = data.draw(episodes)
    for batch in data.draw(interleaved(scripts).flatmap(requests)):
        shell.send(*batch)
    lost = data.draw(st.sets(st.integers(1, shell.journal.last_row)))
    journal = shell.journal.crash()
    journal.commit(drop_rows=lost)
    found = recover(journal, shell.policies)
    untouched = set(shell.assembler.needed) - lost
    for sealed in shell.assembler.sealed:
        if set(sealed.rows) <= untouched and sealed.part is not None and sealed.part.part == 0:
            assert sealed.part in [item.part for item in found.waiting]
    for name in found.assembler.torn_episodes():
        assert name in found.assembler.episodes


def test_an_episode_keeps_the_reward_rules_that_it_began_under() -> None:
    """A policy's file may change between two runs; acknowledged rewards may not."""
    summing = replace(STEPS, reward_combination="sum")
    shell = Shell({"default": summing})
    shell.send(wire.Start(episode_id="e", start=0))
    shell.send(wire.LogAction(episode_id="e", seq=1, obs=[0.0, 0.0], action=0))
    shell.send(wire.LogReturns(episode_id="e", seq=2, reward=1.0))
    shell.send(wire.LogReturns(episode_id="e", seq=3, reward=2.0))
    shell.send(wire.LogAction(episode_id="e", seq=4, obs=[0.0, 0.0], action=0))
    changed = replace(STEPS, reward_combination="last", reward_default=-9.0)
    episode = recover(shell.journal.crash(), {"default": changed}).assembler.episodes["e"]
    assert list(episode.rewards) == [3.0, 0.0]


def test_a_reward_for_a_sealed_step_of_an_episode_without_buffered_ones_is_late() -> None:
    """Damage may leave an open episode at its cut, without an open step."""
    declared = PolicyDeclaration(observation=parse_space("box:1"), action=parse_space("discrete:2"))
    shell = Shell({"default": declared})
    start = wire.Start(episode_id="cut", start=0)
    acts = [wire.LogAction(episode_id="cut", seq=n, obs=[0.0], action=0) for n in (1, 2)]
    assert shell.send(start, *acts) == ["accepted"] * 3
    episode = shell.assembler.episodes["cut"]
    carry = Carry(episode.started, 2, 1, 1, 0)
    found = EpisodeAssembler(shell.policies)
    found.restore(RangeSet(), [], [carry])
    late = wire.LogReturns(episode_id="cut", reward=1.0, step=0, reward_id="x")
    with pytest.raises(Refusal, match="the reward window of step"):
        Judge(found).judge(None, late)
