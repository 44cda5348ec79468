"""The env_config for an env creator: a dict that also identifies the worker and the copy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class EnvContext(dict[str, Any]):
    """`env_config` as a dict, with attributes.

    Attributes: `worker_index` (0: the driver's own worker), `vector_index` (the copy within the
    worker), `num_workers`, `remote` (whether the copy runs in its own process).
    """

    def __init__(
        self,
        env_config: Mapping[str, Any] | None = None,
        worker_index: int = 0,
        vector_index: int = 0,
        remote: bool = False,
        num_workers: int = 0,
    ) -> None:
        super().__init__(env_config or {})
        self.worker_index = worker_index
        self.vector_index = vector_index
        self.remote = remote
        self.num_workers = num_workers

    def copy_with_overrides(
        self,
        *,
        env_config: Mapping[str, Any] | None = None,
        worker_index: int | None = None,
        vector_index: int | None = None,
        remote: bool | None = None,
        num_workers: int | None = None,
    ) -> EnvContext:
        """A copy with some values replaced; omitted arguments keep their values."""
        return EnvContext(
            self if env_config is None else env_config,
            self.worker_index if worker_index is None else worker_index,
            self.vector_index if vector_index is None else vector_index,
            self.remote if remote is None else remote,
            self.num_workers if num_workers is None else num_workers,
        )
