"""A share of the episodes by hash: the same everywhere, and more for a larger share."""

from __future__ import annotations

from storage.experience.hashed import CANARY, hash_fraction, is_canary

NAMES = ("canary-13", "canary-14", "")
IDS = [f"episode-{i}" for i in range(20_000)]


def test_a_canarys_share_is_frozen_and_about_as_large_as_asked() -> None:
    """Clients of any release and the collector choose the same episodes."""
    assert [is_canary("p", name, 0.1) for name in NAMES] == [True, False, False]
    chosen = [name for name in IDS if is_canary("p", name, 0.1)]
    assert abs(len(chosen) - 2000) < 5 * (20_000 * 0.09) ** 0.5
    assert all(is_canary("p", name, 0.2) for name in chosen), "a larger share takes a superset"


def test_canaries_of_two_policies_are_independent() -> None:
    """If agents of both act in one episode, a comparison must not include the other's effect."""
    both = [name for name in IDS if is_canary("p", name, 0.3) and is_canary("q", name, 0.3)]
    assert abs(len(both) - 1800) < 5 * (20_000 * 0.09 * 0.91) ** 0.5


def test_a_canary_has_a_salt_of_its_own() -> None:
    assert is_canary("p", "canary-5", 0.5) == (hash_fraction(CANARY, "p/canary-5") < 0.5)
    assert hash_fraction(CANARY, "a") != hash_fraction("", "a")
