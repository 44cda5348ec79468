"""`served/{collector_id}.json`: what each collector serves of a policy, and what it refused.

A collector registers here for 30 seconds at a time, and its current state counts until then. Which
versions it served and refused is kept longer, because a rollback goes to one that was served. The
files are replaced atomically and not synced: after a power cut one may be missing or damaged, and
is written again within seconds.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Iterable
from pathlib import Path

from storage.errors import WeightStoreError
from storage.experience.range_set import RangeSet
from storage.weights.files import read_document, visible
from storage.weights.manifest import Served, seal_document

__all__ = ["FORGET_SECONDS", "REGISTERED_SECONDS", "ServedRecords", "ever_served"]

log = logging.getLogger("headrace.weights")

REGISTERED_SECONDS = 30.0
FORGET_SECONDS = 30 * 86_400.0
"""Seconds after which the record of an absent collector is removed."""


class ServedRecords:
    """The records of one policy's store."""

    def __init__(self, directory: Path) -> None:
        self._folder = directory / "served"

    def write(self, record: Served) -> None:
        """Replace a collector's record. Raises OSError, also if the store has no folder yet.

        The first publication creates the folder, possibly under another account.
        """
        self._folder.mkdir(exist_ok=True)
        path = self._folder / f"{record.collector_id}.json"
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
        try:
            temporary.write_bytes(seal_document("served", record.to_json()))
            os.replace(temporary, path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise

    def read(self) -> list[Served]:
        """Every record, expired or not, in the order of the collectors' ids."""
        found = []
        try:
            paths = sorted(visible(self._folder))
        except OSError as error:  # an unreadable folder must not prevent a publication
            log.warning("the records of served versions cannot be read: %s", error)
            return []
        for path in paths:
            try:
                record = Served.from_json(read_document("served", path), path)
                ever_served([record])
            except (WeightStoreError, ValueError, OSError) as error:
                log.warning("a record of a served version is left out: %s", error)
                continue
            if f"{record.collector_id}.json" == path.name:
                found.append(record)
        return found

    def registered(self, now: float) -> list[Served]:
        """The records that count at `now`, in seconds since the epoch."""
        return [record for record in self.read() if record.until > now * 1_000_000]

    def forget(self, now: float) -> None:
        """Remove the records of collectors that have been absent for 30 days."""
        for record in self.read():
            if record.until < (now - FORGET_SECONDS) * 1_000_000:
                (self._folder / f"{record.collector_id}.json").unlink(missing_ok=True)


def ever_served(records: Iterable[Served]) -> tuple[RangeSet, RangeSet]:
    """The versions that any collector served, and those that any of them refused."""
    served, refused = RangeSet(), RangeSet()
    for record in records:
        served.update(RangeSet.from_json(record.served))
        refused.update(RangeSet.of(int(version) for version in record.refused))
    return served, refused
