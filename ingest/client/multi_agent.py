"""The calls of PolicyClient for episodes of several agents: mappings by agent.

    client = PolicyClient(address, policy_mapping_fn=lambda agent: agent.split("_")[0])
    episode = client.start_episode()
    actions = client.get_action(episode, {"left_0": obs, "right_0": obs})
    client.log_returns(episode, {"left_0": 1.0}, multiagent_done_dict={"left_0": True})
    client.end_episode(episode, {"right_0": obs})

Each agent is a track (ingest.protocol.agent_names). Its policy is chosen at its first observation.
A call checks the values of all its agents before it queues events.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from ingest.client.calls import PolicyLookup, Queueing
from ingest.client.local_actions import LocalActor
from ingest.client.open_episodes import ClientEpisode, ClientWhole, EpisodeBook, no_action
from ingest.client.remote_actions import RemoteActor
from ingest.delivery.declarations import ClientPolicy
from ingest.delivery.events import (
    check_id,
    encode_info,
    late_reward,
    now_or,
    number,
    propensity,
    size_of,
    version,
    weight,
)
from ingest.delivery.outbox import Outbox, Reward
from ingest.protocol.agent_names import label, label_of, name_of
from ingest.protocol.errors import ClientError, Refusal, completed
from ingest.protocol.messages import Decision, End, Event, LogAction, LogReturns, Start
from storage.declarations.mapping_functions import takes_episode
from storage.experience.episode import ALL_AGENTS

PolicyMapping: TypeAlias = Callable[..., str | None]
"""A function of the agent's id, or of the agent's and the episode's id, to a policy id."""

ByAgent: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True)
class AgentTurn:
    """The checked agents and observations of one call, before anything is queued.

    `events` are the starts of agents that join and the ends of agents that have ended.
    """

    whole: ClientWhole
    acting: dict[str, ClientEpisode]
    obs: dict[str, bytes]  # of all observed agents
    events: list[Event] = field(default_factory=list)


