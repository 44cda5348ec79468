"""What a collector has done since it started."""

from __future__ import annotations

from collections import Counter

import msgspec


class CollectorStats(msgspec.Struct):
    """Counts since this collector started; `steps` is over the journal's whole life."""

    accepted: int = 0
    duplicates: int = 0
    refused: int = 0
    broken: int = 0
    abandoned: int = 0
    rebuilt: int = 0
    refused_by: Counter[str] = msgspec.field(default_factory=Counter)  # code -> events
    ended: Counter[str] = msgspec.field(default_factory=Counter)  # how -> episodes
