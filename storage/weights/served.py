"""`served/{collector_id}.json`: what each collector serves of a policy, and what it refused.

A collector registers here for 30 seconds at a time, and its current state counts until then. Which
versions it served and refused is kept longer, because a rollback goes to one that was served. The
files are replaced atomically and not synced: after a power cut one may be missing or damaged, and
is written again within seconds.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from storage.errors import WeightStoreError
from storage.experience.range_set import RangeSet
from storage.weights.files import PolicyFiles
from storage.weights.manifest import Served

log = logging.getLogger("headrace.weights")

REGISTERED_SECONDS = 30.0
FORGET_SECONDS = 30 * 86_400.0
"""Seconds after which the record of an absent collector is removed."""


class ServedRecords:
    """The records of one policy's store."""

    def __init__(self, files: PolicyFiles) -> None:
        self._files = files

    def write(self, record: Served) -> None:
        """Replace a collector's record. Raises OSError."""
        self._files.write("served", _name(record.collector_id), record.to_json(), durable=False)

    def read(self) -> list[Served]:
        """Every record, expired or not, in the order of the collectors' ids."""
        found = []
        try:
            names = self._files.names("served")
        except OSError as error:  # an unreadable folder must not prevent a publication
            log.warning("the records of served versions cannot be read: %s", error)
            return []
        for name in names:
            try:
                body = self._files.document("served", f"served/{name}")
                record = Served.from_json(body, self._files.where(f"served/{name}"))
                ever_served([record])
            except (WeightStoreError, ValueError, OSError) as error:
                log.warning("a record of a served version is left out: %s", error)
                continue
            if f"{record.collector_id}.json" == name:
                found.append(record)
        return found

    def registered(self, now: float) -> list[Served]:
        """The records that count at `now`, in seconds since the epoch."""
        return [record for record in self.read() if record.until > now * 1_000_000]

    def forget(self, now: float) -> None:
        """Remove the records of collectors that have been absent for 30 days."""
        for record in self.read():
            if record.until < (now - FORGET_SECONDS) * 1_000_000:
                self._files.objects.delete(self._files.name(_name(record.collector_id)))


def _name(collector_id: str) -> str:
    return f"served/{collector_id}.json"


def ever_served(records: Iterable[Served]) -> tuple[RangeSet, RangeSet]:
    """The versions that any collector served, and those that any of them refused."""
    served, refused = RangeSet(), RangeSet()
    for record in records:
        served.update(RangeSet.from_json(record.served))
        refused.update(RangeSet.of(int(version) for version in record.refused))
    return served, refused
