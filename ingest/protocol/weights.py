"""Published weights as they travel: what the collector answers and what a client takes up.

A client loads it with its transport, a collector without: what starts again in a hurry imports no
HTTP client.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ingest.protocol.errors import Refusal


class PublishedCanary(msgspec.Struct):
    """A version that acts in a share of the episodes, by `storage.experience.hashed.is_canary`."""

    manifest: dict[str, Any]
    weights: bytes
    share: float


class Published(msgspec.Struct):
    """`GET /v1/policies/{id}/weights`: a version, its place in the order, its bytes.

    `canary` is there while one is on.
    """

    manifest: dict[str, Any]
    generation: int
    weights: bytes
    canary: PublishedCanary | None = None


def other_spaces(policy_id: str) -> Refusal:
    """The refusal where an episode outlived the declaration that it began under."""
    return Refusal(
        "no_version",
        f"policy {policy_id!r} is not declared any more with the spaces that this episode began "
        "with: no version of it can act here; log_action, or go on in a new episode",
    )


def not_finite(policy_id: str, version: int) -> Refusal:
    """The refusal of an observation that is legal, and too large for a network's numbers."""
    return Refusal(
        "invalid",
        f"policy {policy_id!r}, version {version}: expected an observation on which it gives "
        "finite numbers, got one that overflows",
        "obs",
    )


def no_version(policy_id: str) -> Refusal:
    """The refusal where nothing is live yet."""
    return Refusal(
        "no_version",
        f"policy {policy_id!r} has no published version yet: publish one, or log_action",
        retry_after=1.0,
    )
