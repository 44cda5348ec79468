"""The calls of PolicyClient, by agent: an episode of one agent is a mapping of one.

    client = PolicyClient(address, policy_mapping_fn=lambda agent: agent.split("_")[0])
    episode = client.start_episode()
    actions = client.get_action(episode, {"left_0": obs, "right_0": obs})
    client.log_returns(episode, {"left_0": 1.0}, multiagent_done_dict={"left_0": True})
    client.end_episode(episode, {"right_0": obs})

Each agent is a track (ingest.protocol.agent_names). Its policy is chosen at its first observation,
or at the start of an episode of one. A call checks the values of all its agents before it queues
events. PolicyClient has short cuts for what services call most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from ingest.client.arguments import (
    ONE,
    SEVERAL,
    ByAgent,
    acting_of,
    by_episode,
    named,
    require_going_on,
)
from ingest.client.calls import PolicyLookup, Queueing
from ingest.client.local_actions import LocalActor
from ingest.client.open_episodes import Agent, ClientEpisode, ClientWhole, EpisodeBook, no_action
from ingest.client.remote_actions import RemoteActor
from ingest.delivery.declarations import ClientPolicy
from ingest.delivery.events import (
    late_reward,
    now_or,
    size_of,
    version,
    weight,
)
from ingest.delivery.outbox import Outbox, Reward
from ingest.delivery.traces import with_trace
from ingest.protocol.agent_names import Name, label_of, name_of
from ingest.protocol.errors import ClientError, Refusal, completed
from ingest.protocol.messages import Decision, End, Event, LogAction, LogReturns, Start
from storage.declarations.mapping_functions import takes_episode

PolicyMapping: TypeAlias = Callable[..., str | None]
"""A function of the agent's id, or of the agent's and the episode's id, to a policy id."""


@dataclass(frozen=True)
class AgentTurn:
    """The checked agents and observations of one call, before anything is queued.

    `events` are the starts of agents that join and the ends of agents that have ended.
    """

    whole: ClientWhole
    values: ByAgent  # the observations as given
    acting: dict[Agent, ClientEpisode]
    obs: dict[Agent, bytes]  # of all observed agents
    events: list[Event] = field(default_factory=list)


