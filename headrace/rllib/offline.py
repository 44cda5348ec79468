"""The data of an offline algorithm, read from a root, without files in between."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ray.rllib.offline.offline_data import OfflineData

from policy.exporting.ray_data import read_ray

if TYPE_CHECKING:
    from ray.rllib.algorithms.algorithm_config import AlgorithmConfig


class RootData(OfflineData):  # type: ignore[misc]  # Ray's classes have no types
    """The steps under a root, `config.offline_data(input_=[root], offline_data_class=RootData)`.

    `input_read_method_kwargs` are arguments of `read_ray`, such as `policy_id`.
    """

    def __init__(self, config: AlgorithmConfig) -> None:
        roots = [config.input_] if isinstance(config.input_, str) else list(config.input_)
        if len(roots) != 1:
            raise ValueError(f"input_: expected one root of Headrace, got {len(roots)}")
        nothing: Any = config.copy(copy_frozen=False)
        nothing.offline_data(
            input_=roots, input_read_method="from_items", input_read_method_kwargs={}
        )
        super().__init__(nothing)
        self.config = config
        self.data = read_ray(roots[0], **config.input_read_method_kwargs)
        if self.materialize_data:
            self.data = self.data.materialize()
