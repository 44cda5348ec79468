"""Broken builds around remote inference."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from ingest.delivery.unconfirmed import Kept
from ingest.episodes.judge import Judge
from ingest.protocol import messages as wire
from tests.faults.mutants import Patch, mutant


@mutant(decisions="differs")
def decisions_ignored(patch: Patch) -> None:
    """The collector does not check which decision an event follows."""
    judge = patch.original(Judge, "judge")

    def unnamed(
        self: Judge, instance: str | None, event: wire.Event, *args: Any, **given: Any
    ) -> Any:
        if not isinstance(event, wire.Start):
            event = msgspec.structs.replace(event, decided=None)
        return judge(self, instance, event, *args, **given)

    patch.replace(Judge, "judge", unnamed)


@mutant(decisions="refused")
def nothing_kept(patch: Patch) -> None:
    """The client counts the reply to get_action as an acknowledgement."""

    def forget(self: Kept, episode_id: str, events: Iterable[wire.Event]) -> None:
        return

    patch.replace(Kept, "keep", forget)
