"""The abstract env runner, which collects experience, and its restarts of failing environments.

    class Mine(EnvRunner):
        def make_env(self): self.env = gymnasium.make(self.config["env"])
        def sample(self, **kwargs): ... self._try_env_step(action) ...
        def get_spaces(self): ...
        def assert_healthy(self): ...

A copy of an environment that raises is replaced, for a limited number of times and with growing
pauses; only its own partial episode is lost. `Restarts` counts these failures.
"""

from __future__ import annotations

import contextlib
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import numpy as np

from storage.wording import counted

_log = logging.getLogger("headrace.worker")

ENV_STEP_FAILURE: Final = "env_step_failure"
"""The result of `_try_env_step` after the copy was replaced: discard its episode and reset it."""

Spaces: TypeAlias = dict[str, tuple[Any, Any]]
"""Module id -> (observation space, action space)."""


class EnvFailed(RuntimeError):
    """An environment failed more often in a row than its restarts allow.

    The text says how often, which copy, and what it raised.
    """


@dataclass(frozen=True, kw_only=True)
class RestartLimits:
    """How often a failing copy is replaced, and after which pauses.

    A copy may fail up to `most` times in a row; pauses start at `backoff` seconds and double up to
    `longest`. The count restarts when the copy completes an episode or a fragment.
    """

    most: int = 5
    backoff: float = 0.1
    longest: float = 10.0

    def __post_init__(self) -> None:
        if self.most < 0 or self.backoff < 0 or self.longest < 0:
            raise ValueError(f"restart limits: expected numbers >= 0, got {self}")


@dataclass
class Restarts:
    """Counts failures of copies, and limits them. `total` counts all copies since the beginning."""

    limits: RestartLimits = field(default_factory=RestartLimits)
    allowed: bool = True
    pause: Callable[[float], None] = time.sleep
    total: int = 0
    discarded: int = 0  # partial episodes
    in_a_row: dict[Any, int] = field(default_factory=dict)

    def failed(self, copy: Any, error: BaseException) -> None:
        """Count a failure and pause.

        Raises the error if restarts are not allowed, EnvFailed if the copy has used them up.
        """
        if not self.allowed:
            raise error
        count = self.in_a_row.get(copy, 0) + 1
        self.in_a_row[copy] = count
        self.total += 1
        # str() of an exception without arguments is empty; repr always includes the type
        if count > self.limits.most:
            raise EnvFailed(
                f"env copy {copy}: failed {counted(count, 'time')} without completing anything, "
                f"the last time with {error!r}; {self.limits.most} restarts were allowed"
            ) from error
        _log.warning("env copy %s failed (%d in a row), restarting it: %r", copy, count, error)
        self.pause(min(self.limits.backoff * 2 ** (count - 1), self.limits.longest))

    def progressed(self, copy: Any) -> None:
        """Reset a copy's count: it completed an episode or a fragment."""
        self.in_a_row.pop(copy, None)


class EnvRunner(ABC):
    """Steps environments with a policy and returns the experience.

    Attributes: `config`, a copy of the argument; `env`, None until `make_env`; `restarts`. Two
    settings of the config are read here: `restart_failed_sub_environments` (default False) and
    `restart_limits`.
    """

    def __init__(self, *, config: Any, **kwargs: Any) -> None:
        own = getattr(config, "copy", None)
        self.config = _copied(config) if isinstance(config, dict) or own is None else own()
        self.env: Any = None
        limits = self._setting("restart_limits", None) or RestartLimits()
        allowed = bool(self._setting("restart_failed_sub_environments", False))
        self.restarts = Restarts(limits, allowed)

    # abstract methods

    @abstractmethod
    def assert_healthy(self) -> None:
        """Raise if the runner cannot sample."""

    @abstractmethod
    def sample(self, **kwargs: Any) -> Any:
        """Collect experience."""

    @abstractmethod
    def get_spaces(self) -> Spaces:
        """Module id -> (observation space, action space)."""

    # optional methods

    def make_env(self) -> None:
        """Create `self.env`, also again; required to restart an env that failed."""
        raise NotImplementedError(f"{type(self).__name__}.make_env: this runner makes no env")

    def make_module(self) -> None:
        """Create the modules that the runner acts with."""
        raise NotImplementedError(f"{type(self).__name__}.make_module: this runner makes no module")

    def get_metrics(self) -> Any:
        """Metrics since the last call; none by default."""
        return []

    def stop(self) -> None:  # noqa: B027  a runner may have nothing to release
        """Release what the runner holds; stopping twice is fine."""

    def __del__(self) -> None:
        # at interpreter exit any module may be gone, and errors cannot be reported
        with contextlib.suppress(Exception):
            self.stop()

    # fault tolerance

    def _try_env_reset(
        self, *, copy: Any = 0, seed: int | None = None, options: Any = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset a copy; returns (observation, info).

        A copy that fails is replaced and reset again while its restarts last. Without restarts,
        raises its error; raises EnvFailed after the last one.
        """
        while True:
            try:
                observation, info = self._env_at(copy).reset(seed=seed, options=options)
            except Exception as error:
                self._restart(copy, error)
            else:
                return observation, info

    def _try_env_step(self, action: Any, *, copy: Any = 0) -> Any:
        """Step a copy; returns the result of its step.

        After a failure the copy is replaced and ENV_STEP_FAILURE returned: the caller has to
        discard the copy's partial episode and reset it.
        """
        try:
            return self._env_at(copy).step(action)
        except Exception as error:
            self._restart(copy, error)
            return ENV_STEP_FAILURE

    def _restart(self, copy: Any, error: Exception) -> None:
        """Replace a copy, trying again if creating it fails."""
        failed = error
        while True:
            self.restarts.failed(copy, failed)
            try:
                return self._remake(copy)
            except Exception as another:
                failed = another

    def _env_at(self, copy: Any) -> Any:
        return self.env

    def _remake(self, copy: Any) -> None:
        self.make_env()

    # tensors

    def _convert_to_tensor(self, struct: Any) -> Any:
        """Convert nested arrays and numbers to torch tensors; float64 becomes float32."""
        import torch  # noqa: PLC0415  an optional extra, and a runner may do without tensors

        if isinstance(struct, Mapping):
            return {key: self._convert_to_tensor(value) for key, value in struct.items()}
        if isinstance(struct, tuple) and hasattr(struct, "_fields"):
            return type(struct)(*map(self._convert_to_tensor, struct))
        if isinstance(struct, (list, tuple)) and any(
            not isinstance(item, (int, float, bool, np.generic)) for item in struct
        ):
            return type(struct)(map(self._convert_to_tensor, struct))
        tensor = torch.as_tensor(np.asarray(struct))
        return tensor.float() if tensor.dtype == torch.float64 else tensor

    def _setting(self, name: str, default: Any) -> Any:
        if isinstance(self.config, Mapping):
            return self.config.get(name, default)
        return getattr(self.config, name, default)


def _copied(config: Any) -> Any:
    """Copy the config's containers, but not their other values (env creators, classes)."""
    if type(config) is dict:
        return {key: _copied(value) for key, value in config.items()}
    if type(config) is list:
        return [_copied(value) for value in config]
    return config
