"""Tells who trains, without a connection, that clients wait: `flow/{policy_id}.json`.

The collector counts the steps that it closed; a trainer counts those that it read. The difference,
a shard that is damaged or gone, is never made up. So the collector says, in a file beside the
shards (storage.declarations.held_policies), when a policy is held and all its steps are in shards:
what cannot be read of them by then does not come.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
from pathlib import Path

from ingest.collector.collector import Collector
from storage.declarations.held_policies import held_version, say_held

log = logging.getLogger("headrace.collector")

LOOK_SECONDS = 0.05
AGAIN_SECONDS = 1.0


class FlowControlFile:
    """Keeps the files of one root's policies as flow control has it; one task, and one thread.

    A root that does not answer must not stop the event loop: the thread writes, and nobody waits
    for it.
    """

    def __init__(self, collector: Collector, root: Path) -> None:
        self._collector, self._root = collector, root
        self._policies = {
            name: policy.schema_id
            for name, policy in collector.policies.items()
            if policy.steps_per_version is not None
        }
        self._said: dict[str, int | None] = {}
        self._changes: queue.SimpleQueue[tuple[str, int | None]] = queue.SimpleQueue()

    async def follow(self) -> None:
        """Look at flow control until cancelled."""
        if not self._policies:
            await asyncio.Event().wait()
        threading.Thread(target=self._write, name="headrace-held", daemon=True).start()
        while True:
            self.look()
            await asyncio.sleep(LOOK_SECONDS)

    def look(self) -> None:
        """Note what changed; what an earlier collector said is taken back at the first look."""
        held = self._collector.flow.held()
        for name, schema_id in self._policies.items():
            version = held.get(name)
            if version is not None and not self._collector.sealing.written(schema_id):
                version = None
            if name not in self._said or self._said[name] != version:
                self._said[name] = version
                self._changes.put((name, version))

    def _write(self) -> None:
        """Have the files say what was noted last. What cannot be written is tried again, and told
        once; what somebody removed or put back from a backup is written again."""
        said: dict[str, int | None] = {}
        told = False
        while True:
            with contextlib.suppress(queue.Empty):
                name, version = self._changes.get(timeout=AGAIN_SECONDS)
                said[name] = version
            for name, version in said.items():
                if held_version(self._root, name) == version:
                    continue
                try:
                    say_held(self._root, name, version)
                except OSError as error:
                    if not told:
                        log.warning("policy %s: its trainer cannot be told: %s", name, error)
                    told = True
                else:
                    told = False
