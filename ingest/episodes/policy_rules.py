"""The rules that events are checked by: declarations, and what is derived from them once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from storage.declarations.declaration import PolicyDeclaration
from storage.declarations.redaction_rules import rules_for_earlier
from storage.experience.episode import DEFAULT_POLICY
from storage.spaces.codec import Codec
from storage.spaces.descriptors import Box


@dataclass(frozen=True)
class PolicyRules:
    """A declaration with what is derived from it once."""

    declaration: PolicyDeclaration
    observation: Codec
    action: Codec
    schema_id: str

    @cached_property
    def has_densities(self) -> bool:
        """Whether an action has a density, which may exceed 1, in place of a probability."""
        return any(isinstance(leaf.space, Box) for leaf in self.action.leaves)

    @classmethod
    def of(cls, declaration: PolicyDeclaration) -> PolicyRules:
        return cls(
            declaration,
            Codec(declaration.observation),
            Codec(declaration.action),
            declaration.schema_id,
        )


class Policies:
    """The rules of all policies, of today and of the earlier declarations. It never changes."""

    def __init__(
        self, today: Mapping[str, PolicyDeclaration], past: Iterable[PolicyDeclaration] = ()
    ) -> None:
        rules = {name: PolicyRules.of(policy) for name, policy in today.items()}
        earlier = (_redacted_today(policy, today.get(policy.policy_id)) for policy in past)
        every = [*(PolicyRules.of(policy) for policy in earlier), *rules.values()]
        self.rules: Mapping[str, PolicyRules] = rules  # today's, by the policy's name
        self.schemas: Mapping[tuple[str, str], PolicyRules] = {  # all, by policy and schema id
            (one.declaration.policy_id, one.schema_id): one for one in every
        }
        self.redacts = any(rules.declaration.redact for rules in every)

    def named(self, policy_id: str | None) -> str:
        """The policy that an id names, or its absence."""
        alone = next(iter(self.rules)) if len(self.rules) == 1 else DEFAULT_POLICY
        return alone if policy_id is None else policy_id

    def of(self, policy_id: str | None, schema_id: str | None) -> PolicyRules | None:
        """A policy's rules of today, or of the earlier declaration with that schema; None where
        there is no such policy today, or no such schema was ever declared."""
        name = self.named(policy_id)
        today = self.rules.get(name)
        if today is None or schema_id in (None, today.schema_id):
            return today
        return self.schemas.get((name, schema_id or ""))


def _redacted_today(
    earlier: PolicyDeclaration, today: PolicyDeclaration | None
) -> PolicyDeclaration:
    """An earlier declaration with what its policy's file of today takes out, too."""
    if today is None or not today.redact:
        return earlier
    redact = rules_for_earlier(earlier.redact, today.redact, earlier.observation)
    return replace(earlier, redact=redact)
