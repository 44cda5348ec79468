"""ExternalEnv: inverted control. Your program asks for actions, and a worker polls its episodes.

    class Queue(ExternalEnv):
        def run(self):
            while not self.stopped:
                episode = self.start_episode()
                ...
                action = self.get_action(episode, observation)
                self.log_returns(episode, reward)
                self.end_episode(episode, observation)

    worker_side = Queue(action_space, observation_space).to_base_env()    # starts run() in a thread
    Queue(action_space, observation_space, collector="http://...").start()  # the same, by HTTP

The five calls are those of `PolicyClient`, with the same errors. Threads may use different episodes
at once; an episode may be used by only one thread at a time.
"""

from __future__ import annotations

import logging
import math
import threading
import uuid
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias, cast

import msgspec

from ingest.client.arguments import HERE, SEVERAL, by_episode
from ingest.client.policy_client import PolicyClient
from ingest.delivery.declarations import ClientPolicy
from ingest.delivery.events import check_id, flag, version
from ingest.embedded.exchange import Exchange, OwnAction, Poll
from ingest.protocol.errors import ServingStopped
from storage.experience.episode import DEFAULT_AGENT, DEFAULT_POLICY, LoggedAction
from storage.spaces.descriptors import Space, SpaceError

log = logging.getLogger("headrace.external_env")

MultiEnvDict: TypeAlias = dict[Any, Any]
STOP_SECONDS = 5.0
"""Seconds that `stop` waits for run() to return."""


