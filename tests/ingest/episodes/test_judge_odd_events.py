"""Every unusual event has one outcome: a state machine against a model of docs/semantics.md.

Two client instances send starts, actions, rewards, named rewards and ends in any order, with
correct, repeated, changed and skipped numbers. Time passes, episodes break, instances are
forgotten, the collector is killed, and its journal is restored from a backup. The model is the
page's table; at the end the parts must match it.

Also of `ingest.episodes.event_checks`.
"""

from __future__ import annotations

import math
import os
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import hypothesis.strategies as st
import numpy as np
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ingest.collector.adoption import adopt
from ingest.episodes.sealed_parts import Limits
from ingest.protocol import messages as wire
from ingest.protocol.agent_names import Name, name_in
from storage.declarations.declaration import PolicyDeclaration
from storage.spaces.descriptors import parse_space
from tests.ingest.episodes.test_assembler import RECEIVED, WatchedShell
from tests.ingest.simulated_collector import MemoryShelf, MemoryWriter

WINDOW, TIMEOUT = 50.0, 100.0
EXAMPLES = int(os.environ.get("HEADRACE_EXAMPLES", "150"))  # `make faults` tries 2,000


def declared(policy_id: str, **rules: Any) -> PolicyDeclaration:
    return PolicyDeclaration(
        policy_id=policy_id,
        observation=parse_space("box:1"),
        action=parse_space("discrete:9"),
        episode_timeout=TIMEOUT,
        part_seconds=math.inf,
        **rules,
    )


POLICIES = {
    "strict": declared("strict"),
    "patient": declared("patient", reward_window=WINDOW),
    "last": declared("last", reward_window=WINDOW, reward_combination="last", reward_default=-1.0),
    "first": declared("first", reward_combination="first"),
    "max": declared("max", reward_window=WINDOW, reward_combination="max", reward_default=0.5),
}
STARTS: list[dict[str, Any]] = [
    {},
    {"tags": {"k": "1"}},
    {"tags": {"k": "2"}, "continues": "e0"},
    {"training_enabled": False},
]
ENDED = {"terminated": "completed", "truncated": "completed"}


@dataclass
class Episode:
    """The state of one episode by the page."""

    instance: str
    start: int
    policy: PolicyDeclaration
    seen: float
    begun: dict[str, Any]  # content of its start without the number
    sent: list[Any] = field(default_factory=lambda: [None])  # content by seq; the start is 0
    rewards: list[list[float]] = field(default_factory=list)
    opened: list[float] = field(default_factory=list)
    keys: dict[tuple[int, str], float] = field(default_factory=dict)
    how: str = ""
    sealed: bool = False
    stored_how: str = ""  # in a shard that is later than the restored journal

    @property
    def known(self) -> int:
        """The lowest number that the client has no acknowledgement for, once it is over."""
        return len(self.sent) if self.how in ENDED else len(self.sent) - 1

    def takes(self, t: int, now: float) -> bool:
        if t == len(self.rewards) - 1 and not self.how:
            return True
        return now - self.opened[t] < self.policy.reward_window

    def combined(self) -> list[float]:
        combine = {"sum": sum, "max": max, "first": lambda x: x[0], "last": lambda x: x[-1]}
        rule = combine[self.policy.reward_combination]
        return [float(rule(r)) if r else self.policy.reward_default for r in self.rewards]


