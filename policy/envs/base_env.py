"""BaseEnv: the one protocol through which a worker steps any environment.

    env = to_base_env(make_env(0), num_envs=4, make_env=make_env, seed=7)
    while collecting:
        obs, rewards, terminateds, truncateds, infos, off_policy = env.poll()
        for env_id in obs: ...                 # choose an action for every agent that waits
        env.send_actions({env_id: {agent_id: action}})
        obs, infos = env.try_reset(env_id)     # once terminateds or truncateds has "__all__"

There are three kinds of environments. gymnasium's are one, several or a vector (adapted in
`policy.envs.vector_base_env`). Multi-agent environments use dicts by agent, as PettingZoo's
parallel ones do. `ExternalEnv` adapts programs that call us, and start and end episodes at any
time.

**A poll** returns six dicts, each keyed env id -> agent id; they contain only envs with something
new.

- `obs`: the agent's current observation. An agent that is in `obs` and whose episode continues
  waits for one action. A final observation may be absent: then its agent is not in `obs[env_id]`.
  Instead of a dict of agents, `obs[env_id]` may be the **exception** that the environment raised:
  its episode is to be discarded, and `try_restart`, then `try_reset`, begin another.
- `rewards` (float), `infos` (dict): the results of the agent's previous action, 0.0 and {} by
  default for every agent that any of the five dicts names. At a first observation both have no
  meaning.
- `terminateds`, `truncateds` (bool): the agent's own; the key `ALL_AGENTS`, always present in both,
  says whether the whole episode is over.
- `off_policy_actions`: a `storage.experience.episode.LoggedAction` if the environment's own program
  has already acted. The worker records it; an action that is sent for such an agent is ignored.

`infos[env_id][agent_id]["training_enabled"]` is False in every poll of an episode that readers are
to skip: learners do not get its rows, and an output writer gets them marked. The worker reads this
key and does not store it as an info. A gymnasium environment sets it in the info of a reset or
step.

`send_actions` needs an action for every waiting agent of each env that it names, and leaves other
envs alone; a gymnasium vector steps as a whole and needs all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

import gymnasium as gym

from policy.envs.vector_base_env import VectorBaseEnv
from storage.experience.episode import ALL_AGENTS, DEFAULT_AGENT

MultiEnvDict: TypeAlias = dict[Any, Any]
"""env id -> agent id -> value."""
Poll: TypeAlias = tuple[
    MultiEnvDict, MultiEnvDict, MultiEnvDict, MultiEnvDict, MultiEnvDict, MultiEnvDict
]
Spaces: TypeAlias = Any


@runtime_checkable
class BaseEnv(Protocol):
    """The interface of environments to a worker. Implementations do not have to import it.

    `observation_space` and `action_space` are one agent's spaces, as the environment declares them:
    gymnasium's or Headrace's descriptors. They are a mapping agent id -> space if agents differ, or
    a function of the agent if the agents cannot be listed.
    """

    observation_space: Spaces
    action_space: Spaces

    @property
    def can_reset(self) -> bool:
        """Whether `try_reset` can end an unfinished episode, as a horizon requires."""
        ...

    def poll(self) -> Poll:
        """Return everything new; wait until there is something. Raises if nothing can come."""
        ...

    def send_actions(self, actions: Mapping[Any, Mapping[Any, Any]]) -> None:
        """Act: env id -> agent id -> action. The results are in the next poll."""
        ...

    def try_reset(self, env_id: Any) -> tuple[MultiEnvDict, MultiEnvDict] | None:
        """Begin the next episode: (obs, infos), each `{env_id: {agent_id: ...}}`.

        None if the environment begins episodes itself: the next one comes with a later poll.
        """
        ...

    def try_restart(self, env_id: Any) -> None:
        """Replace the environment after it failed. Raises RuntimeError if that is impossible."""
        ...

    def stop(self) -> None:
        """Close everything; may be called again."""
        ...


def require_reset_support(env: BaseEnv, horizon: float | None) -> None:
    """Raise ValueError if a horizon is set for an environment that cannot be reset."""
    if horizon is not None and horizon != float("inf") and not env.can_reset:
        raise ValueError("Setting episode horizon requires reset() support from the environment.")


def to_base_env(
    env: Any,
    *,
    num_envs: int = 1,
    make_env: Callable[[int], Any] | None = None,
    seed: int | None = None,
) -> BaseEnv:
    """Adapt an environment to the protocol.

    Args:
        env: a gymnasium Env or VectorEnv; a multi-agent environment whose reset and step use dicts
            by agent, with "__all__" or an attribute `agents` that is empty at the end;
            anything with `to_base_env(num_envs)`; or a BaseEnv already.
        num_envs: copies to step; `make_env(i)` makes the others, and replaces one that failed.
        seed: copy i is first reset with seed + i; None: without a seed.

    Raises ValueError for a number that the environment does not allow, and TypeError for anything
    that is not an environment.
    """
    if num_envs < 1:
        raise ValueError(f"num_envs: expected 1 or more, got {num_envs}")
    if isinstance(env, BaseEnv):
        return env
    if hasattr(env, "to_base_env"):
        return _checked(env.to_base_env(num_envs))
    if isinstance(env, gym.vector.VectorEnv):
        if num_envs not in (1, env.num_envs):
            raise ValueError(f"num_envs: expected {env.num_envs} of the vector, got {num_envs}")
        return VectorBaseEnv(env, seed=seed)
    if num_envs > 1 and make_env is None:
        raise ValueError(f"num_envs: {num_envs} copies need make_env")
    copies = [env, *(make_env(i) for i in range(1, num_envs) if make_env is not None)]
    return SteppedBaseEnv(copies, make_env=make_env, seed=seed)


def _checked(env: Any) -> BaseEnv:
    if not isinstance(env, BaseEnv):
        raise TypeError(f"to_base_env(): expected an object with poll and send_actions, got {env}")
    return env


class SteppedBaseEnv:
    """Environments stepped one by one; env ids are 0, 1, 2, ...

    A gymnasium Env has one agent, `storage.experience.episode.DEFAULT_AGENT`. An env for which no
    action was sent is not stepped. An exception in one env is returned to the worker as its `obs`;
    the others continue.
    """

    def __init__(
        self,
        envs: Sequence[Any],
        *,
        make_env: Callable[[int], Any] | None = None,
        seed: int | None = None,
    ) -> None:
        self._envs = [_by_agent(env) for env in envs]
        self._make_env = make_env
        self._seeds: dict[int, int] = (
            {} if seed is None else {i: seed + i for i in range(len(envs))}
        )
        self._waiting: dict[int, set[Any]] = {}  # env id -> agents that wait for an action
        self._poll: Poll = _nothing()
        self._started = False
        self.observation_space, self.action_space = self._envs[0].spaces()

    @property
    def can_reset(self) -> bool:
        return True

    @property
    def num_envs(self) -> int:
        return len(self._envs)

    def sub_environments(self) -> list[Any]:
        """The environments as they were given."""
        return [env.env for env in self._envs]

    def poll(self) -> Poll:
        """The results of the actions that were sent; the first call resets every env."""
        if not self._started:
            self._started = True
            for env_id in range(len(self._envs)):
                self._begin(env_id)
        news, self._poll = self._poll, _nothing()
        if not news[0]:
            raise RuntimeError("poll: no env was sent an action or reset since the last poll")
        return news

    def _begin(self, env_id: int) -> None:
        try:
            obs, infos = self._reset(env_id)
        except Exception as error:
            self._poll[0][env_id] = error
            return
        self._put(env_id, obs, {}, {}, {}, infos)

    def _reset(self, env_id: int) -> tuple[dict[Any, Any], dict[Any, Any]]:
        obs, infos = self._envs[env_id].reset(self._seeds.pop(env_id, None))
        self._waiting[env_id] = set(obs)
        return obs, {agent: dict(infos.get(agent) or {}) for agent in obs}

    def send_actions(self, actions: Mapping[Any, Mapping[Any, Any]]) -> None:
        """Step every env that is named. Raises ValueError for envs or agents that do not wait."""
        for env_id, by_agent in actions.items():
            waiting = self._waiting.get(env_id)
            if not waiting or set(by_agent) != waiting:
                raise ValueError(
                    f"send_actions: env {env_id!r}: expected actions of the agents "
                    f"{sorted(map(str, waiting or ()))}, got {sorted(map(str, by_agent))}"
                )
        for env_id, by_agent in actions.items():
            try:
                self._put(env_id, *self._envs[env_id].step(dict(by_agent)))
            except Exception as error:
                self._waiting.pop(env_id, None)
                self._poll[0][env_id] = error

    def _put(
        self,
        env_id: int,
        obs: dict[Any, Any],
        rewards: dict[Any, Any],
        terminateds: dict[Any, Any],
        truncateds: dict[Any, Any],
        infos: dict[Any, Any],
    ) -> None:
        """Add one env's results to the next poll, with defaults for every agent."""
        agents = dict.fromkeys([*obs, *rewards, *terminateds, *truncateds, *infos])
        agents.pop(ALL_AGENTS, None)
        agents.pop("__common__", None)
        over = terminateds.get(ALL_AGENTS, False), truncateds.get(ALL_AGENTS, False)
        ended = {a for a in agents if terminateds.get(a) or truncateds.get(a)}
        self._waiting[env_id] = set() if any(over) else set(obs) - ended
        self._poll[0][env_id] = obs
        self._poll[1][env_id] = {a: float(rewards.get(a, 0.0)) for a in agents}
        for i, flags, whole in ((2, terminateds, over[0]), (3, truncateds, over[1])):
            self._poll[i][env_id] = {
                **{a: bool(flags.get(a, False)) for a in agents},
                ALL_AGENTS: bool(whole),
            }
        self._poll[4][env_id] = {a: dict(infos.get(a) or {}) for a in agents}

    def try_reset(self, env_id: Any) -> tuple[MultiEnvDict, MultiEnvDict]:
        """Begin the env's next episode. Passes on the errors of its reset."""
        obs, infos = self._reset(env_id)
        return {env_id: obs}, {env_id: infos}

    def try_restart(self, env_id: Any) -> None:
        """Replace a failed copy by a new one. Raises RuntimeError without `make_env`."""
        if self._make_env is None:
            raise RuntimeError(f"env {env_id}: cannot be made anew without make_env")
        self._waiting.pop(env_id, None)
        _close_quietly(self._envs[env_id].env)
        self._envs[env_id] = _by_agent(self._make_env(env_id))

    def stop(self) -> None:
        """Close every env."""
        for env in self._envs:
            env.close()


