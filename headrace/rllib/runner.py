"""`HeadraceEnvRunner`: what clients did is what Ray's algorithms sample.

    config.env_runners(env_runner_cls=HeadraceEnvRunner.at(root="data/run"))

Clients act, and log, through a collector on the same root: `headrace collect`, or one that the
algorithm's own process hosts (`address`). The runners read the root's shards, each its share of the
episodes. The algorithm's local runner publishes what was learned, and clients go on with it.

A collector holds its clients once a version has its steps (`steps_per_version`). Then no more come,
so the batch is complete, whatever its size: rows may be lost, or belong to a runner that is gone.
"""

from __future__ import annotations

import contextlib
import logging
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from ray.rllib.env import INPUT_ENV_SINGLE_SPACES, INPUT_ENV_SPACES
from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner
from ray.rllib.env.single_agent_episode import SingleAgentEpisode

from headrace.rllib.weights import published_policy
from ingest.embedded.local_publisher import LocalPublisher
from ingest.embedded.policy_server_input import PolicyServerInput
from policy.exporting.runs import WholeRuns
from policy.inference.weight_store import WeightStore
from storage.declarations.declaration import PolicyDeclaration
from storage.declarations.held_policies import held_version
from storage.declarations.policy_files import load_declarations
from storage.errors import GenerationConflict
from storage.experience.sample_batch import (
    ACTION_DIST_INPUTS,
    ACTION_LOGP,
    EPS_ID,
    REWARDS,
    TRUNCATEDS,
    SampleBatch,
    T,
)
from storage.reading.ledger import Ledger
from storage.reading.shard_reader import ShardReader, read_position
from storage.spaces.descriptors import Box, Space
from storage.spaces.gymnasium_spaces import from_gym, to_gym

log = logging.getLogger("headrace.rllib")

MODULE, MODULE_ID, STEPS = "rl_module", "default_policy", "num_env_steps_sampled"
COLUMNS = (
    "obs", "actions", REWARDS, "terminateds", TRUNCATEDS, "new_obs", "has_new_obs", EPS_ID,
    "agent_id", T, ACTION_LOGP, ACTION_DIST_INPUTS,
)  # fmt: skip
OUTPUTS = (ACTION_LOGP, ACTION_DIST_INPUTS)
CONNECTORS = {
    "AddObservationsFromEpisodesToBatch", "AddTimeDimToBatchAndZeroPad", "BatchIndividualItems",
    "AddStatesFromEpisodesToBatch", "NumpyToTensor", "AgentToModuleMapping",
}  # fmt: skip
"""Ray's own, which change no value of an observation."""
POLL_SECONDS = 0.1


class _Enough(dict[str, Any]):
    """Metrics with which Ray ends a batch: no more steps will come now. The values are true."""

    def get(self, key: Any, default: Any = None) -> Any:
        return 2**62 if key == STEPS else super().get(key, default)


