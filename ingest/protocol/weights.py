"""The message with published weights that a collector sends to clients.

It is separate from the client's transport, so that a collector starts without importing an HTTP
client.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ingest.protocol.errors import Refusal


class PublishedCanary(msgspec.Struct):
    """A version that acts in a share of the episodes.

    `share` is in 0 to 1; `storage.experience.hashed.is_canary` selects the episodes.
    """

    manifest: dict[str, Any]
    weights: bytes
    share: float


class Published(msgspec.Struct):
    """`GET /v1/policies/{id}/weights`: the live version.

    `weights` are the bytes of its safetensors file; `generation` rises with every change of the
    live version. `canary` is None while there is none.
    """

    manifest: dict[str, Any]
    generation: int
    weights: bytes
    canary: PublishedCanary | None = None


def other_spaces(policy_id: str) -> Refusal:
    """The refusal for an episode whose declaration was replaced after its start."""
    return Refusal(
        "no_version",
        f"policy {policy_id!r} is no longer declared with the spaces that this episode began "
        "with, so no version can act in it; use log_action, or start a new episode",
    )


def not_finite(policy_id: str, version: int) -> Refusal:
    """The refusal of a valid observation on which the network's numbers overflow."""
    return Refusal(
        "invalid",
        f"policy {policy_id!r}, version {version}: expected an observation for which the network's "
        "outputs are finite, got one that overflows",
        "obs",
    )


def no_version(policy_id: str, unusable: str = "") -> Refusal:
    """The refusal while no version is live, or while the live one cannot act, and why."""
    text = f"policy {policy_id!r} has no published version yet: publish one, or use log_action"
    if unusable:
        text = f"policy {policy_id!r} has a published version that cannot act here: {unusable}"
    return Refusal("no_version", text, retry_after=1.0)
