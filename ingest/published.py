"""Published weights as they travel: what the collector answers and what a client takes up.

A client loads it with its transport, a collector without: what starts again in a hurry imports no
HTTP client.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ingest.errors import Refusal


class Published(msgspec.Struct):
    """`GET /v1/policies/{id}/weights`: a version, its place in the order, its bytes."""

    manifest: dict[str, Any]
    generation: int
    weights: bytes
    signature: bytes | None = None


def no_version(policy_id: str) -> Refusal:
    """The refusal where nothing is live yet."""
    return Refusal(
        "no_version",
        f"policy {policy_id!r} has no published version yet: publish one, or log_action",
        retry_after=1.0,
    )
