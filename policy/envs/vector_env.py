"""N copies of a single-agent gymnasium environment, stepped as columns.

`LocalCopies` steps them one by one in this process. `ProcessCopies` has one process for each, and
continues as soon as one of them is ready and `wait_ms` for others have passed. Both reset a copy
only when requested: there is no autoreset, hence no dummy step, and the observation after a step is
always the real one.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from typing import Any, Protocol

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from policy.envs.env_runner import ENV_STEP_FAILURE
from policy.inference.preprocessors import leaf_values
from storage.spaces.descriptors import Space
from storage.spaces.gymnasium_spaces import from_gym
from storage.spaces.leaves import leaves

Array = npt.NDArray[Any]
Index = npt.NDArray[np.intp]
FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]


class Observations:
    """The latest observation of each of N copies, as columns: leaf path -> (N, *shape)."""

    def __init__(self, space: Space, copies: int) -> None:
        self.space = space
        self.columns: dict[str, Array] = {
            leaf.path: np.zeros(
                (copies, *(() if leaf.is_text else leaf.shape)),
                object if leaf.is_text else leaf.dtype,
            )
            for leaf in leaves(space)
        }
        self._only = self.columns[""] if list(self.columns) == [""] else None
        self._paths = list(self.columns)

    def write(self, copy: int, value: Any) -> None:
        """Store a copy's observation; raises SpaceError or ValueError if it does not fit."""
        if self._only is not None:
            if np.shape(value) != self._only.shape[1:]:
                raise ValueError(
                    f"env copy {copy}: expected an observation of shape {self._only.shape[1:]}, "
                    f"got {np.shape(value)}"
                )
            self._only[copy] = value
            return
        items = leaf_values(self.space, value, f"env copy {copy}: observation")
        for path, item in zip(self._paths, items, strict=True):
            self.columns[path][copy] = item

    def take(self, copies: Index) -> dict[str, Array]:
        """Columns (M, *shape) of the copies `copies` (M,), copied."""
        return {path: column[copies] for path, column in self.columns.items()}


@dataclass(slots=True)
class Stepped:
    """The results of copies: a step of each copy in `index` (M,).

    Other copies have a first observation (`begun`) or failed (`failed`): those were replaced, have
    to be reset, and their episodes are lost.
    """

    index: Index
    rewards: FloatArray
    terminateds: BoolArray
    truncateds: BoolArray
    infos: list[dict[str, Any]]
    failed: list[int] = field(default_factory=list)
    begun: list[int] = field(default_factory=list)


class Copies(Protocol):
    """N copies; `observations` are overwritten by each step or reset."""

    observations: Observations
    first_infos: dict[int, Mapping[str, Any]]  # of resets, by copy, until the caller takes them

    @property
    def envs(self) -> Sequence[Any]:
        """The environments that are stepped, in order."""
        ...

    def reset(self, copies: Sequence[int]) -> list[int]:
        """Begin an episode in each; return those whose first observation is available already."""

    def step(self, copies: Index, actions: Sequence[Any]) -> Stepped:
        """Act in M copies, and return the results that any copy has.

        A copy whose last step has not returned must not get an action.
        """

    def close(self) -> None: ...


def _stepped(results: list[tuple[int, Any]]) -> Stepped:
    count = len(results)
    done = Stepped(
        np.empty(count, np.intp),
        np.empty(count),
        np.empty(count, np.bool_),
        np.empty(count, np.bool_),
        [],
    )
    for row, (copy, (_, reward, terminated, truncated, info)) in enumerate(results):
        done.index[row], done.rewards[row] = copy, reward
        done.terminateds[row], done.truncateds[row] = terminated, truncated
        done.infos.append(info)
    return done


class LocalCopies:
    """Copies in this process. The runner's `try_step` and `try_reset` handle failures."""

    def __init__(
        self,
        envs: list[gym.Env[Any, Any]],
        *,
        try_step: Callable[..., Any],
        try_reset: Callable[..., tuple[Any, Any]],
        seeds: Sequence[int | None],
    ) -> None:
        self.envs = envs
        self.observations = Observations(from_gym(envs[0].observation_space), len(envs))
        self.first_infos: dict[int, Mapping[str, Any]] = {}
        self._try_step, self._try_reset = try_step, try_reset
        self._seeds: dict[int, int | None] = dict(enumerate(seeds))

    def reset(self, copies: Sequence[int]) -> list[int]:
        for copy in copies:
            obs, info = self._try_reset(copy=copy, seed=self._seeds.pop(copy, None))
            self.first_infos[copy] = info
            self.observations.write(copy, obs)
        return list(copies)

    def step(self, copies: Index, actions: Sequence[Any]) -> Stepped:
        results, failed = [], []
        write, try_step = self.observations.write, self._try_step
        for copy, action in zip(copies.tolist(), actions, strict=True):
            result = try_step(action, copy=copy)
            if result is ENV_STEP_FAILURE:
                failed.append(copy)
                continue
            write(copy, result[0])
            results.append((copy, result))
        done = _stepped(results)
        done.failed = failed
        return done

    def close(self) -> None:
        for env in self.envs:
            env.close()


