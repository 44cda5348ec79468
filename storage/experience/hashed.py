"""Choices by hash: a share of the episodes, the same ones on every machine and for ever.

A salt makes choices independent: what is sampled for logging, or acted on by a canary, falls into
the held-out split as everything else does.
"""

from __future__ import annotations

import hashlib

__all__ = ["ARM", "CANARY", "SAMPLING", "SPLIT", "hash_fraction", "is_canary"]

SPLIT, SAMPLING, CANARY = "", "sampling", "canary"
"""The salts in use: of the held-out split, which is frozen, of sampled logging, of canaries."""

ARM = "headrace-arm"
"""The tag of an episode that started while a canary was on: "{generation}:{version}", the one that
its collector assigned it to."""


def hash_fraction(salt: str, episode_id: str) -> float:
    """A number in [0, 1) for each id, uniform and for ever the same: 53 bits of its BLAKE2b, keyed
    by the salt. Numbers of two salts are independent. Raises ValueError for a salt above 64 bytes.
    """
    key = salt.encode()
    if len(key) > hashlib.blake2b.MAX_KEY_SIZE:
        raise ValueError(f"salt: expected at most 64 bytes, got {len(key)}")
    digest = hashlib.blake2b(episode_id.encode(), digest_size=8, key=key).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def is_canary(policy_id: str, episode_id: str, share: float) -> bool:
    """Whether an episode belongs to a policy's canary; a larger share takes a superset.

    Canaries of two policies that act in the same episodes are chosen independently: otherwise each
    would be compared with the other's effect in it.
    """
    return hash_fraction(CANARY, f"{policy_id}/{episode_id}") < share
