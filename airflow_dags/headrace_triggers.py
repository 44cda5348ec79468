"""Waits of Headrace's DAGs, for the triggerer, which imports them by this module's name."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator
from typing import Any

from airflow.triggers.base import BaseEventTrigger, BaseTrigger, TriggerEvent

SHARD = re.compile(r"\d{12,}-(\d{12,})-[0-9a-f]{16}\.parquet")


class AfterSeconds(BaseTrigger):
    """Fires once after some seconds."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return f"{__name__}.AfterSeconds", {"seconds": self.seconds}

    async def run(self) -> AsyncIterator[TriggerEvent]:
        await asyncio.sleep(self.seconds)
        yield TriggerEvent(None)


class SealedShards(BaseEventTrigger):
    """Fires when a root's shards have `min_parts` more parts, with {stream: last ordinal}.

    The ordinals of the last event are kept in the asset's state, so that a restarted triggerer
    fires nothing twice. `asset` tells the triggers of assets apart that watch one root.
    """

    def __init__(self, root: str, asset: str, min_parts: int = 1, poll: float = 5.0) -> None:
        super().__init__()
        self.root, self.asset, self.min_parts, self.poll = root, asset, min_parts, poll

    def serialize(self) -> tuple[str, dict[str, Any]]:
        names = ("root", "asset", "min_parts", "poll")
        return f"{__name__}.SealedShards", {name: getattr(self, name) for name in names}

    async def run(self) -> AsyncIterator[TriggerEvent]:
        store: Any = self.asset_state_store
        known = dict(await store.aget("streams", default={})) if store is not None else {}
        while True:
            found = await asyncio.to_thread(marks_under, self.root)
            new = sum(last - known.get(stream, -1) for stream, last in found.items())
            if found and new >= self.min_parts:
                yield TriggerEvent({"streams": found})
                known = found
                if store is not None:  # after the event: one that was not raised must come again
                    await store.aset("streams", found)
            await asyncio.sleep(self.poll)


def marks_under(root: str) -> dict[str, int]:
    """Stream -> the last ordinal in its shards."""
    found: dict[str, int] = {}
    shards = os.path.join(root, "shards")
    for stream in sorted(os.listdir(shards)) if os.path.isdir(shards) else ():
        folder = os.path.join(shards, stream)
        names = map(SHARD.fullmatch, os.listdir(folder) if os.path.isdir(folder) else ())
        lasts = [int(match[1]) for match in names if match]
        found |= {stream: max(lasts)} if lasts else {}
    return found
