"""A witness within a trainer: which rows each update was made of, told by the weights themselves.

A lineage is a claim. The witness writes a line for each update: a digest of the weights before it,
one of the weights after it, and the rows in between. Weights that are published later lead back to
the initial ones along these lines, whatever was killed and begun again: what lies on the way is
what they were trained on.
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
    """What tells weights apart."""
    found = hashlib.sha256()
    for name in sorted(weights):
        found.update(name.encode() + np.ascontiguousarray(weights[name]).tobytes())
    return found.hexdigest()[:24]


def begin(path: Path) -> None:
    """Watch the learner of this process. The file is opened now: later there may be no room."""
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
    """What was written: weights -> (the weights before, the rows in between)."""

    lines: int = 0
    steps: dict[str, tuple[str, list[Row]]] = field(default_factory=dict)

    @classmethod
    def of(cls, path: Path) -> Testimony:
        found = cls()
        for line in path.read_text().splitlines() if path.exists() else []:
            try:
                said = json.loads(line)
            except ValueError:  # killed while it wrote
                continue
            found.lines += 1
            if said["after"] != said["before"]:
                rows = [(str(stream), int(ordinal), int(t)) for stream, ordinal, t in said["rows"]]
                found.steps[said["after"]] = said["before"], rows
        return found

    def rows_of(self, weights: str) -> Counter[Row]:
        """The rows behind weights, each as often as it was trained on."""
        rows: Counter[Row] = Counter()
        while weights in self.steps:
            weights, more = self.steps[weights]
            rows.update(more)
        return rows
