"""Check that the root of a command exists, and contains the policy."""

from __future__ import annotations

from storage.objects.interface import Objects
from storage.objects.opening import Root, local_folder, objects_at

FOLDERS = ("policies", "journal", "shards", "weights", "keys")
"""A folder that contains one of these is a root."""
MOST_NAMED = 10


def require_root(root: Root, policy_id: str | None = None, *, option: str = "--root") -> None:
    """Raise ValueError unless `root` is a root, and `policy_id` a policy of it.

    A root without declarations (with copied shards, or written by an output writer) may contain any
    policy. A policy whose declaration was removed is known by its weights and decisions.
    """
    objects = objects_at(root)
    folder = local_folder(objects)
    if folder is not None and not folder.is_dir():
        raise ValueError(f"{option}: expected a folder, found none at {root}")
    if not _is_root(objects):
        named = ", ".join(f"{name}/" for name in FOLDERS)
        within = [name for name in _folders(objects) if _is_root(objects.under(name))]
        holds = f"; {root} holds the roots {_listed(within)}" if within else ""
        raise ValueError(
            f"{option}: expected a root of Headrace (one of {named} in it), got {root}{holds}"
        )
    if policy_id is None:
        return
    declared = declared_policies(root)
    left = any(policy_id in _folders(objects.under(name)) for name in ("weights", "decisions"))
    if declared and policy_id not in declared and not left:
        raise ValueError(
            f"--policy-id: expected a policy of {root} ({_listed(declared)}), got {policy_id!r:.80}"
        )


def declared_policies(root: Root) -> list[str]:
    """The policies with a declaration under a root, also those whose declaration is damaged."""
    files = (name.removeprefix("policies/") for name in objects_at(root).names("policies/"))
    return [name.removesuffix(".json") for name in files if name.endswith(".json")]


def _folders(objects: Objects) -> list[str]:
    return [name[:-1] for name in objects.names() if name.endswith("/")]


def _is_root(objects: Objects) -> bool:
    return not set(FOLDERS).isdisjoint(_folders(objects))


def _listed(names: list[str]) -> str:
    more = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