def _nothing() -> Poll:
    return {}, {}, {}, {}, {}, {}


class _SingleAgent:
    """A gymnasium Env with the interface of dicts by agent."""

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        self.env = env

    def spaces(self) -> tuple[Spaces, Spaces]:
        return self.env.observation_space, self.env.action_space

    def reset(self, seed: int | None) -> tuple[dict[Any, Any], dict[Any, Any]]:
        obs, info = self.env.reset(seed=seed)
        return {DEFAULT_AGENT: obs}, {DEFAULT_AGENT: info}

    def step(self, actions: dict[Any, Any]) -> tuple[dict[Any, Any], ...]:
        obs, reward, terminated, truncated, info = self.env.step(actions[DEFAULT_AGENT])
        return (
            {DEFAULT_AGENT: obs},
            {DEFAULT_AGENT: reward},
            {DEFAULT_AGENT: terminated, ALL_AGENTS: terminated},
            {DEFAULT_AGENT: truncated, ALL_AGENTS: truncated},
            {DEFAULT_AGENT: info},
        )

    def close(self) -> None:
        self.env.close()


class _DictEnv(Protocol):
    """An environment with dicts by agent; its spaces, `agents` and `close` are optional."""

    def reset(self, *, seed: int | None) -> tuple[Mapping[Any, Any], Mapping[Any, Any]]: ...
    def step(self, actions: dict[Any, Any]) -> tuple[Mapping[Any, Any], ...]: ...


