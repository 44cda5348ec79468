"""The action rule: how a policy chooses an action from its network's output.

| kind | parameter | an action is |
|---|---|---|
| sample | temperature > 0, 1 by default | sampled; it divides logits and multiplies a Box's std |
| epsilon_greedy | 0 <= epsilon <= 1, 0.05 by default | the best one, with probability epsilon any |
| squarecb | gamma >= 0, 100 by default | another one less often, the worse its value is |
| greedy | | the best one |

The best one has the largest logit or action value; ties share its probability. A rule applies
separately to every choice of an action: each element of a MultiDiscrete, each bit of a MultiBinary,
each leaf of a Dict or Tuple. So the probability of an action is a product. As JSON a rule has its
kind and its parameter: `{"kind": "epsilon_greedy", "epsilon": 0.05}`.

In addition any rule can have a floor, `explore`: with this probability a choice is any of the
allowed options. So each of n allowed options keeps a probability of at least explore / n, and
other policies can be judged on what was tried.

For the resulting probabilities see `policy.inference.distributions.ruled`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

Kind = Literal["sample", "epsilon_greedy", "squarecb", "greedy"]
_PARAMETERS: Mapping[str, tuple[str, float] | None] = {
    "sample": ("temperature", 1.0),
    "epsilon_greedy": ("epsilon", 0.05),
    "squarecb": ("gamma", 100.0),
    "greedy": None,
}
_OWN = ("temperature", "epsilon", "gamma")
_EXPECTED = {
    "temperature": "> 0",
    "epsilon": "from 0 to 1",
    "gamma": ">= 0",
    "explore": "from 0 to 1",
}


@dataclass(frozen=True)
class ActionRule:
    """One rule. Raises ValueError for an unknown kind, or a parameter of another kind.

    Args:
        kind: "sample" from the distribution; "epsilon_greedy": the best action, but any with
            probability epsilon; "squarecb", which explores a value that is worse by d with a
            probability of 1 / (n + gamma d), for outputs that are rewards; or "greedy", the best.
        temperature: only of "sample", above 0; None stands for 1. It divides logits and multiplies
            a Box's standard deviation.
        epsilon: only of "epsilon_greedy", 0 to 1; None stands for 0.05.
        gamma: only of "squarecb", 0 or more, in units of 1 / reward; None stands for 100.
        explore: the probability with which a choice is any allowed option, in addition to the rule;
            0 to 1. Needs choices: a Box has no such floor.
    """

    kind: Kind = "sample"
    temperature: float | None = None
    epsilon: float | None = None
    gamma: float | None = None
    explore: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(
                f"action_rule: expected a kind of {list(get_args(Kind))}, got {self.kind!r:.80}"
            )
        name, default = _PARAMETERS[self.kind] or ("", 0.0)
        object.__setattr__(self, "explore", _number("explore", self.explore))
        for other in _OWN:
            value = getattr(self, other)
            if other == name:
                object.__setattr__(self, name, _number(name, default if value is None else value))
            elif value is not None:
                raise ValueError(f"action_rule: {self.kind} takes no {other}, got {value!r:.80}")

    @property
    def explores(self) -> bool:
        """Whether every action has a positive probability.

        If not, other policies cannot be judged on episodes of this rule.
        """
        always = self.kind in ("sample", "squarecb")
        return always or bool(self.epsilon) or bool(self.explore)

    def to_json(self) -> dict[str, Any]:
        """The rule as it stands in a spec, without parameters of other kinds."""
        own = _PARAMETERS[self.kind]
        found = {"kind": self.kind} | ({} if own is None else {own[0]: getattr(self, own[0])})
        return found | ({"explore": self.explore} if self.explore else {})

    @classmethod
    def from_json(cls, document: Any) -> ActionRule:
        """Parse the result of `to_json`. Raises ValueError."""
        if not isinstance(document, dict) or "kind" not in document:
            raise ValueError(f"action_rule: expected an object with a kind, got {document!r:.80}")
        unknown = sorted(map(str, set(document) - {"kind", *_EXPECTED}))
        if unknown:
            raise ValueError(f"action_rule: expected kind and its parameter, got {unknown!r:.80}")
        given = {name: document[name] for name in _EXPECTED if name in document}
        rule = cls(document["kind"], **given)
        for name in rule.to_json():
            if document.get(name) is None:
                raise ValueError(f"action_rule: expected {name} as a number, got None")
        return rule

    @classmethod
    def parse(cls, text: str) -> ActionRule:
        """Parse `sample:0.5`, `epsilon_greedy:0.1`, `squarecb:200` or `greedy`. Raises ValueError.

        A floor follows the rule: `greedy+explore:0.05`.
        """
        text, plus, floor = text.partition("+explore:")
        if plus:
            return cls.from_json({**cls.parse(text).to_json(), "explore": _read(floor)})
        kind, colon, number = text.partition(":")
        own = _PARAMETERS.get(kind)
        if kind not in _PARAMETERS or (colon and own is None):
            raise ValueError(
                "action_rule: expected sample[:temperature], epsilon_greedy[:epsilon], "
                "squarecb[:gamma] or greedy, "
                f"got {text!r:.80}"
            )
        if own is None or not colon:
            return cls(kind)  # type: ignore[arg-type]  # one of _PARAMETERS
        return cls.from_json({"kind": kind, own[0]: _read(number)})

    def __str__(self) -> str:
        """The form that `parse` accepts."""
        own = _PARAMETERS[self.kind]
        found = self.kind if own is None else f"{self.kind}:{getattr(self, own[0])}"
        return found + (f"+explore:{self.explore}" if self.explore else "")


def _read(number: str) -> float | str:
    """The number of a text; other texts as they are, for the error to show."""
    try:
        return float(number)
    except ValueError:
        return number


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"action_rule: expected {name} as a number, got {value!r:.80}")
    least = value > 0 if name == "temperature" else value >= 0
    fits = least and value < math.inf if name in ("temperature", "gamma") else 0 <= value <= 1
    try:
        number = float(value)
    except OverflowError:
        fits = False
    if not fits:
        raise ValueError(f"action_rule: expected {name} {_EXPECTED[name]}, got {value!r:.80}")
    return number


SAMPLE = ActionRule()
GREEDY = ActionRule("greedy")
