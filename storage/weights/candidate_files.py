"""What a candidate consists of: its description and the content of its files."""

from __future__ import annotations

from storage.weights.lineage import Lineage, Untrained, lineage_document
from storage.weights.manifest import (
    LINEAGE_FILE,
    WEIGHTS_FILE,
    Candidate,
    Json,
    Weights,
    encode_weights,
    plain_document,
    sha256,
)

__all__ = ["candidate_files"]


def candidate_files(
    policy_id: str,
    weights: Weights,
    spec: dict[str, Json],
    metrics: dict[str, Json],
    lineage: Lineage,
    filter_state: dict[str, Json] | None,
    checkpoint: str | None,
    untrained: Untrained | None = None,
) -> tuple[Candidate, dict[str, bytes]]:
    """Return a candidate and its files as file name -> content.

    The arguments and errors are those of `WeightFolder.add_candidate`.
    """
    files = {
        WEIGHTS_FILE: encode_weights(weights),
        LINEAGE_FILE: lineage_document(lineage, untrained or {}),
    }
    candidate = Candidate(
        policy_id=policy_id,
        spec=plain_document(spec, "spec"),
        filter_state=None if filter_state is None else plain_document(filter_state, "filter_state"),
        metrics=plain_document(metrics, "metrics"),
        checkpoint=checkpoint,
        digests={name: sha256(data) for name, data in files.items()},
    )
    return candidate, files
