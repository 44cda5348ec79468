"""Hooks into sampling: override methods, or pass the older form, a dict of functions.

    class Mine(Callbacks):
        def on_episode_end(self, *, worker, base_env, policies, episode, env_index):
            episode.custom_metrics["pole_angle"] = ...

    RolloutWorker(..., callbacks=Mine)
    RolloutWorker(..., callbacks={"on_episode_end": lambda info: info["episode"].length})

Hooks that are not overridden cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from policy.sampling.episode import SamplingWorker
from storage.experience.sample_batch import SampleBatch


class Callbacks:
    """Hooks that do nothing. All arguments are keywords; `policies` maps ids to policies.

    `worker` is the `RolloutWorker` that samples.
    """

    def on_episode_start(
        self,
        *,
        worker: SamplingWorker,
        base_env: Any,
        policies: Mapping[str, Any],
        episode: Any,
        **kw: Any,
    ) -> None:
        """An episode begins: it has its first observations, and no action was chosen yet."""

    def on_episode_step(
        self,
        *,
        worker: SamplingWorker,
        base_env: Any,
        policies: Mapping[str, Any],
        episode: Any,
        **kw: Any,
    ) -> None:
        """The environment has been stepped; the episode has the latest observations and infos."""

    def on_episode_end(
        self,
        *,
        worker: SamplingWorker,
        base_env: Any,
        policies: Mapping[str, Any],
        episode: Any,
        **kw: Any,
    ) -> None:
        """The episode is over; its metrics are read after this."""

    def on_postprocess_trajectory(
        self,
        *,
        worker: SamplingWorker,
        episode: Any,
        agent_id: Any,
        policy_id: str,
        policies: Mapping[str, Any],
        postprocessed_batch: SampleBatch,
        original_batches: Mapping[Any, tuple[Any, SampleBatch]],
        **kw: Any,
    ) -> None:
        """An agent's run of rows is complete; the batch may be changed in place."""

    def on_sample_end(self, *, worker: SamplingWorker, samples: Any, **kw: Any) -> None:
        """`sample()` is about to write and return these samples; they may be changed in place."""

    def on_train_result(self, *, result: dict[str, Any], **kw: Any) -> None:
        """A training loop has a result; it may be changed in place."""


class DictCallbacks(Callbacks):
    """The older form: name -> function of a dict. Raises ValueError for an unknown name."""

    NAMES = (
        "on_episode_start",
        "on_episode_step",
        "on_episode_end",
        "on_postprocess_traj",
        "on_sample_end",
        "on_train_result",
    )

    def __init__(self, functions: Mapping[str, Callable[[dict[str, Any]], Any]]) -> None:
        unknown = sorted(set(functions) - set(self.NAMES))
        if unknown:
            raise ValueError(f"callbacks: expected {', '.join(self.NAMES)}, got {unknown}")
        self.functions = dict(functions)

    def _call(self, name: str, info: dict[str, Any]) -> None:
        if name in self.functions:
            self.functions[name](info)

    def on_episode_start(self, *, base_env: Any, policies: Any, episode: Any, **kw: Any) -> None:
        info = {"env": base_env, "policy": policies, "episode": episode}
        self._call("on_episode_start", info)

    def on_episode_step(self, *, base_env: Any, policies: Any, episode: Any, **kw: Any) -> None:
        self._call("on_episode_step", {"env": base_env, "episode": episode})

    def on_episode_end(self, *, base_env: Any, policies: Any, episode: Any, **kw: Any) -> None:
        info = {"env": base_env, "policy": policies, "episode": episode}
        self._call("on_episode_end", info)

    def on_postprocess_trajectory(
        self,
        *,
        episode: Any,
        agent_id: Any,
        postprocessed_batch: SampleBatch,
        original_batches: Mapping[Any, tuple[Any, SampleBatch]],
        **kw: Any,
    ) -> None:
        self._call(
            "on_postprocess_traj",
            {
                "episode": episode,
                "agent_id": agent_id,
                "pre_batch": original_batches[agent_id],
                "post_batch": postprocessed_batch,
                "all_pre_batches": original_batches,
            },
        )

    def on_sample_end(self, *, worker: SamplingWorker, samples: Any, **kw: Any) -> None:
        self._call("on_sample_end", {"worker": worker, "samples": samples})

    def on_train_result(self, *, result: dict[str, Any], **kw: Any) -> None:
        self._call("on_train_result", {"trainer": kw.get("trainer"), "result": result})


def make_callbacks(given: Any) -> Callbacks:
    """Callbacks from a class, an instance, a dict of functions, or None. Raises ValueError."""
    if given is None:
        return Callbacks()
    if isinstance(given, Mapping):
        return DictCallbacks(given)
    made = given() if isinstance(given, type) else given
    if not isinstance(made, Callbacks):
        raise ValueError(f"callbacks: expected a subclass of Callbacks or a dict, got {given!r}")
    return made


_OLD_NAMES = {"on_postprocess_trajectory": "on_postprocess_traj"}


def is_overridden(callbacks: Callbacks, name: str) -> bool:
    """Whether a hook is overridden."""
    if isinstance(callbacks, DictCallbacks):
        return _OLD_NAMES.get(name, name) in callbacks.functions
    return getattr(type(callbacks), name) is not getattr(Callbacks, name)
