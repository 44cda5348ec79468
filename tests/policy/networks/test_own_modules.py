"""A torch module of any kind becomes a version that acts as it does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from policy.inference.numpy_policy import NumpyPolicy
from policy.inference.spec import SpecError
from policy.inference.weight_store import WeightStore
from policy.networks.export import ExportError
from policy.networks.own_modules import publish_module
from storage.spaces.descriptors import Box, Dict, Discrete
from tests.policy.training.live_log import declare, part, write


class Images(nn.Module):
    """A small convolution over (H, W, C), a category and dropout, which is off when acting."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = nn.Sequential(nn.Conv2d(3, 4, 3, 2), nn.GELU(), nn.Flatten(), nn.Dropout(0.9))
        self.user = nn.Embedding(5, 4 * 9)
        self.norm = nn.Sequential(nn.LayerNorm(4 * 9), nn.Linear(4 * 9, 3))

    def forward(self, image: Tensor, user: Tensor, scale: float = 255.0) -> Tensor:
        seen = self.seen(image.permute(0, 3, 1, 2) / scale)
        found: Tensor = self.norm(seen + self.user(user))
        return found


def test_a_module_of_images_acts_as_itself(tmp_path: Path) -> None:
    """Its parameters are leaves by name; the caller's module stays in training mode."""
    torch.manual_seed(0)
    space = Dict({"image": Box((8, 8, 3), "uint8"), "user": Discrete(5, 1)})
    module = Images()
    publish_module(tmp_path, module, spaces=(space, Discrete(3)))
    assert module.training
    policy = NumpyPolicy.published(*WeightStore(tmp_path, "default").read(1))
    image = np.random.default_rng(0).integers(0, 256, (8, 8, 3), np.uint8)
    found = policy.act_one({"image": image, "user": 4}, np.random.default_rng(0))
    with torch.no_grad():
        module.eval()
        expected = module(torch.from_numpy(image)[None].float(), torch.tensor([3])).numpy()[0]
    np.testing.assert_allclose(found.dist_inputs, expected, atol=1e-5)


class Threshold(nn.Module):
    """Another result for large numbers, which plausible observations have not, but the log has."""

    def forward(self, obs: Tensor) -> Tensor:
        return obs[:, :2] if torch.compiler.is_compiling() else obs[:, :2] + (obs[:, :2] > 2.5)


@pytest.mark.long
def test_outputs_are_compared_on_the_log(tmp_path: Path) -> None:
    """A file that differs from the module on an observation of the log is not published."""
    declare(tmp_path)
    with pytest.raises(SpecError, match=r"expected the parameter 'flat', or leaves .*got 'a'"):
        publish_module(tmp_path, Two())
    with pytest.raises(SpecError, match="Pair: expected a tensor from forward, got tuple"):
        publish_module(tmp_path, Pair())
    module = Threshold()
    publish_module(tmp_path, module, live=False)
    write(tmp_path, *(part(i) for i in range(40)))
    with pytest.raises(ExportError, match=r"Threshold: expected the module's outputs .*up to 1$"):
        publish_module(tmp_path, module)


class Two(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return a + b


class Pair(nn.Module):
    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        return obs[:, :2], obs[:, 2:]