@dataclass(frozen=True)
class EpisodeCalls:
    """The calls. Their state is in the `book` and the queue.

    `is_local`: the client's own policies act, not only in episodes that are not sampled.
    """

    book: EpisodeBook
    outbox: Outbox
    actor: LocalActor
    remote: RemoteActor
    policies: PolicyLookup
    queueing: Queueing
    is_local: bool
    trace: bool = False

    # --- the calls ---------------------------------------------------------------------------

    def start(
        self, start: Start, policies: PolicyMapping | Mapping[str, str], pass_prob: float
    ) -> ClientWhole:
        """A new episode of several agents; each is started at its first observation."""
        name = start.episode_id
        if not isinstance(policies, Mapping):
            of = self._by_function(policies, name)
        else:
            of = self._by_mapping(dict(policies))
        return ClientWhole(start, of, pass_prob)

    def acts_here(self, episode_id: str) -> bool:
        """Whether the client's own policy acts: in local mode, and in unsampled episodes."""
        return self.is_local or self.outbox.dropped.is_unsampled(episode_id)

    def get_action(self, episode_id: str | Sequence[str], observation: Any) -> Any:
        """Actions as PolicyClient.get_action; those chosen here are recorded once all are."""
        observations = by_episode(episode_id, observation)
        there = {n: seen for n, seen in observations.items() if not self.acts_here(n)}
        here = {n: seen for n, seen in observations.items() if n not in there}
        actions = self.decide(self.turns(here), self.actor.decide) if here else {}
        if there:
            actions |= self._decide_there(self.turns(there))
        return actions[episode_id] if isinstance(episode_id, str) else actions

    def turns(self, observations: Mapping[str, Any]) -> dict[str, AgentTurn]:
        """The checked turn of each episode, for its observations; it changes nothing."""
        turns = {}
        for name, seen in observations.items():
            whole = self.book.find_whole(name, answered=self.acts_here(name))
            turns[name] = self._turn(whole, seen, waits=True)
        return turns

    def log_action(
        self,
        episode_id: str,
        observation: Any,
        action: Any,
        action_prob: Any,
        action_logp: Any,
        policy_version: int,
        ts: int | None,
    ) -> None:
        """Log an action of each observed agent that continues; propensities are by agent too."""
        turn = self._turn(self.book.find_whole(episode_id), observation)
        logged = turn.whole.arguments.actions(
            episode_id, turn.whole.policy, action, action_prob, action_logp, acting=turn.acting
        )
        steps = {}
        for agent, track in turn.acting.items():
            encoded, prob, logp = logged[agent]
            steps[agent] = LogAction(
                episode_id=turn.whole.episode_id,
                agent_id=agent,
                seq=track.seq,
                obs=turn.obs[agent],
                action=encoded,
                action_prob=prob,
                action_logp=logp,
                policy_version=version(episode_id, policy_version),
                info=with_trace(episode_id) if self.trace else None,
                ts=now_or(ts),
                decided=track.decided,
                env_t=turn.whole.clock,
                pass_prob=track.pass_prob,
                schema_id=track.schema_id,
            )
        self._act({episode_id: turn}, {episode_id: steps})
        self.queueing.settle(episode_id)

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
        try:
            whole = self.book.find_whole(episode_id)
        except Refusal as refusal:
            raise self.book.foreign(episode_id) or refusal from None
        paid, infos, gone = whole.arguments.returns(episode_id, reward, info, done, truncated)
        self._require_acted(whole, paid.keys() | infos.keys() | gone.keys())
        self._reward(whole, paid, infos, ts)
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
        """Log a reward for the step number `step`, or of each agent for its own."""
        whole = self.book.wholes.get(episode_id)
        several = isinstance(reward, Mapping) if whole is None else not whole.arguments.has_one
        paid, infos, _ = (SEVERAL if several else ONE).returns(episode_id, reward, info, None, None)
        self._put(
            [
                late_reward(episode_id, amount, infos.get(agent), step, reward_id, ts, agent)
                for agent, amount in paid.items()
            ]
        )
        self.queueing.settle(episode_id)

    def end_episode(
        self, episode_id: str, observation: Any, *, truncated: bool, ts: int | None
    ) -> None:
        """End the episode of all agents; agents that had ended keep the way in which they did."""
        whole = self.book.find_whole(episode_id)
        given = whole.arguments
        values = {} if observation is None else given.by_agent(episode_id, "obs", observation)
        seen = given.observe(episode_id, whole.policy, values)
        _require_going_on(whole, seen)
        self._put(
            [
                self._end(
                    whole,
                    track,
                    seen.get(agent),
                    truncated=whole.gone.get(agent, truncated),
                    agents=len(whole.acted) if agent is not None and agent in whole.acted else None,
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
                    f"{named(policies)}"
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

    def _require_acted(self, whole: ClientWhole, agents: Iterable[Agent]) -> None:
        """Raise an error unless the last actions of these agents are logged."""
        name, early, missed = whole.episode_id, set(), set()
        is_dropped = self.outbox.dropped.is_dropped(name)
        for agent in agents:
            track = whole.tracks.get(agent)
            if track is not None and (track.acted or is_dropped):
                continue
            if agent in whole.missed:
                missed.add(agent)
            elif agent not in whole.ended:
                early.add(agent)
        if early and whole.arguments.has_one:
            raise no_action(name, None)
        if early:
            text = f"Episode {name}: a reward came before any action of {', '.join(named(early))}"
            raise Refusal("no_action", text, "reward", name)
        for agent in sorted(whole.ended.intersection(agents), key=str):
            raise completed(name, agent)
        for agent in sorted(missed, key=str):
            raise no_action(whole.arguments.where(name, agent), whole.missed[agent])

    def _turn(self, whole: ClientWhole, observation: Any, *, waits: bool = False) -> AgentTurn:
        """The agents that act on the observations, that join and that have ended.

        `waits`: whether to wait for the declarations of their policies. Raises ValueError.
        """
        name, since = whole.episode_id, self.outbox.end
        values = whole.arguments.by_agent(name, "obs", observation)
        for agent in values if waits else ():
            self.policies.require_declared(whole.policy(agent))
        obs = whole.arguments.observe(name, whole.policy, values)
        _require_going_on(whole, obs)
        acting = acting_of(name, obs, whole.gone.keys() | whole.ended)
        lost = [a for a, track in whole.tracks.items() if track.unanswered is not None]
        if set(lost) - set(acting):
            raise ClientError(
                f"Episode {name}: the answer to its last get_action was lost; expected the same "
                f"observations again, including those of {named(lost)}"
            )
        turn = AgentTurn(whole, values, {}, obs)
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

    def _act(
        self, turns: Mapping[str, AgentTurn], steps: Mapping[str, Mapping[Agent, Any]]
    ) -> None:
        """Queue the steps of some turns, after their starts and ends."""
        events: list[Any] = []
        for name, turn in turns.items():
            events += [*turn.events, *steps[name].values()]
        places = dict(zip(map(id, events), self._put(events), strict=True))
        for name, turn in turns.items():
            _enter(self.book, turn)
            for agent, step in steps[name].items():
                turn.acting[agent].act(step, places[id(step)])
            _acted(turn)

    def _reward(
        self,
        whole: ClientWhole,
        amounts: Mapping[Agent, float],
        infos: Mapping[Agent, Any],
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
        decide: Callable[[ClientEpisode, Any, bytes], tuple[Decision, Any]],
    ) -> dict[str, Any]:
        """Call `decide` for each agent, then queue all decisions; return the actions."""
        actions: dict[str, dict[Agent, Any]] = {name: {} for name in turns}
        steps: dict[str, dict[Agent, Any]] = {name: {} for name in turns}
        for name, turn in turns.items():
            for agent, track in turn.acting.items():
                event, action = decide(track, turn.values[agent], turn.obs[agent])
                event.env_t = turn.whole.clock
                steps[name][agent], actions[name][agent] = event, action
        self._act(turns, steps)
        for name in turns:
            self.queueing.settle(name)
        return _as_given(turns, actions)

    def _decide_there(self, turns: Mapping[str, AgentTurn]) -> dict[str, Any]:
        """Ask for all actions in one request, which also has the starts and ends of agents."""
        self._put([event for turn in turns.values() for event in turn.events])
        for turn in turns.values():
            _enter(self.book, turn)
        asked: dict[Name, tuple[AgentTurn, Agent]] = {
            name_of(track): (turn, agent)
            for turn in turns.values()
            for agent, track in turn.acting.items()
        }
        seen = {name: turn.values[agent] for name, (turn, agent) in asked.items()}
        clock = {name: turn.whole.clock for name, (turn, _) in asked.items()}
        try:
            found = self.remote.act(seen, clock)
        except Refusal as refusal:
            for turn in turns.values():
                self.book.end_refused(turn.whole, refusal)
            raise
        for turn in turns.values():
            _acted(turn)
        actions = {
            name: {agent: found[name_of(track)] for agent, track in turn.acting.items()}
            for name, turn in turns.items()
        }
        return _as_given(turns, actions)


def _as_given(
    turns: Mapping[str, AgentTurn], actions: Mapping[str, dict[Agent, Any]]
) -> dict[str, Any]:
    """Actions in the form of their episodes' observations: by agent, or the only one."""
    return {
        name: actions[name][None] if turn.whole.arguments.has_one else actions[name]
        for name, turn in turns.items()
    }


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
        turn.whole.missed.pop(track.agent_id, None)
    turn.whole.acted |= turn.acting.keys()
    turn.whole.parting = {}
    turn.whole.env_t += 1


def _require_going_on(whole: ClientWhole, obs: Mapping[Agent, bytes]) -> None:
    """Raise ValueError for observations of agents that have had their last one."""
    back = [a for a, seen in obs.items() if a in whole.ended and whole.parting.get(a) != seen]
    require_going_on(whole.episode_id, back)


def checked_mapping(function: PolicyMapping | None) -> PolicyMapping | None:
    """The function, or None. Raises ValueError if it is not callable."""
    if function is not None and not callable(function):
        raise ValueError("Policy mapping function not callable?")
    return function
