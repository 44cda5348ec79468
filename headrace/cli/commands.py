"""Commands of storage: what `headrace` shows of this package.

A command is a plain function that `headrace.__main__` registers; its imports stand inside it, so
that `--help` loads neither torch nor Arrow, and each command nothing but what it needs.
"""

# ruff: noqa: PLC0415 - a command imports what it needs when it runs

from __future__ import annotations

import time

from headrace.cli.options import ROOT, Json, PolicyId, Root


def versions(root: Root = ROOT, policy_id: PolicyId = "default", as_json: Json = False) -> None:
    """List versions, what is wanted and served, and candidates."""
    from headrace.output import console, results
    from storage.weights.chain import described
    from storage.weights.store import WeightStore

    store = WeightStore(root, policy_id)
    live = store.live()
    found, damaged = described(store)
    candidates = [store.candidate(digest) for digest in store.candidates()]
    document = {
        "policy_id": policy_id,
        "live": None if live is None else {"pinned": None, **live.to_json()},
        "served": [record.to_json() for record in store.served.registered(time.time())],
        "restored": store.restored,
        "pruned": len(store.pruned()),
        "versions": found,
        "damaged": {str(version): why for version, why in damaged.items()},
        "candidates": [{"digest": c.digest, **c.to_json()} for c in candidates],
    }
    return console.line(document) if as_json else results.versions(document)