class ExternalEnv:
    """An environment whose program runs by itself and asks for actions.

    Subclass it and override `run`.

    Args:
        action_space: gymnasium's, or a Headrace space (`headrace.Box` and others).
        observation_space: the same.
        max_concurrent: not used; `max_pending` limits what waits.
        collector: a collector's address, or a PolicyClient; it gets the calls instead of a worker.
        action_timeout: seconds that `get_action` waits for the worker's action.
        max_pending: the most steps that may wait for the worker; above it, calls wait
            `action_timeout` for room.
    """

    one_agent = True  # read by workers with several policies

    def __init__(
        self,
        action_space: Any,
        observation_space: Any,
        max_concurrent: int | None = None,
        *,
        collector: str | PolicyClient | None = None,
        action_timeout: float = 300.0,
        max_pending: int = 100_000,
    ) -> None:
        if max_concurrent is not None:
            raise ValueError("max_concurrent was removed: max_pending limits the waiting steps")
        self.action_space = action_space
        self.observation_space = observation_space
        self._exchange = Exchange(timeout=action_timeout, max_pending=max_pending)
        self._owned = self._connect(collector) if isinstance(collector, str) else None
        spaces = self.observation_space, self.action_space
        self._here = (
            CheckedCalls(self._exchange, *spaces, one_agent=self.one_agent)
            if collector is None
            else None
        )
        self._episodes: CheckedCalls | PolicyClient = (
            self._here or self._owned or self._client(collector)
        )
        self._thread = threading.Thread(target=self._main, name=type(self).__name__, daemon=True)
        self._error: BaseException | None = None
        self._stop = threading.Event()
        self._taken = False

    def _connect(self, address: str) -> PolicyClient:
        """Create the client for the address of a collector."""
        return PolicyClient(address)

    def _client(self, client: object) -> PolicyClient:
        """Check a given client. Raises TypeError for any other object, ValueError."""
        if not callable(getattr(client, "start_episode", None)):
            raise TypeError(f"collector: expected an address or a PolicyClient, got {client!r:.80}")
        several = getattr(client, "policy_mapping_fn", None) is not None
        if several == self.one_agent:
            has, needs = ("a", "none") if several else ("no", "one for its several agents")
            raise ValueError(
                f"collector: {type(self).__name__} got a PolicyClient with {has} "
                f"policy_mapping_fn, expected {needs}"
            )
        return cast("PolicyClient", client)

    def __repr__(self) -> str:
        state = "stopped" if self.stopped else "running" if self.is_alive() else "not running"
        return f"{type(self).__name__}({self.action_space}, {self.observation_space}; {state})"

    def run(self) -> None:
        """The program, in a thread of its own. Override it; return when `stopped` is true.

        An exception in it is raised by the worker's next `poll`.
        """
        raise NotImplementedError(f"{type(self).__name__}: expected a method run()")

    # --- the five calls ----------------------------------------------------------------------

    def start_episode(self, episode_id: str | None = None, training_enabled: bool = True) -> str:
        """Start an episode and return its id; without one, a UUID is generated.

        With `training_enabled=False` the worker acts as usual, and learners skip the episode.
        """
        return self._episodes.start_episode(episode_id, training_enabled)

    def get_action(self, episode_id: str | Sequence[str], observation: Any) -> Any:
        """Return the policy's action on an observation, and record both as the episode's next step.

        With a list of ids and a mapping id -> observation it returns a dict id -> action.

        TimeoutError names the episode. The episode is unchanged, unless the worker has already seen
        the observation: then repeat the call with the same observation, as other calls are refused.
        """
        return self._episodes.get_action(episode_id, observation)

    def log_action(
        self,
        episode_id: str,
        observation: Any,
        action: Any,
        *,
        action_prob: Any = None,
        action_logp: Any = None,
        policy_version: int = -1,
    ) -> None:
        """Record an action that the program chose, without waiting for the worker.

        If it raises, the step is not logged, and until the next success `log_returns` for the
        latest action raises the same kind of error: repeat the call, or end the episode.
        """
        try:
            self._episodes.log_action(
                episode_id,
                observation,
                action,
                action_prob=action_prob,
                action_logp=action_logp,
                policy_version=policy_version,
            )
        except BaseException as error:
            if self._here is not None:
                self._here.miss(episode_id, observation, error)
            raise

    def log_returns(
        self,
        episode_id: str,
        reward: Any,
        info: Mapping[Any, Any] | None = None,
        multiagent_done_dict: Mapping[Any, bool] | None = None,
        *,
        multiagent_truncated_dict: Mapping[Any, bool] | None = None,
    ) -> None:
        """Add a reward to the episode's latest action; `info` belongs to that step alone.

        With several agents: `multiagent_done_dict` contains the agents that have ended,
        `multiagent_truncated_dict` those that a limit cut off. These may have one more, final
        observation, and then no longer act. `end_episode` ends all agents.
        """
        self._episodes.log_returns(
            episode_id,
            reward,
            info,
            multiagent_done_dict,
            multiagent_truncated_dict=multiagent_truncated_dict,
        )

    def end_episode(
        self, episode_id: str, observation: Any = None, *, truncated: bool = False
    ) -> None:
        """End an episode, with its final observation if there is one (of each agent that has)."""
        self._episodes.end_episode(episode_id, observation, truncated=truncated)

    # --- life cycle of the program -----------------------------------------------------------

    @property
    def stopped(self) -> bool:
        """Whether run() should return because `stop` was called."""
        return self._stop.is_set()

    def start(self) -> None:
        """Start run(); `to_base_env` also does this. Raises RuntimeError the second time."""
        self._thread.start()

    def is_alive(self) -> bool:
        """Whether run() is running."""
        return self._thread.is_alive()

    def join(self, timeout: float | None = None) -> None:
        """Wait until run() has returned, then raise its error, if any.

        Raises TimeoutError if it has not returned. Meant for programs with a collector: everything
        they logged is then acknowledged. Without a collector, the worker's `poll` raises the error.
        """
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError(f"{type(self).__name__}: run() has not returned in {timeout:g} s")
        if self._error is not None:
            raise self._error

    def stop(self, timeout: float = STOP_SECONDS) -> None:
        """Ask run() to return, wake waiting calls (ServingStopped), and wait for it."""
        self._stop.set()
        self._exchange.close()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)
            if self._thread.is_alive():
                log.warning("%s: run() has not returned after stop()", type(self).__name__)

    def _main(self) -> None:
        try:
            self._run()
        except BaseException as error:  # raised again by `join` or `poll`
            if not (isinstance(error, ServingStopped) and self.stopped):
                self._error = error
                log.error("%s: run() raised %r", type(self).__name__, error)
        self._exchange.finish(self._error)

    def _run(self) -> None:
        if self._owned is None:
            return self.run()
        with self._owned:  # on exit, everything that run() logged is delivered
            return self.run()

    # --- the worker's side -------------------------------------------------------------------

    def to_base_env(self, num_envs: int = 1) -> ExternalBaseEnv:
        """Start run() and return the environment for a worker. Once, and without a collector."""
        if num_envs != 1:
            raise ValueError(f"num_envs: expected 1, because run() is one program, got {num_envs}")
        if self._here is None:
            raise ValueError(
                "to_base_env: the episodes of this environment go to a collector; train from its "
                "shards"
            )
        if self._taken:
            raise RuntimeError("to_base_env: this environment already has a worker")
        self._taken = True
        if self._thread.ident is None:
            self.start()
        return ExternalBaseEnv(self, self._exchange, self._here.own_action)


