"""A small worker that polls any BaseEnv of one agent and records each episode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ingest.protocol.errors import ServingStopped
from storage.experience.episode import DEFAULT_AGENT, LoggedAction


@dataclass
class Seen:
    """An episode as the worker recorded it; a step is [obs, action, reward, info, source]."""

    training_enabled: bool = True
    steps: list[list[Any]] = field(default_factory=list)
    logged: list[LoggedAction] = field(default_factory=list)
    final_obs: Any = None
    ended: str | None = None


def listed(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


class Worker:
    """Records the polled data; `act` maps an observation to an action."""

    def __init__(self, env: Any, act: Callable[[Any], Any]) -> None:
        self.env = env
        self.act = act
        self.episodes: dict[Any, Seen] = {}
        self.stopped_by: ServingStopped | None = None

    def run(self) -> dict[Any, Seen]:
        """Poll until the program has ended."""
        try:
            while True:
                self.step()
        except ServingStopped as stopped:
            self.stopped_by = stopped
        return self.episodes

    def step(self) -> None:
        """One poll and its answer."""
        obs, rewards, terminateds, truncateds, infos, off_policy = self.env.poll()
        assert obs.keys() == rewards.keys() == terminateds.keys() == truncateds.keys()
        actions = {}
        for name, seen in obs.items():
            episode = self.episodes.setdefault(name, Seen())
            assert episode.ended is None, f"{name}: news after its end"
            info = dict(infos[name].get(DEFAULT_AGENT, {}))
            episode.training_enabled = info.pop("training_enabled", True)
            if episode.steps:
                episode.steps[-1][2:4] = [rewards[name][DEFAULT_AGENT], info]
            else:
                assert not rewards[name].get(DEFAULT_AGENT)
            if terminateds[name]["__all__"] or truncateds[name]["__all__"]:
                episode.ended = "terminated" if terminateds[name]["__all__"] else "truncated"
                episode.final_obs = listed(seen.get(DEFAULT_AGENT))
                continue
            logged = off_policy.get(name, {}).get(DEFAULT_AGENT)
            value = seen[DEFAULT_AGENT]
            action = self.act(value) if logged is None else logged.action
            if logged is not None:
                episode.logged.append(logged)
            source = "on_policy" if logged is None else "logged"
            episode.steps.append([listed(value), listed(action), None, None, source])
            actions[name] = {DEFAULT_AGENT: action}  # also for logged actions, where it is ignored
        self.env.send_actions(actions)
