"""Sampling from any BaseEnv: several agents, several policies, programs that call us.

After each poll, the sampler completes the rows that the results belong to, acts for every waiting
agent with one forward pass per policy, and sends the actions. See policy.envs.base_env for the
contents of a poll.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from policy.algorithms.trainable_policy import Actor, TrainablePolicy
from policy.envs.base_env import BaseEnv
from policy.inference.numpy_policy import Actions
from policy.sampling.agent_rows import (
    AgentRows,
    Pack,
    Play,
    RowColumns,
    observation_columns,
)
from policy.sampling.episode import RolloutEpisode
from policy.sampling.fragment_buffers import CUT, INFOS, EpisodeSegment
from policy.sampling.postprocessing import SOURCE, alike
from policy.sampling.sampler import (
    FRAGMENT_CUT,
    TRAINING_ENABLED,
    CutRules,
    Sampler,
    is_excluded,
    without_marker,
)
from storage.experience.episode import ALL_AGENTS, DEFAULT_POLICY
from storage.experience.multi_agent_batch import MultiAgentBatch
from storage.experience.sample_batch import (
    ACTION_DIST_INPUTS,
    ACTION_LOGP,
    AGENTS,
    ENV_T,
    POLICY_VERSION,
    REWARDS,
    TERMINATEDS,
    TRUNCATEDS,
    SampleBatch,
    concat_samples,
)

_log = logging.getLogger("headrace.worker")

ObservationFn = Callable[..., Any]
Waiting: TypeAlias = list[tuple[Any, Any, Any]]
"""Agents of one policy that wait for an action: env id, agent id, observation."""


@dataclass(slots=True)
class EnvNews:
    """One env's part of a poll, by agent."""

    obs: dict[Any, Any]
    rewards: Mapping[Any, float] = field(default_factory=dict)
    terminateds: Mapping[Any, bool] = field(default_factory=dict)
    truncateds: Mapping[Any, bool] = field(default_factory=dict)
    infos: Mapping[Any, Mapping[str, Any]] = field(default_factory=dict)
    logged: Mapping[Any, Any] = field(default_factory=dict)

    @property
    def over(self) -> tuple[bool, bool]:
        """Whether the episode has terminated, and whether it was truncated, for all agents."""
        return self.terminateds.get(ALL_AGENTS, False), self.truncateds.get(ALL_AGENTS, False)


