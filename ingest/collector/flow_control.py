"""Flow control for on-policy training: how many steps a published version may be used for.

`FlowControl` counts, per policy, the steps closed while a version was live. When a policy's
`steps_per_version` are there it is *held*: replies say so, and clients wait until a newer version
is live. A surplus counts for the next version, so that the learner never falls behind; counts start
anew with the collector.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from storage.declarations.declaration import PolicyDeclaration


class FlowControl:
    """`live_version(policy_id)` answers what is live now, None for nothing."""

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
        self._held: dict[str, int] = {}  # policy -> the version that was held last
        self._clock = clock
        self._since: dict[str, tuple[int, float]] = {}  # policy -> (version, since when it is held)

    @property
    def active(self) -> bool:
        return bool(self._quota or self._most_lag)

    def count(self, policy_id: str, version: int) -> None:
        """Note that a step was closed, whichever version acted it: it is experience to train on."""
        quota = self._quota.get(policy_id)
        live = self._live_version(policy_id) if quota is not None else None
        if quota is None or live is None:
            return
        known, steps = self._counts.get(policy_id, (live, 0))
        if live != known:
            steps = max(0, steps - quota)  # what was acted beyond the last version's share
        self._counts[policy_id] = (live, steps + 1)
        if steps + 1 >= quota and self._since.get(policy_id, (-1, 0.0))[0] != live:
            self._since[policy_id] = live, self._clock()

    def held(self) -> dict[str, int]:
        """Policies whose live version has its steps, and that version."""
        found: dict[str, int] = {}
        for policy_id, quota in self._quota.items():
            version, steps = self._counts.get(policy_id, (-1, 0))
            if steps >= quota and version == self._live_version(policy_id):
                found[policy_id] = version
        return found

    def stalled(self) -> dict[str, float]:
        """Seconds for which each policy with a quota is held; 0 for one that is not."""
        held, now = self.held(), self._clock()
        return {name: now - self._since[name][1] if name in held else 0.0 for name in self._quota}

    def told(self) -> dict[str, int]:
        """What replies tell: clients that act with this version, or an older one, wait.

        That is a version with its steps, or one that lags by more than `max_policy_lag`.
        """
        found = self.held()
        for policy_id, lag in self._most_lag.items():
            live = self._live_version(policy_id)
            if live is not None and live - lag > 0:
                found.setdefault(policy_id, live - lag - 1)
        return found

    def newly_held(self, held: Mapping[str, int]) -> list[str]:
        """Those of `held` that are told for the first time: their parts are to be cut at once."""
        fresh = [name for name, version in held.items() if self._held.get(name) != version]
        self._held.update(held)
        return fresh