class ProcessCopies:
    """One process per copy, each a gymnasium AsyncVectorEnv of one without autoreset.

    `restart(copy, error)` limits failures: it raises, or replaces the copy through `remake`.
    """

    def __init__(
        self,
        makers: Sequence[Callable[[], gym.Env[Any, Any]]],
        *,
        restart: Callable[[int, Exception], None],
        wait_ms: float,
        seeds: Sequence[int | None],
    ) -> None:
        self._makers, self._restart, self._wait = makers, restart, wait_ms / 1000.0
        self._seeds: dict[int, int | None] = dict(enumerate(seeds))
        self.envs: list[Any] = [self._make(maker) for maker in makers]
        self.observations = Observations(
            from_gym(self.envs[0].single_observation_space), len(makers)
        )
        self.first_infos: dict[int, Mapping[str, Any]] = {}
        # copy -> "step" or "reset", while its result is outstanding
        self._asked: dict[int, str] = {}

    @staticmethod
    def _make(maker: Callable[[], gym.Env[Any, Any]]) -> Any:
        disabled = gym.vector.AutoresetMode.DISABLED
        return gym.vector.AsyncVectorEnv([maker], autoreset_mode=disabled)

    def remake(self, copy: int) -> None:
        """Replace the copy's process by a new one."""
        _close_quietly(self.envs[copy])
        self.envs[copy] = self._make(self._makers[copy])

    def reset(self, copies: Sequence[int]) -> list[int]:
        for copy in copies:
            self._ask(copy, "reset")
        return []

    def _ask(self, copy: int, what: str, action: Any = None) -> None:
        env = self.envs[copy]
        try:
            if what == "reset":
                env.reset_async(seed=self._seeds.pop(copy, None))
            else:
                env.step_async(_of_one(env, action))
        except Exception as error:  # the process has ended, and its pipe is closed
            self._restart(copy, error)
            self._asked[copy] = "failed"
        else:
            self._asked[copy] = what

    def step(self, copies: Index, actions: Sequence[Any]) -> Stepped:
        for copy, action in zip(copies.tolist(), actions, strict=True):
            self._ask(copy, "step", action)
        results: list[tuple[int, Any]] = []
        failed, begun = [], []
        for copy in self._ready():
            what = self._asked.pop(copy)
            try:
                answer = self._answer(copy, what)
            except Exception as error:
                self._restart(copy, error)
                answer = None
            if answer is None:
                failed.append(copy)
            elif what == "reset":
                begun.append(copy)
            else:
                results.append((copy, answer))
        done = _stepped(results)
        done.failed, done.begun = failed, begun
        return done

    def _ready(self) -> list[int]:
        """The copies that have a result: waits for one, then for others for at most the wait."""
        failed = [copy for copy, what in self._asked.items() if what == "failed"]
        pipes = {
            self.envs[copy].parent_pipes[0]: copy
            for copy, what in self._asked.items()
            if what != "failed"
        }
        found: list[Any] = []
        timeout: float | None = 0.0 if failed else None
        while len(found) < len(pipes):
            more = wait([pipe for pipe in pipes if pipe not in found], timeout)
            if not more:
                break
            found += more
            timeout = self._wait
        return sorted([*failed, *(pipes[pipe] for pipe in found)])

    def _answer(self, copy: int, what: str) -> Any:
        """A step's five results, or True after a reset; None if the copy had failed before."""
        env = self.envs[copy]
        if what == "failed":
            return None
        if what == "reset":
            obs, infos = env.reset_wait()
            self.first_infos[copy] = _info(infos)
            self.observations.write(copy, _first(env, obs))
            return True
        obs, rewards, terminateds, truncateds, infos = env.step_wait()
        self.observations.write(copy, _first(env, obs))
        return obs, rewards[0], terminateds[0], truncateds[0], _info(infos)

    def close(self) -> None:
        for env in self.envs:
            _close_quietly(env)


def _close_quietly(env: Any) -> None:
    """End a copy's process, whatever it is doing.

    gymnasium warns of an outstanding result, which is not needed any more.
    """
    with contextlib.suppress(Exception), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        env.close(terminate=True)
    for process in env.processes:  # closing fails half way if a process had died
        process.terminate()
        process.join()
    env.closed = True


def _info(infos: Mapping[str, Any]) -> dict[str, Any]:
    """The info of the single environment in a vector."""
    return {key: value[0] for key, value in infos.items() if not key.startswith("_")}


def _first(env: Any, obs: Any) -> Any:
    """The observation of the single environment in a vector."""
    return next(iter(gym.vector.utils.iterate(env.observation_space, obs)))


def _of_one(env: Any, action: Any) -> Any:
    """An action in the form for a vector of one."""
    space = env.single_action_space
    utils = gym.vector.utils
    empty: Any = utils.create_empty_array(space, 1)
    return utils.concatenate(space, [action], empty)
