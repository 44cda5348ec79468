"""Broken builds of the collector's interface: keys that outlive their rows, and propensities."""

from __future__ import annotations

import math
from typing import Any

from ingest.episodes.idempotency import KeyBook
from ingest.protocol.agent_names import name_of
from ingest.server.action_routes import Acting
from tests.faults.mutants import Patch, mutant

CHUNKS = 2


@mutant(keyed_retries="doubled")
def keys_dropped_after_two_chunks(patch: Patch) -> None:
    """The journal's state keeps only the latest two chunks of keys."""
    state = patch.original(KeyBook, "state")

    def forgetful(self: KeyBook) -> tuple[dict[str, bytes], list[str]]:
        put, gone = state(self)
        while len(self._chunks) > CHUNKS:
            name, count = self._chunks.popleft()
            self._kept -= count
            gone.append(name)
        return put, gone

    patch.replace(KeyBook, "state", forgetful)


@mutant(trainer_kills="propensity")
def propensity_of_the_first_step(patch: Patch) -> None:
    """Every reply to get_action has the propensity of the episode's first action."""

    def first(self: Acting, answer: Any, request: Any) -> None:
        episode = self._collector.assembler.episodes[name_of(answer)]
        logp = episode.action_logp[0]
        answer.action_logp = logp if math.isfinite(logp) else None
        answer.policy_version = episode.policy_version[-1]
        answer.hold = episode.started.policy_id in request.held

    patch.replace(Acting, "_fill", first)
