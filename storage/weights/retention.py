"""Which versions are kept, and what is kept of the others: their names and digests.

`pruned.jsonl` has one line of about 400 bytes for each version whose content was removed: the first
16 hex digits of the SHA-256 of the rest, a space, and a JSON object. So a version number is never
used for other content, and the origin of a pruned version can be looked up as long as the store
exists.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping

from storage.errors import WeightsDamaged, WeightsNotFound
from storage.weights.files import PolicyFiles
from storage.weights.manifest import Manifest, Pruned, canonical, sha256

log = logging.getLogger("headrace.weights")

HOUR = 3600.0
HOURLY_SECONDS = 30 * 86_400.0
"""The age in seconds up to which one version per hour is kept."""
_NAMES, _MOST = "pruned.jsonl", 2**32


def hourly(created: Mapping[int, int], now: float) -> set[int]:
    """The last version of each hour of the last 30 days.

    `created`: version -> microseconds since the epoch; `now`: seconds since the epoch.
    """
    last: dict[int, int] = {}
    for version, moment in sorted(created.items()):
        seconds = moment / 1_000_000
        if seconds >= now - HOURLY_SECONDS:
            last[int(seconds // HOUR)] = version
    return set(last.values())


class PrunedVersions:
    """The file of one policy's pruned versions. Callers of `note` hold the policy's store lock."""

    def __init__(self, files: PolicyFiles) -> None:
        self._files = files

    def read(self) -> dict[int, Pruned]:
        """The pruned versions by number. A damaged line is skipped, with a warning."""
        try:
            lines = self._files.read(_NAMES, _MOST).splitlines()
        except WeightsNotFound:
            return {}
        except WeightsDamaged as error:
            log.warning("the list of removed versions cannot be read: %s", error)
            return {}
        found = {}
        for number, line in enumerate(lines, 1):
            if not line:
                continue
            digest, _, data = line.partition(b" ")
            try:
                if sha256(data)[:16].encode() != digest:
                    raise WeightsDamaged("the line does not match its digest")
                one = Pruned.from_json(json.loads(data))
            except (WeightsDamaged, ValueError) as error:
                where = self._files.where(_NAMES)
                log.warning("%s, line %d is left out: %s", where, number, error)
                continue
            found[one.version] = one
        return found

    def note(self, manifests: Iterable[Manifest]) -> None:
        """Store the names and digests of versions, durably, before their content is removed."""
        lines = []
        for manifest in manifests:
            one = Pruned(
                version=manifest.version,
                parent=manifest.parent,
                copy_of=manifest.copy_of,
                candidate=manifest.candidate,
                digests=manifest.digests,
                created=manifest.created,
            )
            data = canonical(one.to_json())
            lines.append(sha256(data)[:16].encode() + b" " + data + b"\n")
        if not lines:
            return
        name = self._files.name(_NAMES)
        status = self._files.objects.status(name)
        # after a line that a power cut truncated, start a new one
        start = b"\n" if status is not None and status.size else b""
        self._files.objects.append(name, start + b"".join(lines))