class BaseEnvSampler(Sampler):
    """Samples from a BaseEnv; `next_batch` is a fragment of one env, or a whole episode.

    It is a SampleBatch if the default policy is the only one, else a MultiAgentBatch.
    `observation_fn(agent_obs=, worker=, base_env=, policies=, episode=)` may change the
    observations of an env's agents; it returns a dict by agent. `joint`: several agents may act in
    an episode. Rows then have `env_t`, the episode's length when the action was chosen, and
    `agents`: in the last rows of agents that end with the episode the number of agents, else -1.
    """

    def __init__(
        self,
        env: BaseEnv,
        policies: Mapping[str, TrainablePolicy],
        policy_of: Callable[[Any, RolloutEpisode], str],
        rules: CutRules,
        *,
        observation_fn: ObservationFn | None = None,
        joint: bool = True,
        **common: Any,
    ) -> None:
        super().__init__(rules, **common)
        self._env, self._policies, self._policy_of = env, policies, policy_of
        self._observation_fn, self._joint = observation_fn, joint
        self._columns: dict[str, RowColumns] = {}
        self._plays: dict[Any, Play] = {}
        self._packs: dict[Any, Pack] = {}
        self._waiting: dict[str, Waiting] = {}  # by policy
        # actions that the environments' own programs chose
        self._logged: dict[Any, dict[Any, Any]] = {}
        self._actors: dict[str, Actor] = {}
        self._episodes = 0
        self._warned = False  # of rewards that came too late for their rows

    def _renew_actors(self) -> None:
        self._actors = {name: policy.actor() for name, policy in self._policies.items()}

    def _put_no_rows(self) -> None:
        rows = {name: self._finisher.no_rows(name, joint=self._joint) for name in self._policies}
        self._put(rows, 0)

    # one round

    def _round(self) -> None:
        try:
            with self._recorder.timed("env_wait"):
                poll = self._env.poll()
        except Exception as error:
            self._stop_with(error)
            return
        for env_id, obs in poll[0].items():
            if isinstance(obs, Exception):
                self._mend(env_id, obs)
            else:
                self._take(env_id, EnvNews(*(part.get(env_id, {}) for part in poll)))
        with self._recorder.timed("inference"):
            actions = self._act()
        if actions:
            self._env.send_actions(actions)
        self._recorder.round_done()

    def _stop_with(self, error: Exception) -> None:
        """Stop: return the complete rows first, then raise the error."""
        self._stopped_by, self._has_ended = error, True
        for env_id, play in self._plays.items():
            self._close(play, self._pack_of(env_id))
        self._plays.clear()
        for key in list(self._packs):
            self._flush(key)

    def _mend(self, env_id: Any, error: Exception) -> None:
        """Drop a failed env's episode, restart the env, and begin another episode."""
        if self._plays.pop(env_id, None) is not None:
            self._restarts.discarded += 1
        while True:
            self._restarts.failed(env_id, error)
            try:
                self._env.try_restart(env_id)
                began = self._env.try_reset(env_id)
            except Exception as another:
                error = another
                continue
            if began is not None:
                self._begin_from(env_id, began)
            return

    def _begin_from(self, env_id: Any, began: tuple[dict[Any, Any], dict[Any, Any]]) -> None:
        obs, infos = began
        self._take(env_id, EnvNews(obs.get(env_id, {}), infos=infos.get(env_id, {})))

    def _take(self, env_id: Any, news: EnvNews) -> None:
        """Process one env's results."""
        play = self._plays.get(env_id)
        fresh = play is None
        if play is None:
            play = self._new_play(env_id)
        if any(map(is_excluded, news.infos.values())):
            play.kept = False
        raw, news.obs = news.obs, self._observed(news.obs, play.episode)
        if fresh:
            self._note(play, news)
            self._callbacks.on_episode_start(**self._hook(play.episode, self._env))
        else:
            play.episode.length += 1
            play.env_steps += 1
        over = any(news.over)
        reached = play.episode.length >= self._rules.horizon and not over and not fresh
        ended = self._outcomes(play, news, reached)
        if not fresh:
            self._note(play, news)
            if self._watched:
                self._callbacks.on_episode_step(**self._hook(play.episode, self._env))
        if over or reached:
            going_on = {agent: seen for agent, seen in raw.items() if agent not in ended}
            soft = reached and self._rules.soft_horizon
            self._end(env_id, play, going_on, soft=soft)
            return
        pack = self._pack_of(env_id)
        steps = play.env_steps + (pack.env_steps if play.kept else 0)
        if self._rules.truncates and steps >= self._rules.fragment:
            self._close(play, pack)
            if play.kept:
                self._flush(env_id)
        self._want_actions(env_id, news, ended)

    def _observed(self, obs: dict[Any, Any], episode: RolloutEpisode) -> dict[Any, Any]:
        if self._observation_fn is None:
            return obs
        seen = self._observation_fn(
            agent_obs=obs,
            worker=self._finisher.worker,
            base_env=self._env,
            policies=self._policies,
            episode=episode,
        )
        if not isinstance(seen, dict):
            raise ValueError(f"observation_fn: expected a dict by agent, got {type(seen).__name__}")
        return seen

    def _outcomes(self, play: Play, news: EnvNews, reached: bool) -> set[Any]:
        """Complete the rows that the results belong to; return the agents that have ended."""
        for agent, reward in news.rewards.items():
            rows = play.agents.get(agent)
            if rows is not None and (rows.open or reward):
                row = rows.open or rows.last
                if row is not None:
                    row.columns[REWARDS] += reward
                elif play.kept:
                    self._tell_late(play.episode, agent, reward)
                play.episode.add_reward(agent, reward)
        ended = set()
        for agent, rows in play.agents.items():
            own = bool(news.terminateds.get(agent)), bool(news.truncateds.get(agent))
            flags = own if any(own) else news.over
            if any(own):
                ended.add(agent)
            if rows.open is None or not (agent in news.obs or any(flags) or reached):
                continue
            if agent not in news.obs and any(news.over) and not any(own):
                self._require_no_last(play, agent)
            count = np.array([play.episode.length])
            flag = [np.array([one], np.bool_) for one in flags]
            ends = self._rules.ends(count, flag[0], flag[1])
            result = {
                INFOS: without_marker(news.infos.get(agent, {})),
                CUT: ends.cuts[0],
                TERMINATEDS: ends.terminateds[0],
                TRUNCATEDS: ends.truncateds[0],
            }
            if any(news.over) or reached:
                result[AGENTS] = len(play.agents)
            rows.complete(news.obs.get(agent), result)
        return ended

    def _tell_late(self, episode: RolloutEpisode, agent: Any, reward: float) -> None:
        """Count a reward for an agent that has ended, and whose rows were already returned."""
        metrics = episode.custom_metrics
        metrics["late_reward"] = metrics.get("late_reward", 0.0) + reward
        if not self._warned:
            self._warned = True
            _log.warning(
                "episode %s: agent %r has ended and was paid %g after its last row was handed "
                "out: no row has it, the metric late_reward counts it; "
                'batch_mode="complete_episodes" keeps rows until the episode ends',
                episode.episode_id,
                agent,
                reward,
            )

    def _require_no_last(self, play: Play, agent: Any) -> None:
        """Raise ValueError for an env that we step: it has to give this last observation."""
        if self._env.can_reset and not self._rules.no_done_at_end:
            raise ValueError(
                f"episode {play.episode.episode_id}: it ended for all agents, but the last "
                f"observation of agent {agent!r} is missing: an env that sets "
                '"__all__" has to give the last observations of all live agents'
            )

    def _want_actions(self, env_id: Any, news: EnvNews, ended: set[Any]) -> None:
        """Collect the agents that wait for an action."""
        play = self._plays[env_id]
        if news.logged:
            self._logged[env_id] = dict(news.logged)
        for agent, seen in news.obs.items():
            if agent in ended:
                continue
            policy_id = play.episode.policy_for(agent)
            if agent not in play.agents:
                play.agents[agent] = AgentRows(self._columns_of(policy_id))
                play.states[agent] = self._policies[policy_id].initial_state()
            self._waiting.setdefault(policy_id, []).append((env_id, agent, seen))

    def _columns_of(self, policy_id: str) -> RowColumns:
        if policy_id not in self._columns:
            layout = self._finisher.layout(policy_id, joint=self._joint)
            self._columns[policy_id] = RowColumns(self._policies[policy_id].spec, layout)
        return self._columns[policy_id]

    # acting

    def _act(self) -> dict[Any, dict[Any, Any]]:
        """Choose an action for every waiting agent: env id -> agent id -> action."""
        sent: dict[Any, dict[Any, Any]] = {}
        waiting, self._waiting = self._waiting, {}
        for policy_id, asked in waiting.items():
            policy = self._policies[policy_id]
            observations = [seen for _, _, seen in asked]
            flat = policy.flatten(observation_columns(policy.spec.observation, observations))
            if self._finisher.trains(policy_id):
                kept = [self._plays[env_id].kept for env_id, _, _ in asked]
                policy.filter.push(
                    policy.spec.flattener.features_of(flat[np.array(kept, np.bool_)])
                )
            actions, states = self._forward(policy_id, policy.filter(flat), asked)
            stored, to_env = actions.actions, actions.actions_env
            version = self._actors[policy_id].version
            for i, (env_id, agent, seen) in enumerate(asked):
                play, action = self._plays[env_id], stored[i]
                acted = to_env[i] if self._clip else action
                row = {f"state_in_{k}": state[i] for k, state in enumerate(states)}
                row |= {ACTION_LOGP: actions.logp[i], ACTION_DIST_INPUTS: actions.dist_inputs[i]}
                row |= {POLICY_VERSION: version, ENV_T: play.episode.length}
                logged = self._logged.get(env_id, {}).get(agent)
                if logged is not None:  # the environment's own program has acted
                    action = acted = logged.action
                    row[ACTION_LOGP] = np.nan if logged.logp is None else logged.logp
                    row[ACTION_DIST_INPUTS] = np.nan
                    row |= {POLICY_VERSION: logged.version, SOURCE: "logged"}
                play.agents[agent].begin(seen, action, acted, row)
                sent.setdefault(env_id, {})[agent] = acted
        self._logged.clear()
        return sent

    def _forward(self, policy_id: str, flat: Any, asked: Waiting) -> tuple[Actions, list[Any]]:
        actor = self._actors[policy_id]
        policy = self._policies[policy_id]
        explore, initial = self._explore and policy.settings.explore, policy.initial_state()
        if not initial:
            return actor.act(flat, self._rng, explore=explore), []
        mine = [self._plays[env_id].states[agent] for env_id, agent, _ in asked]
        states = [np.stack([one[i] for one in mine]) for i in range(len(initial))]
        recurrent: Any = actor
        actions, after = recurrent.act(flat, self._rng, explore=explore, state=states)
        for row, (env_id, agent, _) in enumerate(asked):
            self._plays[env_id].states[agent] = [state[row] for state in after]
        return actions, states

    # episodes

    def _new_play(self, env_id: Any) -> Play:
        episode = RolloutEpisode(env_id, self._policy_of, worker=self._finisher.worker)
        play = self._plays[env_id] = Play(episode, self._episodes)
        self._episodes += 1
        return play

    def _note(self, play: Play, news: EnvNews) -> None:
        for agent, seen in news.obs.items():
            rows = play.agents.get(agent)
            last = rows.last if rows is not None else None
            action = None if last is None else last.action
            play.episode.policy_for(agent)
            play.episode.note(agent, seen, action, news.infos.get(agent, {}))

    def _end(self, env_id: Any, play: Play, going_on: dict[Any, Any], *, soft: bool) -> None:
        """End the episode.

        With a soft horizon the env continues under a new id. `going_on`: the agents that continue,
        with their observations.
        """
        self._callbacks.on_episode_end(**self._hook(play.episode, self._env))
        self._recorder.add(play.episode.metrics(self._recorder.perf_stats()))
        self._restarts.progressed(env_id)
        self._played += 1
        pack = self._pack_of(env_id)
        self._close(play, pack)
        if not self._rules.truncates or pack.env_steps >= self._rules.fragment:
            self._flush(env_id)
        del self._plays[env_id]
        if soft:
            self._take(env_id, EnvNews(going_on))
            self._plays[env_id].states |= play.states
            return
        began = self._env.try_reset(env_id)
        if began is not None:
            self._begin_from(env_id, began)

    # fragments

    def _pack_of(self, env_id: Any) -> Pack:
        """The pack for the env's rows; envs that come and go share one."""
        return self._packs.setdefault(env_id if self._env.can_reset else None, Pack())

    def _close(self, play: Play, pack: Pack) -> None:
        """Postprocess the complete rows of an episode and pack them, by policy."""
        taken = {agent: rows.take() for agent, rows in play.agents.items() if len(rows)}
        env_steps, play.env_steps = play.env_steps, 0
        segment = [EpisodeSegment(0, play.episode.episode_id, play.number)]
        if play.kept:
            pack.env_steps += env_steps
        else:
            self._excluded_steps += env_steps
            if self.excluded is None:
                return
        runs = {}
        for agent, columns in taken.items():
            if not columns["cut"][-1]:
                columns["cut"][-1] = FRAGMENT_CUT
            policy_id = play.episode.policy_for(agent)
            batch = self._finisher.identified(
                columns, segment, policy_id=policy_id, agent_id=str(agent)
            )
            if not play.kept and self.excluded is not None:
                batch[TRAINING_ENABLED] = np.zeros(batch.count, np.bool_)
                self.excluded(batch)
            else:
                runs[agent] = (policy_id, batch)
        for policy_id, rows in self._finisher.finish(runs, play.episode).values():
            pack.by_policy.setdefault(policy_id, []).append(rows)

    def _flush(self, env_id: Any) -> None:
        """Return the packed rows; env steps without a complete row count for the next fragment."""
        pack = self._pack_of(env_id)
        if not pack.by_policy:
            return
        joined = {name: concat_samples(alike(rows)) for name, rows in pack.by_policy.items()}
        env_steps, pack.env_steps, pack.by_policy = pack.env_steps, 0, {}
        self._put(joined, env_steps)

    def _put(self, by_policy: Mapping[str, SampleBatch], env_steps: int) -> None:
        if set(self._policies) == {DEFAULT_POLICY}:
            self._ready.append(MultiAgentBatch.wrap_as_needed(by_policy, env_steps))
        else:
            self._ready.append(MultiAgentBatch(by_policy, env_steps))
