"""The user's functions that map agents to policies."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


def takes_episode(function: Callable[..., Any]) -> bool:
    """Whether a function of an agent's id also takes the episode, as a required parameter."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return False
    if any(one.kind is one.VAR_POSITIONAL for one in parameters):
        return True
    places = [
        one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)
    ]
    return len(places) >= 2 and places[1].default is inspect.Parameter.empty