@dataclass(frozen=True)
class MultiAgentCalls:
    """The five calls. Their state is in the `book` and the queue."""

    book: EpisodeBook
    outbox: Outbox
    actor: LocalActor
    remote: RemoteActor
    policies: PolicyLookup
    queueing: Queueing

    # --- the calls ---------------------------------------------------------------------------

    def start(
        self, start: Start, policies: PolicyMapping | Mapping[str, str], pass_prob: float
    ) -> None:
        """Open an episode; each agent is started at its first observation."""
        name = start.episode_id
        check_id("episode_id", name)
        self.book.require_new(name)
        if not isinstance(policies, Mapping):
            of = self._by_function(policies, name)
        else:
            of = self._by_mapping(dict(policies))
        self.book.wholes[name] = ClientWhole(start, of, pass_prob)

    def get_action(
        self, observations: Mapping[str, Any], *, is_local: bool
    ) -> dict[str, dict[str, Any]]:
        """Actions by episode and agent, for observations by episode and agent."""
        turns = self.turns(observations, is_local=is_local)
        if is_local:
            return self.decide(turns, observations, self.actor.decide)
        return self._decide_there(turns, observations)

    def turns(self, observations: Mapping[str, Any], *, is_local: bool) -> dict[str, AgentTurn]:
        """The checked turn of each episode, for observations by agent; it changes nothing."""
        return {
            name: self._turn(self.book.find_whole(name, answered=is_local), seen, waits=True)
            for name, seen in observations.items()
        }

    def log_action(
        self,
        episode_id: str,
        observation: Any,
        action: Any,
        *,
        action_prob: Any,
        action_logp: Any,
        policy_version: int,
        ts: int | None,
    ) -> None:
        """Log an action of each observed agent that continues; propensities are by agent too."""
        turn = self._turn(self.book.find_whole(episode_id), observation)
        given = by_agent(episode_id, "action", action)
        probs, logps = (
            by_agent(episode_id, name, value or {})
            for name, value in (("action_prob", action_prob), ("action_logp", action_logp))
        )
        if given.keys() != turn.acting.keys():
            raise ValueError(
                f"Episode {episode_id}: expected actions of the agents "
                f"{_named(turn.acting)}, got {_named(given)}"
            )
        if others := (probs.keys() | logps.keys()) - given.keys():
            raise ValueError(
                f"Episode {episode_id}: expected propensities of acting agents only, got some of "
                f"{_named(others)}"
            )
        steps = {}
        for agent, track in turn.acting.items():
            where = label_of(track)
            step = steps[agent] = LogAction(
                episode_id=episode_id,
                agent_id=agent,
                seq=track.seq,
                obs=turn.obs[agent],
                action=track.policy.encode_action(where, given[agent]),
                policy_version=version(episode_id, policy_version),
                ts=now_or(ts),
                decided=track.decided,
                env_t=turn.whole.env_t,
                pass_prob=track.pass_prob,
                schema_id=track.schema_id,
            )
            if agent in probs or agent in logps:
                step.action_prob, step.action_logp = propensity(
                    where,
                    probs.get(agent),
                    logps.get(agent),
                    has_densities=track.policy.has_densities,
                )
        self._act({episode_id: turn}, {episode_id: steps})

    def log_returns(
        self,
        episode_id: str,
        reward: Any,
        info: Any,
        done: Any,
        truncated: Any,
        ts: int | None,
    ) -> None:
        """Log rewards and infos of the agents' last actions, and which agents have ended, how."""
        whole = self._require_whole(episode_id)
        amounts = {
            agent: number(label((episode_id, agent)), "reward", amount)
            for agent, amount in by_agent(episode_id, "reward", reward or {}).items()
        }
        infos = {
            agent: encode_info(label((episode_id, agent)), agent_info)
            for agent, agent_info in by_agent(episode_id, "info", info or {}).items()
            if agent_info
        }
        gone = ended_agents(episode_id, done, truncated)
        self._require_acted(whole, amounts.keys() | infos.keys() | gone.keys())
        self._reward(whole, amounts, infos, ts)
        whole.gone = {**gone, **whole.gone}
        self.queueing.settle(episode_id)

    def log_late(
        self,
        episode_id: str,
        reward: Any,
        info: Any,
        step: int | None,
        reward_id: str | None,
        ts: int | None,
    ) -> None:
        """Log a reward of each agent for its own step number `step`."""
        infos = by_agent(episode_id, "info", info or {})
        events = []
        for agent, amount in by_agent(episode_id, "reward", reward).items():
            where, agent_info = label((episode_id, agent)), infos.get(agent)
            raw = encode_info(where, agent_info) if agent_info else None
            paid = number(where, "reward", amount)
            events.append(late_reward(episode_id, paid, raw, step, reward_id, ts, agent))
        self._put(events)
        self.queueing.settle(episode_id)

    def end_episode(
        self, episode_id: str, observation: Any, *, truncated: bool, ts: int | None
    ) -> None:
        """End the episode of all agents; agents that had ended keep the way in which they did."""
        whole = self.book.find_whole(episode_id)
        seen = {}
        for agent, value in by_agent(episode_id, "obs", observation or {}).items():
            seen[agent] = whole.policy(agent).observe(label((episode_id, agent)), value)
        _require_going_on(whole, seen)
        self._put(
            [
                self._end(
                    whole,
                    track,
                    seen.get(agent),
                    truncated=whole.gone.get(agent, truncated),
                    agents=len(whole.acted) if track.acted else None,
                    ts=ts,
                )
                for agent, track in whole.tracks.items()
            ]
        )
        self.outbox.over(episode_id)
        self.book.end_whole(whole)
        self.queueing.settle(episode_id)

    # --- policies ----------------------------------------------------------------------------

    def _by_mapping(self, policies: dict[str, str]) -> Callable[[str], ClientPolicy]:
        def policy_of(agent: str) -> ClientPolicy:
            if agent not in policies:
                raise ValueError(
                    f"Could not find policy for agent {agent!r}: policy_id has the agents "
                    f"{_named(policies)}"
                )
            return self._found(agent, policies[agent], "policy_id")

        return policy_of

    def _by_function(
        self, function: PolicyMapping, episode_id: str
    ) -> Callable[[str], ClientPolicy]:
        with_episode = takes_episode(function)

        def policy_of(agent: str) -> ClientPolicy:
            chosen = function(agent, episode_id) if with_episode else function(agent)
            return self._found(agent, chosen, "policy_mapping_fn")

        return policy_of

    def _found(self, agent: str, policy_id: str | None, source: str) -> ClientPolicy:
        try:
            return self.policies.find(policy_id)
        except ValueError as error:
            raise ValueError(
                f"Could not find policy for agent {agent!r}: {source} gave {policy_id!r}; {error}"
            ) from error

    # --- checks ------------------------------------------------------------------------------

    def _require_whole(self, episode_id: str) -> ClientWhole:
        """The open episode of several agents. Raises ValueError, ClientError."""
        if episode_id in self.book.open:
            raise ValueError(
                f"Episode {episode_id}: expected one reward, because the episode has one agent; to "
                "log several, start it with policy_id={agent: policy}, or with a client that has a "
                "policy_mapping_fn"
            )
        return self.book.find_whole(episode_id)

    def _require_acted(self, whole: ClientWhole, agents: Iterable[str]) -> None:
        name, agents = whole.episode_id, set(agents)
        missed = set() if self.outbox.dropped.is_dropped(name) else agents & whole.missed.keys()
        if early := agents - whole.acted - missed:
            text = (
                f"Episode {name}: a reward came before any action of "
                f"{', '.join(sorted(map(str, early)))}"
            )
            raise Refusal("no_action", text, "reward", name)
        for agent in sorted(agents & whole.ended):
            raise completed(name, agent)
        for agent in sorted(missed):
            raise no_action(label((name, agent)), whole.missed[agent])

    def _turn(self, whole: ClientWhole, observation: Any, *, waits: bool = False) -> AgentTurn:
        """The agents that act on the observations, that join and that have ended.

        `waits`: whether to wait for the declarations of their policies. Raises ValueError.
        """
        name, since = whole.episode_id, self.outbox.end
        obs = {}
        for agent, value in by_agent(name, "obs", observation).items():
            if waits:
                self.policies.require_declared(whole.policy(agent))
            obs[agent] = whole.policy(agent).observe(label((name, agent)), value)
        _require_going_on(whole, obs)
        acting = [agent for agent in obs if agent not in whole.gone and agent not in whole.ended]
        if not acting:
            raise ValueError(
                f"Episode {name}: expected the observation of an agent that has not ended, "
                f"got {_named(obs)}"
            )
        lost = [a for a, track in whole.tracks.items() if track.unanswered is not None]
        if set(lost) - set(acting):
            raise ClientError(
                f"Episode {name}: the answer to its last get_action was lost; expected the same "
                f"observations again, including those of {_named(lost)}"
            )
        turn = AgentTurn(whole, {}, obs)
        for agent in acting:
            track = whole.tracks.get(agent)
            if track is None:
                track = ClientEpisode(
                    name, whole.policies[agent], since, agent, pass_prob=whole.pass_prob
                )
                joined = (one for one in whole.tracks.values() if one.policy is track.policy)
                track.arm = next((one.arm for one in joined), None)
                turn.events.append(self._start(whole, track))
            turn.acting[agent] = track
        for agent, cut in whole.gone.items():
            track = whole.tracks[agent]
            turn.events.append(self._end(whole, track, obs.get(agent), truncated=cut))
        return turn

    # --- events ------------------------------------------------------------------------------

    def _start(self, whole: ClientWhole, track: ClientEpisode) -> Start:
        start = copy(whole.start)
        start.agent_id, start.policy_id = track.agent_id, track.policy.policy_id
        start.schema_id = track.policy.schema_id
        if whole.tracks:
            start.ts = now_or(None)
        return start

    def _end(
        self,
        whole: ClientWhole,
        track: ClientEpisode,
        obs: bytes | None,
        *,
        truncated: bool,
        agents: int | None = None,
        ts: int | None = None,
    ) -> End:
        return End(
            episode_id=whole.episode_id,
            agent_id=track.agent_id,
            seq=track.seq,
            obs=obs,
            truncated=bool(truncated),
            ts=now_or(ts),
            decided=track.decided,
            agents=agents,
            schema_id=track.schema_id,
        )

    def _put(self, events: list[Any]) -> Sequence[int]:
        """Queue events together; return their indices."""
        for event in events:
            self.queueing.require_room(label_of(event), weight(event))
        return self.outbox.put_all(events) if events else ()

    def _act(self, turns: Mapping[str, AgentTurn], steps: Mapping[str, Mapping[str, Any]]) -> None:
        """Queue the steps of some turns, after their starts and ends."""
        events: list[Any] = []
        for name, turn in turns.items():
            events += [*turn.events, *steps[name].values()]
        places = dict(zip(map(id, events), self._put(events), strict=True))
        for name, turn in turns.items():
            _enter(self.book, turn)
            for agent, step in steps[name].items():
                track = turn.acting[agent]
                track.step, track.step_index = step, places[id(step)]
                track.seq += 1
                track.decided = None
            _acted(turn)

    def _reward(
        self,
        whole: ClientWhole,
        amounts: Mapping[str, float],
        infos: Mapping[str, Any],
        ts: int | None,
    ) -> None:
        agents = list(dict.fromkeys([*amounts, *infos]))
        rewards = []
        for agent in agents:
            track, info = whole.tracks[agent], infos.get(agent)
            event = LogReturns(
                episode_id=whole.episode_id,
                agent_id=agent,
                seq=track.seq,
                reward=amounts.get(agent, 0.0),
                info=info,
                ts=now_or(ts),
                decided=track.decided,
            )
            self.queueing.require_room(label_of(track), weight(event) + size_of(info))
            step = track.step if track.policy.sums else None
            rewards.append(Reward(track.step_index, step, event.reward, info, event))
        for agent, folded in zip(agents, self.outbox.put_rewards(rewards), strict=True):
            if not folded:
                track = whole.tracks[agent]
                track.step = None  # later rewards are queued after this one
                track.seq += 1

    # --- decisions ---------------------------------------------------------------------------

    def decide(
        self,
        turns: Mapping[str, AgentTurn],
        observations: Mapping[str, ByAgent],
        decide: Callable[[ClientEpisode, Any, bytes], tuple[Decision, Any]],
    ) -> dict[str, dict[str, Any]]:
        """Call `decide` for each agent, then queue all decisions."""
        actions: dict[str, dict[str, Any]] = {name: {} for name in turns}
        steps: dict[str, dict[str, Any]] = {name: {} for name in turns}
        for name, turn in turns.items():
            for agent, track in turn.acting.items():
                seen = observations[name][agent]
                event, action = decide(track, seen, turn.obs[agent])
                event.env_t = turn.whole.env_t
                steps[name][agent], actions[name][agent] = event, action
        self._act(turns, steps)
        for name in turns:
            self.queueing.settle(name)
        return actions

    def _decide_there(
        self, turns: Mapping[str, AgentTurn], observations: Mapping[str, ByAgent]
    ) -> dict[str, dict[str, Any]]:
        """Ask for all actions in one request, which also has the starts and ends of agents."""
        self._put([event for turn in turns.values() for event in turn.events])
        for turn in turns.values():
            _enter(self.book, turn)
        asked = {
            name_of(track): (turn, agent)
            for turn in turns.values()
            for agent, track in turn.acting.items()
        }
        seen = {name: observations[t.whole.episode_id][a] for name, (t, a) in asked.items()}
        clock = {name: turn.whole.env_t for name, (turn, _) in asked.items()}
        try:
            found = self.remote.act(seen, clock)
        except Refusal as refusal:
            for turn in turns.values():
                self.book.end_refused(turn.whole, refusal)
            raise
        for turn in turns.values():
            _acted(turn)
        actions: dict[str, dict[str, Any]] = {name: {} for name in turns}
        for name, (turn, agent) in asked.items():
            actions[turn.whole.episode_id][agent] = found[name]
        return actions