class _ManyAgents:
    """A `_DictEnv`, with or without "__all__"."""

    def __init__(self, env: _DictEnv) -> None:
        self.env = env

    def spaces(self) -> tuple[Spaces, Spaces]:
        return self._spaces_of("observation"), self._spaces_of("action")

    def _spaces_of(self, kind: str) -> Spaces:
        """The space, or the declared mapping of agents to spaces, which agents may join later.

        PettingZoo's environments have a function of the agent; it is returned as it is if the
        agents are not listed.
        """
        by_agent = getattr(self.env, f"{kind}_spaces", None)
        if by_agent is not None:
            return by_agent
        declared = getattr(self.env, f"{kind}_space", None)
        if callable(declared) and hasattr(self.env, "possible_agents"):
            return {agent: declared(agent) for agent in self.env.possible_agents}
        return declared

    def reset(self, seed: int | None) -> tuple[dict[Any, Any], dict[Any, Any]]:
        obs, infos = self.env.reset(seed=seed)
        return dict(obs), dict(infos)

    def step(self, actions: dict[Any, Any]) -> tuple[dict[Any, Any], ...]:
        obs, rewards, terminateds, truncateds, infos = (dict(d) for d in self.env.step(actions))
        if ALL_AGENTS not in terminateds and ALL_AGENTS not in truncateds:
            over = not self._agents()
            cut = over and any(truncateds.values())
            terminateds[ALL_AGENTS], truncateds[ALL_AGENTS] = over and not cut, cut
        return obs, rewards, terminateds, truncateds, infos

    def _agents(self) -> Any:
        if not hasattr(self.env, "agents"):
            raise ValueError(
                f"{type(self.env).__name__}: step: expected {ALL_AGENTS!r} in terminateds or "
                f"truncateds, or an attribute agents, which is empty when the episode is over"
            )
        return self.env.agents

    def close(self) -> None:
        if hasattr(self.env, "close"):
            self.env.close()


def _by_agent(env: Any) -> _SingleAgent | _ManyAgents:
    if hasattr(env, "agent_iter"):
        raise TypeError(
            "expected an environment in which agents act at once; convert this one with "
            "pettingzoo.utils.aec_to_parallel"
        )
    if isinstance(env, gym.Env) and not hasattr(env, "agents"):
        return _SingleAgent(env)
    if callable(getattr(env, "reset", None)) and callable(getattr(env, "step", None)):
        return _ManyAgents(env)
    raise TypeError(
        f"expected a gymnasium Env or VectorEnv, a multi-agent environment with reset and step, "
        f"or an object with to_base_env, got {type(env).__name__}"
    )


def _close_quietly(env: Any) -> None:
    """Close an environment that has failed; further errors are not informative."""
    with contextlib.suppress(Exception):
        env.close()
