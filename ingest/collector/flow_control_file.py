"""`flow/{policy_id}.json`: tells trainers, through a file, that clients wait for a version.

The collector counts the steps that it closed, a trainer those that it read. They differ for good if
a shard is damaged or missing. So the collector writes a file (storage.declarations.held_policies)
when a policy is held and all its steps are in shards: a trainer need not wait for steps that it
cannot read by then.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import queue
import threading
from pathlib import Path

from ingest.collector.collector import Collector
from storage.declarations.held_policies import held_version, say_held

log = logging.getLogger("headrace.collector")

LOOK_SECONDS = 0.05
AGAIN_SECONDS, AT_ONCE = 1.0, 250
"""Files that are checked in these seconds while nothing changes; more of them take turns."""


class FlowControlFile:
    """Writes the files of one root's policies as flow control changes.

    A task on the event loop notes the changes. A thread writes them, because a file system that
    hangs must not block the event loop; nothing waits for the thread.
    """

    def __init__(self, collector: Collector, root: Path) -> None:
        self._collector, self._root = collector, root
        self._policies = {
            name: policy.schema_id
            for name, policy in collector.policies.items()
            if policy.steps_per_version is not None
        }
        self._latest: dict[str, int | None] = {}
        self._changes: queue.SimpleQueue[tuple[str, int | None]] = queue.SimpleQueue()

    async def follow(self) -> None:
        """Note changes of flow control until cancelled."""
        if not self._policies:
            await asyncio.Event().wait()
        threading.Thread(target=self._write, name="headrace-held", daemon=True).start()
        while True:
            self.look()
            await asyncio.sleep(LOOK_SECONDS)

    def look(self) -> None:
        """Note the changes since the last call; the first call also resets older files."""
        held = self._collector.flow.held()
        for name, schema_id in self._policies.items():
            version = held.get(name)
            if version is not None and not self._collector.sealing.written(schema_id):
                version = None
            if name not in self._latest or self._latest[name] != version:
                self._latest[name] = version
                self._changes.put((name, version))

    def _write(self) -> None:
        """Make the files equal to the latest notes.

        A file that cannot be written is tried again and logged once. A file that was removed or
        restored from a backup is written again.
        """
        latest: dict[str, int | None] = {}
        warned = False
        while True:
            try:
                name, version = self._changes.get(timeout=AGAIN_SECONDS)
                latest[name] = version
                due = [name, next(iter(latest))]
            except queue.Empty:
                due = list(itertools.islice(latest, AT_ONCE))
            for name in due:
                version = latest[name] = latest.pop(name)  # to the end: the files take turns
                if held_version(self._root, name) == version:
                    continue
                try:
                    say_held(self._root, name, version)
                except OSError as error:
                    if not warned:
                        text = "policy %s: its trainer's flow-control file cannot be written: %s"
                        log.warning(text, name, error)
                    warned = True
                else:
                    warned = False