def _enter(book: EpisodeBook, turn: AgentTurn) -> None:
    """Note the agents whose starts or ends are queued as joined or ended."""
    whole = turn.whole
    for agent, track in turn.acting.items():
        whole.tracks[agent] = book.open[name_of(track)] = track
    for agent in whole.gone:
        book.open.pop(name_of(whole.tracks.pop(agent)), None)
        whole.ended.add(agent)
        whole.parting[agent] = turn.obs.get(agent)
    whole.gone = {}


def _acted(turn: AgentTurn) -> None:
    """Count a step of the environment."""
    for track in turn.acting.values():
        track.acted = True
        turn.whole.missed.pop(track.agent_id or "", None)
    turn.whole.acted |= turn.acting.keys()
    turn.whole.parting = {}
    turn.whole.env_t += 1


def _require_going_on(whole: ClientWhole, obs: Mapping[str, bytes]) -> None:
    """Raise ValueError for observations of agents that have had their last one."""
    back = [a for a, seen in obs.items() if a in whole.ended and whole.parting.get(a) != seen]
    if back:
        raise ValueError(
            f"Episode {whole.episode_id}: expected no observations of ended agents, got some of "
            f"{_named(back)}"
        )


def checked_mapping(function: PolicyMapping | None) -> PolicyMapping | None:
    """The function, or None. Raises ValueError if it is not callable."""
    if function is not None and not callable(function):
        raise ValueError("Policy mapping function not callable?")
    return function


def by_agent(episode_id: str, name: str, value: Any) -> ByAgent:
    """The value, which must be a mapping. Raises ValueError."""
    if not isinstance(value, Mapping):
        raise ValueError(
            f"Episode {episode_id}: {name}: expected a mapping by agent, got {value!r:.80}"
        )
    return value


def ended_agents(episode_id: str, done: Any, truncated: Any) -> dict[Any, bool]:
    """The agents that have ended -> whether they were truncated (False if they are in both).

    Raises ValueError unless both are mappings by agent, and for the end of all agents.
    """
    gone = {
        agent: cut
        for name, ends, cut in (
            ("multiagent_truncated_dict", truncated, True),
            ("multiagent_done_dict", done, False),
        )
        for agent, over in by_agent(episode_id, name, ends or {}).items()
        if over
    }
    if ALL_AGENTS in gone:
        raise ValueError(f"Episode {episode_id}: end_episode ends the episode of all agents")
    return gone


def _named(agents: Iterable[Any]) -> list[str]:
    return sorted(map(str, agents))
