"""gymnasium spaces <-> descriptors."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from storage.spaces.codec import Codec
from storage.spaces.descriptors import Box, Discrete, SpaceError, Text
from storage.spaces.gymnasium_spaces import from_gym, to_gym

G = gym.spaces
BOUNDS = G.Box(np.array([-1, 0], np.float32), np.array([1, np.inf], np.float32))
SUPPORTED: list[gym.Space[Any]] = [
    BOUNDS,
    G.Box(-2.5, 2.5, (), np.float64),
    G.Box(0, 255, (3, 4, 2), np.uint8),
    G.Box(-np.inf, np.inf, (3,), np.float16),
    G.Discrete(5, start=-2),
    G.MultiDiscrete([3, 4], start=[1, -1]),
    G.MultiBinary(4),
    G.MultiBinary((2, 3)),
    G.Text(9, min_length=2, charset="abc"),
    G.Dict({"b": G.Discrete(2), "a": G.Tuple([BOUNDS, G.Dict({"c": G.MultiBinary(1)})])}),
]


@pytest.mark.parametrize("space", SUPPORTED, ids=str)
def test_a_space_comes_back_as_it_was(space: gym.Space[Any]) -> None:
    """to_gym(from_gym(space)) is the space, bounds, starts and character sets included."""
    assert to_gym(from_gym(space)) == space


@pytest.mark.parametrize("space", SUPPORTED, ids=str)
def test_what_gymnasium_samples_the_codec_takes(space: gym.Space[Any]) -> None:
    """A descriptor allows the values of its space, and they decode to equal values."""
    space.seed(7)
    codec = Codec(from_gym(space))
    for _ in range(20):
        value = space.sample()
        again = codec.encode(codec.decode(codec.encode(value)))
        assert again == codec.encode(value)


@pytest.mark.parametrize(
    ("space", "name"),
    [
        (G.Graph(G.Discrete(2), None), "Graph"),
        (G.Sequence(G.Discrete(2)), "Sequence"),
        (G.OneOf([G.Discrete(2), G.Discrete(3)]), "OneOf"),
    ],
)
def test_refused_spaces_are_named_with_their_place(space: gym.Space[Any], name: str) -> None:
    with pytest.raises(SpaceError, match=rf"\$\.in\[1\]: {name} spaces are not supported"):
        from_gym(G.Dict({"in": G.Tuple([G.Discrete(2), space])}))


def test_what_a_descriptor_cannot_say_is_refused() -> None:
    with pytest.raises(SpaceError, match=r"one dimension, got shape \(1, 2\)"):
        from_gym(G.MultiDiscrete(np.array([[2, 3]])))
    numbered: Any = {1: G.Discrete(2)}
    with pytest.raises(SpaceError, match="strings as the keys"):
        from_gym(G.Dict(numbered))
    with pytest.raises(SpaceError, match=r"without '\.'"):
        from_gym(G.Dict({"a.b": G.Discrete(2)}))


def test_a_space_of_another_maker_is_refused() -> None:
    class Odd(gym.Space[int]):
        pass

    with pytest.raises(SpaceError, match="got Odd"):
        from_gym(Odd())


def test_an_environments_spaces_become_descriptors() -> None:
    with gym.make("CartPole-v1") as env:
        observation, action = from_gym(env.observation_space), from_gym(env.action_space)
    assert isinstance(observation, Box)
    assert observation.shape == (4,)
    assert action == Discrete(2)


def test_text_without_a_charset_becomes_printable_ascii() -> None:
    assert to_gym(Text(4)).contains("a~ 1")
    assert not to_gym(Text(4)).contains("\N{BULLET}")