class HeadraceEnvRunner(SingleAgentEnvRunner):  # type: ignore[misc]  # Ray's classes have no types
    """One of the runners of an algorithm with one agent; `at` says where its clients are."""

    root: Path
    address: str | None
    policy_id: str
    idle_seconds: float

    @classmethod
    def at(
        cls,
        *,
        root: Path | str,
        address: str | None = None,
        policy_id: str = "default",
        idle_seconds: float = 10.0,
    ) -> type[HeadraceEnvRunner]:
        """A class for `config.env_runners(env_runner_cls=...)`.

        - `root`: the collector's; all runners have to see it.
        - `address`: "HOST:PORT" for a collector in the process of the algorithm; without it one
          runs elsewhere. The hosted one declares the spaces of `config.environment(...)`, with
          `steps_per_version` of Ray's batch size.
        - `idle_seconds`: how long `sample` waits for a step. `train` then ends its turn.
        """
        given = {"root": Path(root).absolute(), "address": address, "policy_id": policy_id}
        return type(cls.__name__, (cls,), {**given, "idle_seconds": idle_seconds})

    def __init__(self, *, config: Any, **kwargs: Any) -> None:
        self._host: PolicyServerInput | None = None
        self._reader: ShardReader | None = None
        self._publishing = LocalPublisher()
        self._enough = self._begun = False
        self._waits: tuple[int, float] | None = None  # the version that is held, and since when
        index, runners = kwargs.get("worker_index") or 0, config.num_env_runners
        asked = _asked_spaces(config)
        if self.address is not None and not index:
            self._host = self._hosted(self.address, config, asked)
        self._declared = _declared(self.root, self.policy_id, asked)
        _check(config, self._declared)
        if index or not runners:  # beside remote ones, the local one only publishes
            self._position = f"rllib-{max(index, 1) - 1}-of-{max(runners, 1)}-{self.policy_id}"
            self._reader = self._opened(max(index, 1) - 1, max(runners, 1))
        super().__init__(config=config, **kwargs)

    def make_env(self) -> None:
        """There is none: clients have their environments."""

    def _hosted(
        self, address: str, config: Any, asked: tuple[Space, Space] | None
    ) -> PolicyServerInput:
        if asked is None:
            raise ValueError(
                "environment: expected observation_space and action_space, with an address"
            )
        declared = PolicyDeclaration(
            policy_id=self.policy_id,
            observation=asked[0],
            action=asked[1],
            part_steps=256,
            part_seconds=0.2,
            seal_seconds=0.2,
            steps_per_version=config.total_train_batch_size,
        )
        host, _, port = address.rpartition(":")
        return PolicyServerInput(
            None, host, int(port), root=self.root, policies=declared, policy_id=self.policy_id
        )

    def _opened(self, index: int, count: int) -> ShardReader:
        """A reader behind what was learned before; at first, behind all that is stored."""
        reader = ShardReader(
            self.root,
            policy_id=self.policy_id,
            schema_id=self._declared.schema_id,
            mode="fragments",
            eager=True,
            follow=True,
            columns=COLUMNS,
        )
        reader.share(index, count)
        try:
            reader.load_state_dict(read_position(self.root, self._position))
        except FileNotFoundError:
            while not reader.caught_up():
                reader.next(POLL_SECONDS)
            reader.save(self._position)
        return reader

    def get_spaces(self) -> dict[str, Any]:
        spaces = to_gym(self._declared.observation), to_gym(self._declared.action)
        return dict.fromkeys((INPUT_ENV_SPACES, INPUT_ENV_SINGLE_SPACES, MODULE_ID), spaces)

    # sampling

    def sample(self, *, num_timesteps: int | None = None, **how: Any) -> list[SingleAgentEpisode]:
        """The steps that clients finished: all that are there, at least one if some come in time.

        It returns before Ray's `sample_timeout_s`. Raises ValueError for other arguments than
        `num_timesteps`, because only clients can reset or choose.
        """
        if wrong := [name for name, value in how.items() if value and name != "explore"]:
            raise ValueError(f"sample: expected num_timesteps at most, got {', '.join(wrong)}")
        if self._reader is None:
            return []
        wanted = num_timesteps or self.config.get_rollout_fragment_length(self.worker_index)
        limit = min(self.idle_seconds, (self.config.sample_timeout_s or np.inf) / 2)
        until, found, steps = time.monotonic() + limit, list[SingleAgentEpisode](), 0
        self._enough = False
        while steps < wanted and time.monotonic() < until:
            held = self._held()
            rows = self._reader.next(POLL_SECONDS)
            episodes = list(_episodes(rows)) if rows.count else []
            found += episodes
            steps += sum(map(len, episodes))
            if held is None or rows.count or not self._reader.caught_up():
                continue
            self._enough = True  # nothing more comes until a newer version is live
            if steps or self._may_release(held):
                break
        if not steps:
            self._enough = True
            log.info("policy %s: no step for %.0f s: train() ends its turn", self.policy_id, limit)
        self._log_sample(found, steps)
        return found

    def _log_sample(self, episodes: list[SingleAgentEpisode], steps: int) -> None:
        done = 0
        for episode in episodes:
            if episode.is_done:
                done += 1
                self._done_episodes_for_metrics.append(episode)
            else:
                self._ongoing_episodes_for_metrics[episode.id_].append(episode)
        self._increase_sampled_metrics(steps, done)

    def get_metrics(self) -> dict[str, Any]:
        found = super().get_metrics()
        return _Enough(found) if self._enough else found

    def _held(self) -> int | None:
        """The live version, if clients wait for a newer one."""
        held = held_version(self.root, self.policy_id)
        live = None if held is None else WeightStore(self.root, self.policy_id).live()
        return held if live is not None and live.version == held else None

    def _may_release(self, held: int) -> bool:
        """Release clients that have waited `idle_seconds / 2` for what nobody can learn from."""
        if self._waits is None or self._waits[0] != held:
            self._waits = held, time.monotonic()
        if time.monotonic() - self._waits[1] < self.idle_seconds / 2:
            return False
        self.release()
        return True

    # acting

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Take what was learned: publish it, and save the position behind what it learned from."""
        super().set_state(state)
        if MODULE not in state:
            return
        self._waits = None
        if self._reader is not None:
            self._reader.save(self._position)
        # Ray gives the first weights to the remote runners alone, and the later ones to all
        begins, self._begun = not self._begun, True
        if not self.worker_index or (self.worker_index == 1 and begins):
            self._publish({})

    def release(self) -> None:
        """Publish the same weights as a new version, so that clients that wait go on."""
        log.warning("policy %s: clients are released with the same weights", self.policy_id)
        self._publish({"release": f"{self.worker_index}-{time.time_ns()}"})

    def _publish(self, metrics: Mapping[str, Any]) -> None:
        require_plain(self._env_to_module)
        observation, action = self.get_spaces()[INPUT_ENV_SPACES]
        policy: Any = published_policy(self.module, observation, action)
        store = WeightStore(self.root, self.policy_id)
        lineage = self._lineage()
        digest = self._publishing.keep(
            store, policy, metrics=metrics, lineage=lineage, untrained={}
        )
        with contextlib.suppress(GenerationConflict):  # another runner has released them
            self._publishing.publish(store, digest)

    def _lineage(self) -> dict[str, Any]:
        """The ordinals that any runner of the policy has saved as learned."""
        ledger, mine = Ledger(), re.compile(rf"rllib-\d+-of-\d+-{re.escape(self.policy_id)}")
        for file in sorted((self.root / "readers").glob("rllib-*.json")):
            if mine.fullmatch(file.stem):
                ledger = ledger.union(Ledger(read_position(self.root, file.stem)["ledger"]))
        return dict(ledger.streams())

    def assert_healthy(self) -> None:
        if self.module is None:
            raise ValueError("expected a runner with a module, got one without")

    def stop(self) -> None:
        if self._reader is not None:
            self._reader.close()
        if self._host is not None:
            self._host.close()


def require_plain(pipeline: Any) -> None:
    """Raise ValueError for a connector that changes observations, which clients do not have."""
    names = [type(one).__name__ for one in pipeline.connectors]
    if other := [name for name in names if name not in CONNECTORS]:
        raise ValueError(
            f"env_to_module_connector: expected none that changes observations, got "
            f"{', '.join(other)}: clients do not run it, so do the same there"
        )


def _asked_spaces(config: Any) -> tuple[Space, Space] | None:
    """The spaces of `config.environment(...)`; None if it has none."""
    found = config.observation_space, config.action_space
    return None if None in found else (from_gym(found[0]), from_gym(found[1]))


def _declared(root: Path, policy_id: str, asked: tuple[Space, Space] | None) -> PolicyDeclaration:
    declared = load_declarations(root).get(policy_id)
    if declared is None:
        raise ValueError(
            f"{root}: expected a declared policy {policy_id!r}, got none: start its collector, or "
            "give an address"
        )
    there = declared.observation, declared.action
    if asked is not None and asked != there:
        raise ValueError(
            f"environment: expected the spaces that the collector declares, {there[0]} and "
            f"{there[1]}, got {asked[0]} and {asked[1]}"
        )
    return declared


def _check(config: Any, declared: PolicyDeclaration) -> None:
    if config.num_envs_per_env_runner != 1:
        raise ValueError("num_envs_per_env_runner: expected 1, as clients have their own")
    if config.normalize_actions and isinstance(declared.action, Box):
        raise ValueError(
            "normalize_actions: expected False in config.env_runners(), because clients act in the "
            "action space itself"
        )


def _episodes(rows: SampleBatch) -> Iterator[SingleAgentEpisode]:
    """Chunks of rows that can be learned from: with the probability of their action, and without a
    gap. The flags of the log count, as a chunk's end is no end of its episode."""
    known = np.isfinite(rows[ACTION_LOGP]) & np.isfinite(rows[ACTION_DIST_INPUTS]).all(axis=1)
    ends = rows[TRUNCATEDS].copy()
    rows = SampleBatch({**rows, "cut": ends}).take(known & np.asarray(rows["has_new_obs"]))
    if not rows.count:
        return
    for run in WholeRuns.of(rows).each():
        steps = run.rows
        last = steps["new_obs"][-1:]
        outputs = {name: list(steps[name].astype(np.float32)) for name in OUTPUTS}
        yield SingleAgentEpisode(
            id_=str(steps[EPS_ID][0]),
            observations=list(np.concatenate([steps["obs"], last])),
            actions=list(steps["actions"]),
            rewards=steps[REWARDS].tolist(),
            infos=[{}] * (steps.count + 1),
            terminated=run.terminated,
            truncated=bool(steps["cut"][-1]) and not run.terminated,
            extra_model_outputs=outputs,
            t_started=int(steps[T][0]),
            len_lookback_buffer=0,
        ).to_numpy()