class OddEvents(RuleBasedStateMachine):
    """The assembler with its shell, compared with the model."""

    agent: str | None = None  # of every event

    def name(self, episode_id: str) -> Name:
        return name_in(episode_id, self.agent)

    @initialize()
    def begin(self) -> None:
        self.shell = WatchedShell(POLICIES, Limits(instances=2))
        self.shell.now = 1000.0  # the collector has been running for a while
        self.instances = [self.shell.instance, self.shell.register()]
        self.starts: dict[str, set[int]] = {name: set() for name in self.instances}
        self.model: dict[str, Episode] = {}
        self.writer = MemoryWriter()
        self.backup: Any = None

    picks = st.integers(0, 13)
    whose = st.sampled_from([None, None, None, None, 0, 1])  # None: any client

    def named(self, pick: int) -> str:
        """Mostly the latest episode or a new one; else any, or an unknown one."""
        if pick > 9:
            return [*self.model, "nobody"][-1 - pick % (len(self.model) + 1)]
        if not self.model or (pick < 8 and self.model[[*self.model][-1]].how):
            fresh = f"e{len(self.model)}"
            self.start_as(fresh, pick % 2, sorted(POLICIES)[pick % len(POLICIES)], None, {})
            for action in range(pick % 3 if fresh in self.model else 0):
                self.send_action(fresh, self.model[fresh].instance, 0, action)
            return fresh
        return [*self.model][-1]

    def caller(self, name: str, who: int | None) -> str:
        if who is None and name in self.model:
            return self.model[name].instance
        return self.instances[who or 0]

    amounts = st.sampled_from([-2.0, 0.0, 0.25, 3.0])

    def send(self, event: wire.Event, instance: str) -> str:
        (answer,) = self.shell.send(event, instance=instance)
        return str(answer)

    # --- starts ------------------------------------------------------------------------------

    @rule(
        pick=picks,
        who=st.integers(0, 1),
        policy=st.sampled_from(sorted(POLICIES)),
        number=st.sampled_from([None, None, None, 0, 1]),
        given=st.sampled_from(STARTS),
    )
    def start(
        self, pick: int, who: int, policy: str, number: int | None, given: dict[str, Any]
    ) -> None:
        """A fresh id or a known one, with the next number or a used one."""
        name = f"e{len(self.model)}" if pick < 7 else self.named(pick)
        self.start_as(name, who, policy, number, given)

    @rule(pick=picks, other=st.sampled_from([None, None, *STARTS]))
    def start_again(self, pick: int, other: dict[str, Any] | None) -> None:
        """The earlier start, or one with its number and name and other content."""
        found = self.model.get(name := self.named(pick))
        if found is None or found.instance not in self.instances:
            return
        who, policy = self.instances.index(found.instance), found.policy.policy_id
        self.start_as(name, who, policy, found.start, found.begun if other is None else other)

    def start_as(
        self, name: str, who: int, policy: str, number: int | None, given: dict[str, Any]
    ) -> None:
        instance, found = self.instances[who], self.model.get(name)
        number = len(self.starts[instance]) if number is None else number
        event = wire.Start(
            episode_id=name, start=number, policy_id=policy, agent_id=self.agent, **given
        )
        if self.shell.assembler.instances.get(instance) is None:
            expected = "unknown_instance"
            self.instances[who] = self.shell.register()  # for later events
            self.starts[self.instances[who]] = set()
            answer = self.shell.send(event, instance=instance)
            assert answer == [expected]
            return
        if number in self.starts[instance]:
            known = [
                n for n, e in self.model.items() if (e.instance, e.start) == (instance, number)
            ]
            other = known != [name] if known or found is not None else False
            if found is not None and not other and not found.how:
                other = (found.policy.policy_id, found.begun) != (policy, given)
            expected = "conflict" if other else "retry"
        elif found is not None and not found.how:
            expected = "already_started"
        elif found is not None:
            expected = ENDED.get(found.how, found.how)
        else:
            expected = "accepted"
            self.starts[instance].add(number)
            self.model[name] = Episode(instance, number, POLICIES[policy], self.shell.now, given)
        assert self.send(event, self.instances[who]) == expected

    @rule(chance=st.integers(0, 5))
    def forget(self, chance: int) -> None:
        """Newer instances arrive, and the longest idle one is forgotten."""
        for _ in range(3 * (chance == 5)):
            self.shell.register()
        self.shell.assembler.forget_instances()

    # --- numbered events ---------------------------------------------------------------------

    def numbered(self, name: str, instance: str, skew: int, content: Any) -> tuple[str, int]:
        """The expected answer to a numbered event, and its number."""
        found = self.model.get(name)
        if found is None:
            return "not_found", max(0, 1 + skew)
        seq = max(0, len(found.sent) + skew)
        mine = found.instance == instance
        if found.how:
            again = mine and 0 < seq < found.known
            return "retry" if again else ENDED.get(found.how, found.how), seq
        if not mine:
            return "conflict", seq
        if seq > len(found.sent):
            return "gap", seq
        if seq < len(found.sent):
            return "retry" if seq and found.sent[seq] == content else "conflict", seq
        if content[0] == "reward" and not found.rewards:
            return "no_action", seq
        return "accepted", seq

    def take(self, name: str, content: Any) -> Episode:
        found = self.model[name]
        found.sent.append(content)
        found.seen = self.shell.now
        return found

    skews = st.sampled_from([0, 0, 0, 0, -1, -2, 1])

    @rule(pick=picks, who=whose, skew=skews, action=st.integers(0, 2))
    def act(self, pick: int, who: int | None, skew: int, action: int) -> None:
        name = self.named(pick)
        by = self.caller(name, who)
        self.send_action(name, by, skew, action)

    def send_action(self, name: str, by: str, skew: int, action: int) -> None:
        content = ("act", action)
        expected, seq = self.numbered(name, by, skew, content)
        event = wire.LogAction(
            episode_id=name,
            seq=seq,
            obs=[0.5],
            action=action,
            agent_id=self.agent,
            env_t=None if self.agent is None else seq,
        )
        assert self.send(event, by) == expected
        if expected == "accepted":
            found = self.take(name, content)
            found.rewards.append([])
            found.opened.append(self.shell.now)

    @rule(pick=picks, who=whose, skew=skews, amount=amounts)
    def reward(self, pick: int, who: int | None, skew: int, amount: float) -> None:
        name = self.named(pick)
        by = self.caller(name, who)
        content = ("reward", amount)
        expected, seq = self.numbered(name, by, skew, content)
        event = wire.LogReturns(episode_id=name, seq=seq, reward=amount, agent_id=self.agent)
        assert self.send(event, by) == expected
        if expected == "accepted":
            self.take(name, content).rewards[-1].append(amount)

    @rule(pick=picks, who=whose, skew=skews, truncated=st.booleans())
    def end(self, pick: int, who: int | None, skew: int, truncated: bool) -> None:
        if pick % 2:
            return
        name = self.named(pick)
        by = self.caller(name, who)
        content = ("end", truncated)
        expected, seq = self.numbered(name, by, skew, content)
        event = wire.End(episode_id=name, seq=seq, truncated=truncated, agent_id=self.agent)
        assert self.send(event, by) == expected
        if expected == "accepted":
            self.finish(self.take(name, content), "truncated" if truncated else "terminated")

    def finish(self, found: Episode, how: str) -> None:
        found.how = how
        found.sealed = not found.rewards or not found.policy.reward_window

    # --- rewards for named steps -------------------------------------------------------------

    @rule(
        pick=picks,
        who=st.integers(0, 1),
        t=st.sampled_from([0, 0, 1, 2]),
        key=st.sampled_from("xy"),
        amount=amounts,
    )
    def reward_step(self, pick: int, who: int, t: int, key: str, amount: float) -> None:
        """Any client may send a reward for a named step, without a number."""
        name = self.named(pick)
        found = self.model.get(name)
        if found is None:
            expected = "not_found"
        elif found.sealed:
            expected = "window_closed"
        elif (t, key) in found.keys:
            expected = "retry" if found.keys[t, key] == amount else "conflict"
        elif t >= len(found.rewards):
            expected = "invalid"
        else:
            expected = "accepted" if found.takes(t, self.shell.now) else "window_closed"
        event = wire.LogReturns(
            episode_id=name, reward=amount, step=t, reward_id=key, agent_id=self.agent
        )
        assert self.send(event, self.instances[who]) == expected
        if found is not None and expected == "accepted":
            found.rewards[t].append(amount)
            found.keys[t, key] = amount
            found.seen = self.shell.now

    # --- without an event --------------------------------------------------------------------

    @rule(seconds=st.sampled_from([45.0, 1.0, 20.0, 51.0, 120.0]))
    def wait(self, seconds: float) -> None:
        now = self.shell.now + seconds
        self.shell.tick(now)
        for found in self.model.values():
            if not found.how and now - found.seen >= TIMEOUT:
                found.sent.append(("end", None))
                self.finish(found, "abandoned")
            if found.how and not found.sealed:
                found.sealed = now >= found.opened[-1] + found.policy.reward_window

    @rule(chance=st.integers(0, 4))
    def break_one(self, chance: int) -> None:
        """An event of a background batch did not fit."""
        name = self.named(3) if chance == 4 else "nobody"
        ended = self.shell.assembler.break_episode(self.name(name), "it did not fit")
        found = self.model.get(name)
        assert bool(ended) == (found is not None and not found.how)
        if ended and found is not None:
            self.shell._commit(ended)
            found.sent.append(("end", None))
            self.finish(found, "broken")

    @rule()
    def kill(self) -> None:
        """The journal is read back: time-outs restart, reward windows continue."""
        self.shell.restart()
        for episode in self.model.values():
            episode.seen = self.shell.now

    @rule(chance=st.integers(0, 2))
    def back_up(self, chance: int) -> None:
        """The journal is copied."""
        if not chance and self.backup is None:
            known = deepcopy((self.model, self.starts, self.instances))
            self.backup = (self.shell.journal.crash(), *known)

    @rule(chance=st.integers(0, 2))
    def restore(self, chance: int) -> None:
        """Sealed parts go to shards; then the copy replaces the journal, and adopts them."""
        if chance or self.backup is None:
            return
        shell, (journal, model, self.starts, self.instances) = self.shell, self.backup
        parts = [item.part for item in shell.assembler.sealed if item.part is not None]
        if parts:
            numbered = [part.with_ordinals(at, at) for at, part in enumerate(parts)]
            self.writer.write(f"{shell.journal.collector_id}-s", "", numbered)
        shelf = MemoryShelf(self.writer)
        adopt(journal, POLICIES, shelf.ends, shelf.later, self.writer.write, received=RECEIVED)
        shell.journal, self.backup = journal, None
        self.model = self.restored(model, {part.episode_id for part in parts})
        self.kill()

    def restored(self, backup: dict[str, Episode], there: set[str]) -> dict[str, Episode]:
        """The expected state of every episode; `there` are the ones that shards hold."""
        for name in there.difference(backup):  # its id is taken, and no number of it is known
            backup[name] = replace(self.model[name], instance="", start=-1, sent=[None])
        for name, known in backup.items():
            ended = [] if known.how else [("end", None)]
            latest = self.model[name] if name in there else known
            backup[name] = replace(
                latest,
                sent=[*known.sent, *ended],
                how=known.how or "broken",
                sealed=True,
                stored_how=latest.stored_how or latest.how,
            )
        return backup

    @invariant()
    def parts_hold_what_the_page_says(self) -> None:
        for name, found in getattr(self, "model", {}).items():
            stored = [part for part in self.writer.parts if part.episode_id == name]
            parts = stored + self.shell.parts(self.name(name))
            assert bool(parts) == (found.sealed and bool(found.rewards))
            if parts:
                (part,) = parts
                assert np.frombuffer(part.rewards).tolist() == found.combined()
                assert part.ended == (found.stored_how or found.how)


OddEvents.TestCase.settings = settings(max_examples=EXAMPLES, stateful_step_count=30, deadline=None)
TestOddEvents = OddEvents.TestCase


class OddTracks(OddEvents):
    """The same for agents' tracks: each acts as an episode of its own here."""

    agent = "agent0"


OddTracks.TestCase.settings = settings(
    max_examples=max(20, EXAMPLES // 5), stateful_step_count=30, deadline=None
)
TestOddTracks = OddTracks.TestCase
