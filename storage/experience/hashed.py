"""Choosing a share of the episodes by hash: always the same ones, on every machine.

Choices with different salts are independent: of the episodes sampled for logging, or acted on by a
canary, the held-out split contains the same share as of all others.
"""

from __future__ import annotations

import hashlib

SPLIT, SAMPLING, CANARY = "", "sampling", "canary"
"""The salts in use: of the held-out split, which must never change, of sampled logging, of
canaries."""

ARM = "headrace-arm"
"""The tag of an episode that started while a canary was running. Its value is
"{generation}:{version}", with the version that its collector assigned to it."""


def hash_fraction(salt: str, episode_id: str) -> float:
    """A number in [0, 1) for each id, uniform and never changing: 53 bits of the id's BLAKE2b.

    The salt is the key of the hash, so numbers for different salts are independent. Raises
    ValueError for a salt above 64 bytes.
    """
    key = salt.encode()
    if len(key) > hashlib.blake2b.MAX_KEY_SIZE:
        raise ValueError(f"salt: expected at most 64 bytes, got {len(key)}")
    digest = hashlib.blake2b(episode_id.encode(), digest_size=8, key=key).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def is_canary(policy_id: str, episode_id: str, share: float) -> bool:
    """Whether an episode belongs to a policy's canary; a larger share gives a superset.

    Canaries of two policies that act in the same episodes are chosen independently. Otherwise the
    effect of one could not be distinguished from that of the other.
    """
    return hash_fraction(CANARY, f"{policy_id}/{episode_id}") < share
