"""Unusual events of episodes with two agents: a state machine against docs/multi_agent.md.

test_odd_events.py covers one agent's track. Here agents join and leave in any order, an id is used
by another kind of episode or another client, and ends give numbers of agents. Rewards arrive late
for a track, and time-outs, broken events and kills affect the whole episode.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field

import hypothesis.strategies as st
import numpy as np
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ingest.protocol import messages as wire
from ingest.protocol.agent_names import name_in
from storage.declarations.declaration import PolicyDeclaration
from storage.experience.episode import DEFAULT_AGENT
from storage.spaces.descriptors import parse_space
from tests.ingest.episodes.test_assembler import WatchedShell

WINDOW, TIMEOUT = 50.0, 100.0
EXAMPLES = int(os.environ.get("HEADRACE_EXAMPLES", "150"))  # `make faults` tries 2,000
BEGINNINGS = [(None,), ("b",), *[(DEFAULT_AGENT, "b")] * 4]  # None: an episode of one agent
OVER = {"terminated": "completed"}


def declared(policy_id: str, reward_window: float) -> PolicyDeclaration:
    return PolicyDeclaration(
        policy_id=policy_id,
        observation=parse_space("box:1"),
        action=parse_space("discrete:3"),
        episode_timeout=TIMEOUT,
        part_seconds=math.inf,
        reward_window=reward_window,
    )


POLICIES = {name: declared(name, window) for name, window in (("strict", 0.0), ("late", WINDOW))}


@dataclass
class Track:
    """The state of one agent by the page, or of a lone one."""

    policy_id: str
    rewards: list[float] = field(default_factory=list)
    env_t: list[int] = field(default_factory=list)
    opened: list[float] = field(default_factory=list)
    how: str = ""
    agents: int = -1
    sealed: bool = False

    def takes(self, t: int, now: float) -> bool:
        if t == len(self.rewards) - 1 and not self.how:
            return True
        return now - self.opened[t] < POLICIES[self.policy_id].reward_window

    def finish(self, how: str, agents: int = -1) -> None:
        self.how, self.agents = how, agents
        self.sealed = not self.rewards or self.policy_id == "strict"


@dataclass
class Whole:
    """The state of one id by the page: its kind, client, agents, and the time of its last event."""

    instance: str
    seen: float
    tracks: dict[str | None, Track] = field(default_factory=dict)

    @property
    def is_lone(self) -> bool:
        return None in self.tracks

    @property
    def open(self) -> list[Track]:
        return [track for track in self.tracks.values() if not track.how]

    @property
    def stopped(self) -> str:
        found = [t.how for t in self.tracks.values() if t.how in ("abandoned", "broken")]
        return found[-1] if found else ""

    @property
    def agents(self) -> int:
        return max(track.agents for track in self.tracks.values())

    @property
    def acted(self) -> int:
        return sum(bool(track.rewards) for track in self.tracks.values())

    @property
    def is_complete(self) -> bool:
        return 0 <= self.agents <= len(self.tracks)


class OddAgents(RuleBasedStateMachine):
    """The assembler with its shell, compared with the model."""

    names = st.sampled_from(["x", "x", "x", "y"])
    agents = st.sampled_from(["b", "b", DEFAULT_AGENT, "c", None])
    whose = st.sampled_from([0, 0, 0, 0, 1])

    @initialize(kind=st.sampled_from(BEGINNINGS), policy=st.sampled_from(sorted(POLICIES)))
    def begin(self, kind: tuple[str | None, ...], policy: str) -> None:
        self.shell = WatchedShell(POLICIES)
        self.instances = (self.shell.instance, self.shell.register())
        self.starts = 0
        self.model: dict[str, Whole] = {}
        for agent in kind:
            self.start("x", agent, 0, policy)
            self.act("x", agent, 0, 1)

    def send(self, event: wire.Event, who: int) -> str:
        (answer,) = self.shell.send(event, instance=self.instances[who])
        return str(answer)

    def track(self, name: str, agent: str | None) -> Track | None:
        whole = self.model.get(name)
        return None if whole is None else whole.tracks.get(agent)

    # --- starts ------------------------------------------------------------------------------

    def startable(self, name: str, agent: str | None, instance: str) -> str:
        """The expected answer to a start with a new number."""
        whole = self.model.get(name)
        if whole is None:
            return "accepted"
        known = whole.tracks.get(agent)
        if known is not None:
            return OVER.get(known.how, known.how) or "already_started"
        if agent is None:  # the id has several agents
            return "already_started" if whole.open else "completed"
        if whole.is_lone:
            how = whole.tracks[None].how
            return OVER.get(how, how) or "already_started"
        if whole.instance != instance:
            return "conflict"
        return whole.stopped or ("completed" if whole.is_complete else "accepted")

    @rule(name=names, agent=agents, who=whose, policy=st.sampled_from(sorted(POLICIES)))
    def start(self, name: str, agent: str | None, who: int, policy: str) -> None:
        instance = self.instances[who]
        expected = self.startable(name, agent, instance)
        event = wire.Start(episode_id=name, start=self.starts, policy_id=policy, agent_id=agent)
        assert self.send(event, who) == expected
        if expected == "accepted":
            self.starts += 1
            whole = self.model.setdefault(name, Whole(instance, self.shell.now))
            whole.tracks[agent] = Track(policy)
            whole.seen = self.shell.now

    # --- numbered events ---------------------------------------------------------------------

    def expected(self, name: str, agent: str | None, who: int) -> str:
        """The expected answer to the next numbered event of a track."""
        track = self.track(name, agent)
        if track is None:
            return "not_found"
        if track.how:
            return OVER.get(track.how, track.how)
        return "accepted" if self.model[name].instance == self.instances[who] else "conflict"

    def seq(self, name: str, agent: str | None) -> int:
        track = self.track(name, agent)
        return 1000 if track is None or track.how else 1 + len(track.rewards)

    @rule(name=names, agent=agents, who=whose, ahead=st.sampled_from([1, 1, 3, 0, -1]))
    def act(self, name: str, agent: str | None, who: int, ahead: int) -> None:
        """An action, whose step of the environment must be later than the agent's latest."""
        track, expected = self.track(name, agent), self.expected(name, agent, who)
        latest = track.env_t[-1] if track is not None and track.env_t else -1
        env_t = None if agent is None else max(0, latest + ahead)
        whole = self.model.get(name)
        begins = expected == "accepted" and track is not None and not track.rewards
        if begins and whole is not None and 0 <= whole.agents <= whole.acted:
            expected = "completed"
        if expected == "accepted" and env_t is not None and env_t <= latest:
            expected = "invalid"
        event = wire.LogAction(
            episode_id=name,
            agent_id=agent,
            seq=self.seq(name, agent),
            obs=[0.5],
            action=1,
            env_t=env_t,
        )
        assert self.send(event, who) == expected
        if expected == "accepted" and track is not None:
            track.rewards.append(0.0)
            track.opened.append(self.shell.now)
            track.env_t += [] if env_t is None else [env_t]
            self.model[name].seen = self.shell.now

    @rule(name=names, agent=agents, who=whose, count=st.sampled_from([None, None, 1, 2, 3]))
    def end(self, name: str, agent: str | None, who: int, count: int | None) -> None:
        """An agent leaves; `count` is the number of agents, if the episode is over."""
        expected = self.expected(name, agent, who)
        if expected == "accepted" and count is not None:
            whole = self.model[name]
            if agent is None or count < whole.acted or 0 <= whole.agents != count:
                expected = "invalid"
        event = wire.End(episode_id=name, agent_id=agent, seq=self.seq(name, agent), agents=count)
        assert self.send(event, who) == expected
        if expected == "accepted":
            self.model[name].tracks[agent].finish("terminated", -1 if count is None else count)
            self.model[name].seen = self.shell.now

    @rule(name=names, with_count=st.booleans())
    def end_all(self, name: str, with_count: bool) -> None:
        """The episode ends for all of its agents in one request."""
        whole = self.model.get(name)
        if whole is None or whole.is_lone:
            return
        agents = max(1, whole.acted)
        for agent in [agent for agent, track in whole.tracks.items() if not track.how]:
            self.end(
                name, agent, self.instances.index(whole.instance), agents if with_count else None
            )

    # --- rewards for named steps -------------------------------------------------------------

    @rule(name=names, agent=agents, who=whose, t=st.sampled_from([0, 0, 1]))
    def reward_step(self, name: str, agent: str | None, who: int, t: int) -> None:
        """For any track, by any client, while it is open and within its window."""
        track = self.track(name, agent)
        if track is None:
            expected = "not_found"
        elif track.sealed:
            expected = "window_closed"
        elif t >= len(track.rewards):
            expected = "invalid"
        else:
            expected = "accepted" if track.takes(t, self.shell.now) else "window_closed"
        self.keys = getattr(self, "keys", 0) + 1
        event = wire.LogReturns(
            episode_id=name, agent_id=agent, reward=0.25, step=t, reward_id=f"r{self.keys}"
        )
        assert self.send(event, who) == expected
        if expected == "accepted" and track is not None:
            track.rewards[t] += 0.25
            self.model[name].seen = self.shell.now

    # --- without an event --------------------------------------------------------------------

    @rule(seconds=st.sampled_from([1.0, 45.0, 60.0, 120.0]))
    def wait(self, seconds: float) -> None:
        """All agents are abandoned together, once no event arrived for any of them."""
        now = self.shell.now + seconds
        self.shell.tick(now)
        for whole in self.model.values():
            if now - whole.seen >= TIMEOUT:
                for track in whole.open:
                    track.finish("abandoned")
            for track in whole.tracks.values():
                if track.how and not track.sealed:
                    window = POLICIES[track.policy_id].reward_window
                    track.sealed = now >= track.opened[-1] + window

    @rule(agent=agents)
    def take_turns(self, agent: str | None) -> None:
        """One agent acts now and then, while the others wait for longer than the time-out."""
        for _ in range(3):
            self.wait(60.0)
            self.act("x", agent, 0, 1)

    @rule(name=names, agent=agents, chance=st.integers(0, 4))
    def break_one(self, name: str, agent: str | None, chance: int) -> None:
        """An event of one agent did not fit: the episode is broken for all of them."""
        track = self.track(name, agent)
        if chance or track is None:
            return
        self.shell._commit(self.shell.assembler.break_episode(name_in(name, agent), "no fit"))
        for other in self.model[name].open if not track.how else ():
            other.finish("broken")

    @rule()
    def kill(self) -> None:
        """The journal is read back: time-outs restart."""
        self.shell.restart()
        for whole in self.model.values():
            whole.seen = self.shell.now

    @invariant()
    def parts_hold_what_the_page_says(self) -> None:
        for name, whole in getattr(self, "model", {}).items():
            for agent, track in whole.tracks.items():
                parts = self.shell.parts(name_in(name, agent))
                assert bool(parts) == (track.sealed and bool(track.rewards))
                for part in parts:
                    assert np.frombuffer(part.rewards).tolist() == track.rewards
                    assert np.frombuffer(part.env_t, np.int64).tolist() == track.env_t
                    assert (part.ended, part.agents) == (track.how, track.agents)


OddAgents.TestCase.settings = settings(
    max_examples=max(20, EXAMPLES // 2), stateful_step_count=25, deadline=None
)
TestOddAgents = OddAgents.TestCase
