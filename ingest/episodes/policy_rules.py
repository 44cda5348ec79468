"""The rules that events are checked by: declarations, and what is derived from them once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from storage.declarations.declaration import PolicyDeclaration
from storage.declarations.redaction_rules import leaf_rules, rules_for_earlier
from storage.experience.episode import policy_of_id
from storage.spaces.action_mask import ActionMask
from storage.spaces.candidates import Candidates
from storage.spaces.codec import Codec
from storage.spaces.descriptors import Box, SpaceError
from storage.spaces.named_features import NamedFeatures


@dataclass(frozen=True)
class PolicyRules:
    """A declaration with what is derived from it once."""

    declaration: PolicyDeclaration
    observation: Codec
    action: Codec
    schema_id: str

    @cached_property
    def has_densities(self) -> bool:
        """Whether actions have a probability density, which can exceed 1."""
        return any(isinstance(leaf.space, Box) for leaf in self.action.leaves)

    @cached_property
    def action_mask(self) -> ActionMask | None:
        """The mask of the observation; none if it does not fit the actions, or is redacted.

        Only release 0.1.0, which knew no masks, let such a leaf be declared.
        """
        redacted = leaf_rules(self.declaration.redact, self.observation.space)
        try:
            mask = ActionMask.of(self.observation.space, self.action.space)
        except SpaceError:
            return None
        return None if mask and mask.leaf.path in [leaf.path for leaf, _ in redacted] else mask

    @cached_property
    def candidates(self) -> Candidates | None:
        """The candidates of the observation, if it has any whose mask counts."""
        if self.action_mask is None:
            return None
        return Candidates.of(self.observation.space, self.action.space)

    @cached_property
    def named_features(self) -> NamedFeatures:
        """The columns of candidates by their declared names."""
        return NamedFeatures(self.declaration.candidate_features)

    def require_allowed(self, obs: bytes, action: bytes | None = None) -> None:
        """Raise SpaceError if the observation's mask forbids the action, or allows no action."""
        if self.action_mask is not None:
            self.action_mask.require_in((self.observation, self.action), obs, action)

    def all_allowed(self, obs: bytes, actions: bytes, count: int) -> bool:
        """Whether the masks of `count` observations allow the actions; both of fixed size."""
        mask = self.action_mask
        if mask is None:
            return True
        taken = self.action.columns(actions, count)[mask.choices.path]
        return not mask.forbidden(self.observation.columns(obs, count), taken).any()

    @classmethod
    def of(cls, declaration: PolicyDeclaration) -> PolicyRules:
        return cls(
            declaration,
            Codec(declaration.observation),
            Codec(declaration.action),
            declaration.schema_id,
        )


class Policies:
    """The rules of all policies, by current and by earlier declarations. Immutable."""

    def __init__(
        self, today: Mapping[str, PolicyDeclaration], past: Iterable[PolicyDeclaration] = ()
    ) -> None:
        rules = {name: PolicyRules.of(policy) for name, policy in today.items()}
        earlier = (_redacted_today(policy, today.get(policy.policy_id)) for policy in past)
        every = [*(PolicyRules.of(policy) for policy in earlier), *rules.values()]
        self.rules: Mapping[str, PolicyRules] = rules  # the current ones, by policy name
        self.schemas: Mapping[tuple[str, str], PolicyRules] = {  # all, by policy and schema id
            (one.declaration.policy_id, one.schema_id): one for one in every
        }
        self.redacts = any(rules.declaration.redact for rules in every)

    def named(self, policy_id: str | None) -> str:
        """The policy that an id names; for None the only policy, or the default one."""
        return policy_of_id(policy_id, self.rules)

    def of(self, policy_id: str | None, schema_id: str | None) -> PolicyRules | None:
        """The current rules of a policy, or those of its earlier declaration with that schema.

        None if the policy does not exist now, or if no such schema was declared.
        """
        name = self.named(policy_id)
        today = self.rules.get(name)
        if today is None or schema_id in (None, today.schema_id):
            return today
        return self.schemas.get((name, schema_id or ""))


def _redacted_today(
    earlier: PolicyDeclaration, today: PolicyDeclaration | None
) -> PolicyDeclaration:
    """An earlier declaration that also redacts what the current one redacts."""
    if today is None or not today.redact:
        return earlier
    redact = rules_for_earlier(earlier.redact, today.redact, earlier.observation)
    return replace(earlier, redact=redact)
