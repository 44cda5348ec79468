"""The numbers of steps: which of them a column of `STEP_COLUMNS` cannot have."""

from __future__ import annotations

from typing import Final

import numpy as np

from ingest.columns.arrow_kinds import Array, Mask
from storage.experience.step_columns import LOGP_TOLERANCE, STEP_COLUMNS, StepColumn

COLUMNS: Final = {column.name: column for column in STEP_COLUMNS}


def unfit(column: StepColumn, values: Array, has_densities: bool | Mask = True) -> tuple[Mask, str]:
    """(which values (N,) do not fit, what was expected).

    `has_densities`: whether actions, or those of each row, have a density instead of a probability.
    """
    bad, expected = column.unfit(values), f"expected {column.expected}"
    if column.name == "action_logp" and not np.all(has_densities):
        bad |= (values > LOGP_TOLERANCE) & ~np.asarray(has_densities)
        expected = "expected the logarithm of a probability, finite and at most 0"
    return bad, expected
