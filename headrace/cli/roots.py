"""Check that the root of a command exists, and contains the policy."""

from __future__ import annotations

from pathlib import Path

FOLDERS = ("policies", "journal", "shards", "weights", "keys")
"""A folder that contains one of these is a root."""
MOST_NAMED = 10


def require_root(root: Path, policy_id: str | None = None, *, option: str = "--root") -> None:
    """Raise ValueError unless `root` is a root, and `policy_id` a policy of it.

    A root without declarations (with copied shards, or written by an output writer) may contain any
    policy. A policy whose declaration was removed is known by its weights and decisions.
    """
    if not root.is_dir():
        raise ValueError(f"{option}: expected a folder, found none at {root}")
    if not _is_root(root):
        named = ", ".join(f"{name}/" for name in FOLDERS)
        within = sorted(path.name for path in root.iterdir() if _is_root(path))
        holds = f"; {root} holds the roots {_listed(within)}" if within else ""
        raise ValueError(
            f"{option}: expected a root of Headrace (one of {named} in it), got {root}{holds}"
        )
    if policy_id is None:
        return
    declared = sorted(path.stem for path in (root / "policies").glob("*.json"))
    left = any((root / name / policy_id).is_dir() for name in ("weights", "decisions"))
    if declared and policy_id not in declared and not left:
        raise ValueError(
            f"--policy-id: expected a policy of {root} ({_listed(declared)}), got {policy_id!r:.80}"
        )


def _is_root(folder: Path) -> bool:
    return any((folder / name).is_dir() for name in FOLDERS)


def _listed(names: list[str]) -> str:
    more = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
