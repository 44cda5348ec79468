"""Flow control for on-policy training: how many steps a published version may act.

`FlowControl` counts, per policy, the steps closed while a version was live. At `steps_per_version`
the policy is *held*: replies say so, and clients wait until a newer version is live. A surplus
counts for the next version, so that the learner never falls behind. Counts start at zero with each
start of the collector.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from storage.declarations.declaration import PolicyDeclaration


class FlowControl:
    """`live_version(policy_id)` returns the live version, None if there is none."""

    def __init__(
        self,
        policies: Mapping[str, PolicyDeclaration],
        live_version: Callable[[str], int | None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._quota = {
            name: policy.steps_per_version
            for name, policy in policies.items()
            if policy.steps_per_version is not None
        }
        self._most_lag = {
            name: policy.max_policy_lag
            for name, policy in policies.items()
            if policy.max_policy_lag is not None
        }
        self._live_version = live_version
        self._counts: dict[str, tuple[int, int]] = {}  # policy -> (version, closed steps)
        self._held: dict[str, int] = {}  # policy -> the latest held version
        self._clock = clock
        self._since: dict[str, tuple[int, float]] = {}  # policy -> (version, held since)

    @property
    def active(self) -> bool:
        return bool(self._quota or self._most_lag)

    def count(self, policy_id: str, version: int) -> None:
        """Count a closed step, whichever version acted: all of them are trained on."""
        quota = self._quota.get(policy_id)
        live = self._live_version(policy_id) if quota is not None else None
        if quota is None or live is None:
            return
        known, steps = self._counts.get(policy_id, (live, 0))
        if live != known:
            steps = max(0, steps - quota)  # the surplus of the previous version
        self._counts[policy_id] = (live, steps + 1)
        if steps + 1 >= quota and self._since.get(policy_id, (-1, 0.0))[0] != live:
            self._since[policy_id] = live, self._clock()

    def held(self) -> dict[str, int]:
        """policy -> its live version, for policies whose live version has enough steps."""
        found: dict[str, int] = {}
        for policy_id, (version, steps) in self._counts.items():
            if steps >= self._quota[policy_id] and version == self._live_version(policy_id):
                found[policy_id] = version
        return found

    def stalled(self) -> dict[str, float]:
        """policy -> seconds for which it has been held, 0 if it is not; only with a quota."""
        held, now = self.held(), self._clock()
        return {name: now - self._since[name][1] if name in held else 0.0 for name in self._quota}

    def versions_to_hold(self) -> dict[str, int]:
        """policy -> version, for replies: clients with this version or an older one wait.

        It is a version with enough steps, or one that lags by more than `max_policy_lag`.
        """
        found = self.held()
        for policy_id, lag in self._most_lag.items():
            live = self._live_version(policy_id)
            if live is not None and live - lag > 0:
                found.setdefault(policy_id, live - lag - 1)
        return found

    def newly_held(self, held: Mapping[str, int]) -> list[str]:
        """The policies of `held` that are new in it; their episodes are to be cut at once."""
        fresh = [name for name, version in held.items() if self._held.get(name) != version]
        self._held.update(held)
        return fresh
