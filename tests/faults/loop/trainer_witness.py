"""A witness inside a trainer, which records the rows of each update by digests of the weights.

A lineage is only a claim. The witness writes a line for each update: a digest of the weights before
it, one of the weights after it, and the rows in between. Along these lines, published weights can
be traced back to the initial ones, whatever was killed and restarted; the rows on the way are what
they were trained on.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

Row: TypeAlias = tuple[str, int, int]
"""stream, ordinal, t"""


def digest(weights: Mapping[str, Any]) -> str:
    """A digest of the weights."""
    found = hashlib.sha256()
    for name in sorted(weights):
        found.update(name.encode() + np.ascontiguousarray(weights[name]).tobytes())
    return found.hexdigest()[:24]


def begin(path: Path) -> None:
    """Watch this process's learner. The file is opened now, before descriptors run out."""
    from policy.algorithms.learner import Learner  # noqa: PLC0415 - torch, in a trainer only

    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    learn = Learner.learn

    def watched(self: Learner, used: Any, *given: Any, **named: Any) -> dict[str, float]:
        before = digest(self.policy.get_weights())
        rows = []
        if used.count:
            columns = (used["stream"], used["ordinal"], used["t"])
            rows = list(zip(*(column.tolist() for column in columns), strict=True))
        metrics = learn(self, used, *given, **named)
        line = {"before": before, "after": digest(self.policy.get_weights()), "rows": rows}
        os.write(file, (json.dumps(line) + "\n").encode())
        return metrics

    Learner.learn = watched  # type: ignore[method-assign]  # as the launcher plants its faults


@dataclass
class Testimony:
    """The witness's record: weights -> (the weights before, the rows in between)."""

    lines: int = 0
    steps: dict[str, tuple[str, list[Row]]] = field(default_factory=dict)

    @classmethod
    def of(cls, path: Path) -> Testimony:
        found = cls()
        for line in path.read_text().splitlines() if path.exists() else []:
            try:
                record = json.loads(line)
            except ValueError:  # killed while it wrote
                continue
            found.lines += 1
            if record["after"] != record["before"]:
                rows = [
                    (str(stream), int(ordinal), int(t)) for stream, ordinal, t in record["rows"]
                ]
                found.steps[record["after"]] = record["before"], rows
        return found

    def rows_of(self, weights: str) -> Counter[Row]:
        """The rows that weights were trained on, each as often as it was used."""
        rows: Counter[Row] = Counter()
        while weights in self.steps:
            weights, more = self.steps[weights]
            rows.update(more)
        return rows