class ExternalBaseEnv:
    """The environment that a worker polls, in which env ids are episode ids.

    See `policy.envs.base_env` for the protocol. An episode begins with its first observation and
    ends with `"__all__"` in `terminateds` or `truncateds`, possibly without a step. The next one
    has another env id.
    """

    num_envs = 1
    can_reset = False

    def __init__(self, env: ExternalEnv, exchange: Exchange, own_action: OwnAction) -> None:
        self.env = env
        self.observation_space = env.observation_space
        self.action_space = env.action_space
        self._exchange = exchange
        self._own_action = own_action

    def poll(self) -> Poll:
        """Return everything new; wait for the first.

        Raises ServingStopped after run() has returned and everything was polled; its cause is the
        error that run() raised.
        """
        return self._exchange.poll()

    def send_actions(self, actions: Mapping[Any, Mapping[Any, Any]]) -> None:
        """Answer the episodes that ask; actions for those that logged theirs are ignored.

        Raises ValueError for an action that does not fit, and then answers no episode.
        """
        self._exchange.send(actions, self._own_action)

    def try_reset(self, env_id: Any) -> None:
        """Return None: programs start their episodes themselves."""

    def try_restart(self, env_id: Any) -> None:
        """Raise RuntimeError: a program cannot be restarted."""
        raise RuntimeError(f"episode {env_id}: run() cannot be restarted")

    def stop(self) -> None:
        """Stop the program."""
        self.env.stop()


