"""The action rule: how a policy comes from the network's distribution to an action.

| kind | parameter | an action is |
|---|---|---|
| sample | temperature > 0 | drawn from the distribution, whose logits are divided by it |
| epsilon_greedy | 0 <= epsilon <= 1 | the most likely one, or with probability epsilon any |
| greedy | | the most likely one |

All of them can be declared in a spec. What acts here so far is `sample` at temperature 1: the
others are refused where a policy is made, because what is stored must be the rule's propensity.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

__all__ = ["ActionRule", "Kind"]

Kind = Literal["sample", "epsilon_greedy", "greedy"]
_PARAMETERS: Mapping[str, str | None] = {
    "sample": "temperature",
    "epsilon_greedy": "epsilon",
    "greedy": None,
}


@dataclass(frozen=True)
class ActionRule:
    """One rule. Raises ValueError for an unknown kind and for another's parameter."""

    kind: Kind = "sample"
    temperature: float | None = None  # of sample: 1 unless given
    epsilon: float | None = None  # of epsilon_greedy: needed

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(
                f"action_rule: expected a kind of {list(get_args(Kind))}, got {self.kind!r:.80}"
            )
        if self.kind == "sample" and self.temperature is None:
            object.__setattr__(self, "temperature", 1.0)
        own = _PARAMETERS[self.kind]
        for name, low in (("temperature", 0.0), ("epsilon", -math.inf)):
            value = getattr(self, name)
            if name != own:
                if value is not None:
                    raise ValueError(f"action_rule: {self.kind} takes no {name}, got {value!r:.80}")
            elif isinstance(value, bool) or not isinstance(value, (int, float)):
                raise ValueError(f"action_rule: expected {name} as a number, got {value!r:.80}")
            elif not low < value < math.inf or (name == "epsilon" and not 0 <= value <= 1):
                expected = "> 0" if name == "temperature" else "from 0 to 1"
                raise ValueError(f"action_rule: expected {name} {expected}, got {value!r:.80}")

    def require_supported(self) -> None:
        """Raise ValueError for a rule that nothing here acts by yet."""
        if self != ActionRule():
            raise ValueError(
                f"action_rule: {self.to_json()} is not supported yet: expected "
                f"{ActionRule().to_json()}"
            )

    def to_json(self) -> dict[str, Any]:
        own = _PARAMETERS[self.kind]
        return {"kind": self.kind} | ({} if own is None else {own: getattr(self, own)})

    @classmethod
    def from_json(cls, document: Any) -> ActionRule:
        """The rule of a document made by `to_json`. Raises ValueError."""
        if not isinstance(document, dict) or "kind" not in document:
            raise ValueError(f"action_rule: expected an object with a kind, got {document!r:.80}")
        unknown = sorted(set(document) - {"kind", "temperature", "epsilon"})
        if unknown:
            raise ValueError(f"action_rule: expected kind and its parameter, got {unknown!r:.80}")
        return cls(**document)
