"""Sampling from N copies of a single-agent environment, as columns.

Each round acts in all copies that wait, with one forward pass, and writes the results into buffers,
with one call per column. Only the environment's own step is done row by row.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from policy.algorithms.trainable_policy import Actor, TrainablePolicy
from policy.envs.vector_env import Copies, Stepped
from policy.inference.numpy_policy import Actions
from policy.sampling.episode import RolloutEpisode
from policy.sampling.fragment_buffers import CUT, INFOS, FragmentBuffers
from policy.sampling.postprocessing import env_columns
from policy.sampling.sampler import (
    FRAGMENT_CUT,
    TRAINING_ENABLED,
    CutRules,
    Ends,
    Sampler,
    is_excluded,
    without_marker,
)
from storage.experience.episode import DEFAULT_AGENT
from storage.experience.sample_batch import (
    ACTION_DIST_INPUTS,
    ACTION_LOGP,
    NEXT_OBS,
    OBS,
    POLICY_VERSION,
    REWARDS,
    TERMINATEDS,
    TRUNCATEDS,
    T,
)
from storage.spaces.descriptors import Discrete
from storage.spaces.leaves import leaves

Array = npt.NDArray[Any]
Index = npt.NDArray[np.intp]
# the initial capacity for episodes of unknown length; buffers double when it is exceeded
_FIRST_ROOM = 128


class VectorSampler(Sampler):
    """Samples from `copies`; `next_batch` is a fragment of one of them, or a whole episode.

    Batches have `actions_env` columns if clipping changed an action.
    """

    def __init__(
        self,
        copies: Copies,
        policy: TrainablePolicy,
        policy_id: str,
        rules: CutRules,
        **common: Any,
    ) -> None:
        super().__init__(rules, **common)
        self._copies, self._policy, self._policy_id = copies, policy, policy_id
        self._explore = self._explore and policy.settings.explore
        self._hooked = self._finisher.is_hooked(policy)
        self._actor: Actor = policy.actor()
        self._set_up(len(copies.envs))
        self._started = False

    def _set_up(self, count: int) -> None:
        spec = self._policy.spec
        self._obs_names = [(leaf.path, leaf.column(OBS)) for leaf in leaves(spec.observation)]
        self._next_names = [(p, leaf.column(NEXT_OBS)) for p, leaf in self._paths(spec.observation)]
        self._action_names = {p: leaf.column("actions") for p, leaf in self._paths(spec.action)}
        self._env_names = {p: leaf.column("actions_env") for p, leaf in self._paths(spec.action)}
        self._plain_discrete = isinstance(spec.action, Discrete)
        # clipping only changes Box actions
        self._may_differ = self._clip and spec.layout.log_stds > 0
        layout = self._finisher.layout(self._policy_id)
        if self._may_differ:
            stored = {name: layout[name] for name in self._action_names.values()}
            layout |= {self._env_names[p]: stored[n] for p, n in self._action_names.items()}
        initial = self._policy.initial_state()
        self._initial = initial
        self._state = [np.repeat(one[None], count, axis=0) for one in initial]
        rules = self._rules
        room = rules.fragment if rules.truncates else _FIRST_ROOM
        self._buffers = FragmentBuffers(count, room + 1, layout)
        self._lengths = np.zeros(count, np.int64)
        self._returns = np.zeros(count)
        self._episodes: list[RolloutEpisode | None] = [None] * count
        self._numbers = np.zeros(count, np.int64)
        self._by_number: dict[int, RolloutEpisode] = {}
        self._count = 0
        # copies with an episode that learners are to skip
        self._skipped = np.zeros(count, np.bool_)
        self._waiting: Index = np.empty(0, np.intp)  # copies that wait for an action

    @staticmethod
    def _paths(space: Any) -> list[tuple[str, Any]]:
        return [(leaf.path, leaf) for leaf in leaves(space)]

    def _renew_actors(self) -> None:
        self._actor = self._policy.actor()

    def _put_no_rows(self) -> None:
        self._ready.append(self._finisher.no_rows(self._policy_id))

    # one round

    def _round(self) -> None:
        if not self._started:
            self._started = True
            self._begin(self._copies.reset(range(len(self._episodes))))
        waiting = self._waiting
        begin = time.perf_counter()
        sent = self._act(waiting) if len(waiting) else []
        acted = time.perf_counter()
        stepped = self._copies.step(waiting, sent)
        self._waiting = np.empty(0, np.intp)
        answered = time.perf_counter()
        self._recorder.spent("inference", acted - begin)
        self._recorder.spent("env_wait", answered - acted)
        again = self._log(stepped) if len(stepped.index) else []
        for copy in stepped.failed:
            self._discard(copy)
        begun = self._copies.reset([*again, *stepped.failed]) if again or stepped.failed else []
        self._begin([*begun, *stepped.begun])
        self._recorder.round_done()

    def _act(self, waiting: Index) -> list[Any]:
        """Choose an action for each waiting copy, begin its row, and return the actions to send."""
        policy = self._policy
        columns = self._copies.observations.take(waiting)
        flat = policy.flatten(columns)
        if self._finisher.trains(self._policy_id):
            policy.filter.push(policy.spec.flattener.features_of(flat[~self._skipped[waiting]]))
        actions, states = self._forward(policy.filter(flat), waiting)
        row: dict[str, Any] = {name: columns[path] for path, name in self._obs_names}
        row |= {name: actions.columns[path] for path, name in self._action_names.items()}
        row |= {f"state_in_{i}": state for i, state in enumerate(states)}
        row[ACTION_LOGP], row[ACTION_DIST_INPUTS] = actions.logp, actions.dist_inputs
        row[POLICY_VERSION], row[T] = self._actor.version, self._lengths[waiting]
        if self._may_differ:
            row |= {name: actions.env_columns[path] for path, name in self._env_names.items()}
        self._buffers.put(waiting, row)
        if self._plain_discrete:
            numbers: list[Any] = actions.columns[""].tolist()
            return numbers
        return actions.actions_env if self._clip else actions.actions

    def _forward(
        self, flat: npt.NDArray[np.float32], waiting: Index
    ) -> tuple[Actions, list[Array]]:
        """(actions, the recurrent states before them)."""
        if not self._state:
            return self._actor.act(flat, self._rng, explore=self._explore), []
        states = [state[waiting] for state in self._state]
        recurrent: Any = self._actor
        actions, after = recurrent.act(flat, self._rng, explore=self._explore, state=states)
        for mine, new in zip(self._state, after, strict=True):
            mine[waiting] = new
        return actions, states

    def _log(self, stepped: Stepped) -> list[int]:
        """Complete the rows of the returned steps; return the copies that have to be reset."""
        index = stepped.index
        self._lengths[index] += 1
        self._returns[index] += stepped.rewards
        ends = self._rules.ends(self._lengths[index], stepped.terminateds, stepped.truncateds)
        after = self._copies.observations.take(index)
        row: dict[str, Any] = {name: after[path] for path, name in self._next_names}
        row[REWARDS] = stepped.rewards
        row[TERMINATEDS], row[TRUNCATEDS], row[CUT] = ends.terminateds, ends.truncateds, ends.cuts
        if any(TRAINING_ENABLED in info for info in stepped.infos):
            self._skipped[index] |= [is_excluded(info) for info in stepped.infos]
            stepped.infos = [without_marker(info) for info in stepped.infos]
        infos = np.empty(len(index), object)
        infos[:] = stepped.infos
        row[INFOS] = infos
        self._buffers.put(index, row)
        self._buffers.advance(index)
        if self._watched:
            self._watch(stepped, after)
        again = self._end_episodes(index, ends) if ends.over.any() else []
        if self._rules.truncates:
            for copy in index[self._skipped[index]].tolist():
                if self._buffers.filled[copy] >= self._rules.fragment:
                    self._exclude(copy)
            full = index[self._buffers.filled[index] >= self._rules.fragment]
            if len(full):
                self._emit(full.tolist(), self._rules.fragment)
        self._waiting = index[~ends.reset] if again else index
        return again

    def _watch(self, stepped: Stepped, after: Mapping[str, Array]) -> None:
        """Call the callbacks for each step."""
        for row, copy in enumerate(stepped.index.tolist()):
            episode = self._noted(copy)
            obs = after[""][row] if "" in after else {p: c[row] for p, c in after.items()}
            names = self._action_names.items()
            action = {path: self._buffers.last(name, copy) for path, name in names}
            episode.note(DEFAULT_AGENT, obs, action.get("", action), stepped.infos[row])
            self._callbacks.on_episode_step(**self._hook(episode, self._copies))

    def _noted(self, copy: int) -> RolloutEpisode:
        """The copy's episode, updated to the current length and reward."""
        episode = self._episodes[copy]
        if episode is None:
            raise RuntimeError(f"env copy {copy}: expected an episode that goes on")
        episode.length = int(self._lengths[copy])
        reward = float(self._returns[copy])
        episode.total_reward = reward
        episode.agent_rewards = {(DEFAULT_AGENT, episode.policy_for(DEFAULT_AGENT)): reward}
        return episode

    # episodes

    def _begin(self, copies: list[int]) -> None:
        """Begin episodes in copies that have their first observations."""
        for copy in copies:
            for mine, initial in zip(self._state, self._initial, strict=True):
                mine[copy] = initial
            self._new_episode(copy)
            self._skipped[copy] = is_excluded(self._copies.first_infos.pop(copy, {}))
        if copies:
            self._waiting = np.sort(np.append(self._waiting, np.asarray(copies, np.intp)))

    def _new_episode(self, copy: int) -> None:
        episode = RolloutEpisode(copy, self._policy_of, worker=self._finisher.worker)
        self._episodes[copy] = episode
        self._lengths[copy], self._returns[copy] = 0, 0.0
        number = self._count
        self._count += 1
        self._numbers[copy] = number
        if self._hooked:
            self._by_number[number] = episode
        self._buffers.begin_episode(copy, episode.episode_id, number)
        self._callbacks.on_episode_start(**self._hook(episode, self._copies))

    def _policy_of(self, agent_id: Any, episode: RolloutEpisode) -> str:
        return self._policy_id

    def _end_episodes(self, index: Index, ends: Ends) -> list[int]:
        again = []
        for row in np.flatnonzero(ends.over).tolist():
            copy = int(index[row])
            episode = self._noted(copy)
            self._callbacks.on_episode_end(**self._hook(episode, self._copies))
            self._recorder.add(episode.metrics(self._recorder.perf_stats()))
            self._restarts.progressed(copy)
            self._played += 1
            if self._skipped[copy]:
                self._exclude(copy)
                self._by_number.pop(int(self._numbers[copy]), None)
            elif not self._rules.truncates:
                self._emit([copy], int(self._buffers.filled[copy]))
            if ends.reset[row]:
                again.append(copy)
            else:
                # a soft horizon: the environment and recurrent states continue
                self._new_episode(copy)
        return again

    def _discard(self, copy: int) -> None:
        """Drop the rows of a failed copy's current episode, and no others."""
        self._buffers.discard_episode(copy)
        self._restarts.discarded += 1
        self._by_number.pop(int(self._numbers[copy]), None)

    # fragments

    def _exclude(self, copy: int) -> None:
        """Pass on the rows of an episode that learners are to skip; no fragment contains them."""
        columns, segment = self._buffers.take_episode(copy)
        self._excluded_steps += len(columns[REWARDS])
        if self.excluded is None or not len(columns[REWARDS]):
            return
        if not columns[CUT][-1]:
            columns[CUT][-1] = FRAGMENT_CUT
        columns[TRAINING_ENABLED] = np.zeros(len(columns[REWARDS]), np.bool_)
        self.excluded(
            self._finisher.identified(
                columns, [segment], policy_id=self._policy_id, agent_id=DEFAULT_AGENT
            )
        )

    def _emit(self, copies: list[int], count: int) -> None:
        """Return `count` rows of each of these copies as batches."""
        if self._hooked and len(copies) > 1:
            for copy in copies:
                self._emit([copy], count)
            return
        columns, segments = self._buffers.take(copies, count)
        rows = len(columns[REWARDS])
        last = np.arange(count - 1, rows, count)
        cut = columns[CUT]
        cut[last] = np.where(cut[last] == 0, FRAGMENT_CUT, cut[last])
        if self._may_differ and not self._sent_differs(columns):
            for name in self._env_names.values():
                del columns[name]
        batch = self._finisher.identified(
            columns, segments, policy_id=self._policy_id, agent_id=DEFAULT_AGENT
        )
        for copy in copies:
            self._restarts.progressed(copy)
        if not self._hooked:
            done = self._policy.postprocess(batch)
            self._ready += [done.slice(i, i + count) for i in range(0, rows, count)]
            return
        self._ready.append(self._finisher.finish_runs(batch, segments, self._by_number))
        going_on = set(self._numbers.tolist())
        for one in segments:
            if one.number not in going_on:
                self._by_number.pop(one.number, None)

    def _sent_differs(self, columns: Mapping[str, Array]) -> bool:
        stored = {path: columns[name] for path, name in self._action_names.items()}
        sent = {path: columns[name] for path, name in self._env_names.items()}
        return bool(env_columns(stored, sent))