class CheckedCalls:
    """The five calls to a worker in this process: values are checked and go to an exchange."""

    def __init__(
        self, exchange: Exchange, observation_space: Any, action_space: Any, *, one_agent: bool
    ) -> None:
        self._exchange = exchange
        self._arguments = HERE if one_agent else SEVERAL
        self._spaces = observation_space, action_space
        self._policies: dict[Any, ClientPolicy] = {}
        self._shared: ClientPolicy | None = None
        if one_agent or not any(is_by_agent(space) for space in self._spaces):
            observation, action = map(descriptor, self._spaces)
            self._shared = ClientPolicy(DEFAULT_POLICY, observation, action)

    def start_episode(self, episode_id: str | None = None, training_enabled: bool = True) -> str:
        if episode_id is not None:
            check_id("episode_id", episode_id)
        name = uuid.uuid4().hex if episode_id is None else episode_id
        self._exchange.start(name, bool(training_enabled))
        return name

    def get_action(self, episode_id: str | Sequence[str], observation: Any) -> Any:
        actions = {}
        for name, value in by_episode(episode_id, observation).items():
            seen, key = self._observe(name, value)
            answer = self._exchange.ask(name, seen, key)
            actions[name] = answer[DEFAULT_AGENT] if self._arguments.has_one else answer
        return actions[episode_id] if isinstance(episode_id, str) else actions

    def own_action(self, episode_id: str, agent: Any, action: Any) -> Any:
        """Return the worker's action as the program gets it. Raises SpaceError."""
        policy = self._policy(episode_id, agent)
        try:
            return policy.action.named(policy.action.decode(policy.encode_decision(action)))
        except SpaceError as error:
            where = self._arguments.where(episode_id, agent)
            raise SpaceError(f"Episode {where}: {error}") from error

    def log_action(
        self,
        episode_id: str,
        observation: Any,
        action: Any,
        *,
        action_prob: Any = None,
        action_logp: Any = None,
        policy_version: int = -1,
    ) -> None:
        seen, _ = self._observe(episode_id, observation)
        policy_of = partial(self._policy, episode_id)
        logged = {}
        for agent, (encoded, prob, logp) in self._arguments.actions(
            episode_id, policy_of, action, action_prob, action_logp
        ).items():
            own = policy_of(agent).action.decode(encoded)
            known = logp if prob is None else math.log(prob)
            logged[agent] = LoggedAction(own, known, version(episode_id, policy_version))
        self._exchange.tell(episode_id, seen, logged)

    def log_returns(
        self,
        episode_id: str,
        reward: Any,
        info: Any = None,
        multiagent_done_dict: Mapping[Any, bool] | None = None,
        *,
        multiagent_truncated_dict: Mapping[Any, bool] | None = None,
    ) -> None:
        over = multiagent_done_dict, multiagent_truncated_dict
        paid, raw, gone = self._arguments.returns(episode_id, reward, info, *over)
        infos = {agent: msgspec.msgpack.decode(info) for agent, info in raw.items()}
        self._exchange.reward(episode_id, paid, infos, gone)

    def end_episode(
        self, episode_id: str, observation: Any = None, *, truncated: bool = False
    ) -> None:
        seen = {} if observation is None else self._observe(episode_id, observation)[0]
        self._exchange.end(episode_id, seen, truncated=flag("truncated", truncated))

    def miss(self, episode_id: str, observation: Any, error: BaseException) -> None:
        """Note that the actions on an observation could not be logged."""
        agents: Iterable[Any] | None = [DEFAULT_AGENT]
        if not self._arguments.has_one:
            agents = observation if isinstance(observation, Mapping) else None
        self._exchange.miss(episode_id, agents, error)

    def _observe(self, episode_id: str, observation: Any) -> tuple[dict[Any, Any], Any]:
        """Copies of the values by agent, and a key to compare them."""
        policy_of = partial(self._policy, episode_id)
        values = self._arguments.by_agent(episode_id, "obs", observation)
        key = self._arguments.observe(episode_id, policy_of, values)
        return {agent: policy_of(agent).observation.decode(key[agent]) for agent in key}, key

    def _policy(self, episode_id: str, agent: Any) -> ClientPolicy:
        """The codecs of an agent, created at its first observation. Raises ValueError."""
        policy = self._shared or self._policies.get(agent)
        if policy is None:
            obs_space, act_space = (_space_of(episode_id, agent, s) for s in self._spaces)
            policy = self._policies[agent] = ClientPolicy(DEFAULT_POLICY, obs_space, act_space)
        return policy


def is_by_agent(space: Any) -> bool:
    """Whether spaces are given by agent; gymnasium's Dict space is a mapping, too."""
    return isinstance(space, Mapping) and not hasattr(space, "contains")


def _space_of(episode_id: str, agent: Any, space: Any) -> Space:
    if not is_by_agent(space):
        return descriptor(space)
    if agent not in space:
        raise ValueError(
            f"Episode {episode_id}: expected an agent of {sorted(map(str, space))}, got {agent!r}"
        )
    return descriptor(space[agent])


def descriptor(space: Any) -> Space:
    """The descriptor of a gymnasium space, or the descriptor itself. Raises SpaceError."""
    if isinstance(space, Space):
        return space
    from storage.spaces.gymnasium_spaces import from_gym  # noqa: PLC0415  gymnasium: the [train] extra

    return from_gym(space)
