"""The trainers' status and the latest decisions, read from a root's files by a thread.

A trainer reports in its lease's record (storage.weights.lease): rows trained on and left out, and
shards that it tries again. It can run on any machine with access to the root.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from storage.errors import StorageError
from storage.weights.decisions import Document, decision_files, load_decisions
from storage.weights.files import PolicyFiles
from storage.weights.lease import LeaseRecord, current_lease
from storage.weights.off_chain import marked

log = logging.getLogger("headrace.collector")

MOST_DECISIONS, AGAIN_SECONDS = 40, 60.0
LOOK_SECONDS, AT_ONCE, ROUND = 2.0, 500, 4
"""Seconds between looks. More policies than `AT_ONCE` take turns, in at most `ROUND` looks."""


class TrainerWatch:
    """The latest lease of every policy under a root, read by a thread that nothing waits for."""

    def __init__(self, root: Path, policies: Iterable[str]) -> None:
        self._root = root
        self._files = [PolicyFiles(root, name) for name in policies]
        self._turns = itertools.cycle(self._files)
        self._leases: dict[str, LeaseRecord] = {}
        self._off_chain: dict[str, list[int]] = {}
        self._decisions: dict[str, tuple[float, tuple[str, ...], Sequence[Document]]] = {}
        self._troubled: set[str] = set()

    async def follow(self) -> None:
        """Read until cancelled."""
        await look_in_thread(self.look, LOOK_SECONDS, "headrace-trainers")

    def status(self) -> dict[str, tuple[bool, dict[str, Any]]]:
        """policy -> (whether its trainer is alive, its latest report), for trained policies."""
        now = time.time()
        return {name: (now < one.expires, dict(one.status)) for name, one in self._leases.items()}

    def status_of(self, policy_id: str) -> tuple[bool | None, dict[str, Any]]:
        """`status` of one policy; None for the first if it has never had a trainer."""
        one = self._leases.get(policy_id)
        return (None, {}) if one is None else (time.time() < one.expires, dict(one.status))

    def decisions(self, policy_id: str) -> Sequence[Document]:
        """The latest decisions about a policy, oldest first."""
        return self._decisions.get(policy_id, (0.0, (), ()))[2]

    def off_chain(self) -> dict[str, list[int]]:
        """policy -> its versions whose checkpoints are lost (storage.weights.off_chain)."""
        return dict(self._off_chain)

    def look(self) -> None:
        """Read the leases, marks of versions and decisions of the policies whose turn it is."""
        most = max(AT_ONCE, math.ceil(len(self._files) / ROUND))
        for files in itertools.islice(self._turns, min(most, len(self._files))):
            name = files.policy_id
            try:
                if (lease := current_lease(files)) is not None:
                    self._leases[name] = lease
                self._off_chain[name] = marked(files)
                self._look_at_decisions(name)
            except (StorageError, OSError) as error:
                if name not in self._troubled:
                    log.warning("policy %s: trainer or decisions cannot be read: %s", name, error)
                self._troubled.add(name)
            else:
                self._troubled.discard(name)

    def _look_at_decisions(self, name: str) -> None:
        """Read the latest decisions if there is a new one, or after a while: texts get erased."""
        files = decision_files(self._root, name)[-MOST_DECISIONS:]
        read, known, _ = self._decisions.get(name, (-math.inf, (), ()))
        if files != known or time.monotonic() - read > AGAIN_SECONDS:
            found = load_decisions(self._root, name, latest=MOST_DECISIONS).known
            self._decisions[name] = time.monotonic(), files, found


async def look_in_thread(look: Callable[[], None], seconds: float, name: str) -> None:
    """Call `look` again and again in a thread of its own, until cancelled; the thread ends then."""
    over = threading.Event()

    def run() -> None:
        while not over.is_set():
            look()
            over.wait(seconds)

    threading.Thread(target=run, name=name, daemon=True).start()
    try:
        await asyncio.Event().wait()
    finally:
        over.set()


def number_in(value: object) -> float:
    """A number from another program's file, 0 for anything else."""
    return float(value) if isinstance(value, (int, float)) else 0.0
