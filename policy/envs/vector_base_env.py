"""A gymnasium vector environment behind the BaseEnv protocol, for every autoreset mode.

A poll never contains a dummy step. The modes differ in when the next episode's first observation is
available (https://farama.org/Vector-Autoreset-Mode):

- `NEXT_STEP`: with the vector's next step, which ignores that env's action. `try_reset` returns
  None, and the observation comes with a later poll, without a reward.
- `SAME_STEP`: with the step that ended the episode. The poll has the final observation, and
  `try_reset` returns the new one.
- `DISABLED`: when `try_reset` requests it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import deepcopy
from typing import Any, TypeAlias

import gymnasium as gym
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from gymnasium.vector.utils import concatenate, create_empty_array, iterate

from storage.experience.episode import ALL_AGENTS, DEFAULT_AGENT

_Dicts: TypeAlias = dict[Any, Any]
_News: TypeAlias = tuple[_Dicts, _Dicts, _Dicts, _Dicts, _Dicts, _Dicts]


class VectorBaseEnv:
    """`env.num_envs` environments that step together; env ids are 0, 1, 2, ...

    An exception of the vector is raised: it is unknown which of its environments failed.
    """

    def __init__(
        self, env: gym.vector.VectorEnv[Any, Any, Any], *, seed: int | None = None
    ) -> None:
        self.env = env
        self.observation_space = env.single_observation_space
        self.action_space = env.single_action_space
        self.autoreset_mode = AutoresetMode(env.metadata.get("autoreset_mode", "NextStep"))
        self._seed = seed
        self._owns_results = bool(getattr(env, "copy", False))
        self._masks = self.autoreset_mode is AutoresetMode.DISABLED or isinstance(
            env.unwrapped, (SyncVectorEnv, AsyncVectorEnv)
        )
        self._started = False
        self._ended: set[int] = set()  # episode over, and the next one has not begun
        self._new: dict[int, tuple[Any, dict[str, Any]]] = {}  # begun within the last step
        # the action for envs that ignore it
        self._filler = next(
            iter(iterate(env.action_space, create_empty_array(self.action_space, env.num_envs)))
        )
        self._news: _News | None = None

    @property
    def num_envs(self) -> int:
        return int(self.env.num_envs)

    @property
    def can_reset(self) -> bool:
        return self._masks

    def poll(self) -> _News:
        """The results of the last step; the first call resets the vector."""
        if not self._started:
            self._started = True
            obs, infos = self.env.reset(seed=self._seed)
            return self._tell_first(self._rows(obs), infos, range(self.num_envs))
        if self._news is None and self._resets_itself and len(self._ended) == self.num_envs:
            self.send_actions({})  # no env waits for an action: the next step begins all episodes
        if self._news is None:
            raise RuntimeError("poll: no actions were sent since the last poll")
        news, self._news = self._news, None
        return news

    def send_actions(self, actions: Mapping[Any, Mapping[Any, Any]]) -> None:
        """Step the vector. Raises ValueError unless every waiting env has its action."""
        self._require_all(actions)
        obs, rewards, terminated, truncated, infos = self.env.step(self._batch(actions))
        rows = self._rows(obs)
        begun, self._ended = self._ended, set()
        news = self._tell_first(rows, infos, begun)
        for i in range(self.num_envs):
            if i not in begun:
                ends = bool(terminated[i]), bool(truncated[i])
                obs, info = self._result(i, rows[i], infos, any(ends))
                _tell(news, i, obs, float(rewards[i]), *ends, info)
        self._news = news

    def try_reset(self, env_id: Any) -> tuple[_Dicts, _Dicts] | None:
        """The first observation of the env's next episode; None if it comes with a later poll."""
        if env_id in self._new:
            obs, info = self._new.pop(env_id)
        elif not self._masks or (env_id in self._ended and self._resets_itself):
            return None
        else:
            mask = np.arange(self.num_envs) == env_id
            obs, infos = self.env.reset(options={"reset_mask": mask})
            obs, info = self._rows(obs)[env_id], _info_of(infos, env_id)
        self._ended.discard(env_id)
        return {env_id: {DEFAULT_AGENT: obs}}, {env_id: {DEFAULT_AGENT: info}}

    def try_restart(self, env_id: Any) -> None:
        """Always raises RuntimeError: one environment of a vector cannot be replaced."""
        raise RuntimeError(f"env {env_id}: one environment of a vector cannot be made anew")

    def stop(self) -> None:
        """Close the vector."""
        self.env.close()

    # inside

    @property
    def _resets_itself(self) -> bool:
        return self.autoreset_mode is AutoresetMode.NEXT_STEP

    def _require_all(self, actions: Mapping[Any, Mapping[Any, Any]]) -> None:
        waiting = set(range(self.num_envs)) - self._ended
        if self._ended and not self._resets_itself:
            raise ValueError(
                f"send_actions: expected a reset of the ended envs {sorted(self._ended)} first"
            )
        got = {env_id: set(by_agent) for env_id, by_agent in actions.items()}
        if got != {env_id: {DEFAULT_AGENT} for env_id in waiting}:
            raise ValueError(
                f"send_actions: a vector steps as one: expected actions of {DEFAULT_AGENT!r} of "
                f"the envs {sorted(waiting)}, got {got}"
            )

    def _batch(self, actions: Mapping[Any, Mapping[Any, Any]]) -> Any:
        """One action per row; an env that begins an episode ignores its row."""
        rows = [
            actions[i][DEFAULT_AGENT] if i in actions else self._filler
            for i in range(self.num_envs)
        ]
        batch: Any = create_empty_array(self.action_space, len(rows))
        return concatenate(self.action_space, rows, batch)

    def _rows(self, obs: Any) -> list[Any]:
        """Observations by env, copied unless the vector does not reuse its buffer."""
        own = obs if self._owns_results else deepcopy(obs)
        return list(iterate(self.env.observation_space, own))

    def _result(self, i: int, obs: Any, infos: _Dicts, over: bool) -> tuple[Any, dict[str, Any]]:
        """(observation, info) of env `i` after its action."""
        info = _info_of(infos, i)
        if not over:
            return obs, info
        self._ended.add(i)
        if self.autoreset_mode is not AutoresetMode.SAME_STEP:
            return obs, info
        final_obs, final_info = info.pop("final_obs"), info.pop("final_info", {})
        self._new[i] = (obs, info)
        return final_obs, final_info

    def _tell_first(self, rows: list[Any], infos: _Dicts, begun: Iterable[int]) -> _News:
        news: _News = {}, {}, {}, {}, {}, {}
        for i in begun:
            _tell(news, i, rows[i], 0.0, False, False, _info_of(infos, i))
        return news


def _tell(
    news: _News, i: int, obs: Any, reward: float, terminated: bool, truncated: bool, info: _Dicts
) -> None:
    news[0][i] = {DEFAULT_AGENT: obs}
    news[1][i] = {DEFAULT_AGENT: reward}
    news[2][i] = {DEFAULT_AGENT: terminated, ALL_AGENTS: terminated}
    news[3][i] = {DEFAULT_AGENT: truncated, ALL_AGENTS: truncated}
    news[4][i] = {DEFAULT_AGENT: info}


def _info_of(infos: _Dicts, i: int) -> _Dicts:
    """One environment's info from a vector's, in which `_key` marks the envs that have a key."""
    found: _Dicts = {}
    for key, values in infos.items():
        mask = infos.get(f"_{key}")
        if mask is not None and mask[i]:
            found[key] = _info_of(values, i) if isinstance(values, dict) else values[i]
    return found
