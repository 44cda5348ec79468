"""Decisions about candidates, with their reasons: one file per decision.

    record(root, {"policy_id": "default", "candidate": digest, "verdict": "better", ...})
    load_decisions(root, "default").known           # documents, oldest first

    decisions/{policy_id}/{microseconds}-{candidate12}.json

A decision's `kind` is "canary start", "canary" (a promotion, or one that was refused), or
"rollback"; those of the gate have none. Rollbacks are recorded by the store (`...store`), because a
collector makes them too; the others by the jobs that make them (policy.judging).

The confidence of a verdict depends on how many looks at a candidate, and how many candidates, the
same episodes have served before. Only these files have these numbers.
"""

from __future__ import annotations

import json
import re
import time
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from storage.declarations.declaration import check_policy_id
from storage.objects.interface import Objects
from storage.objects.opening import Root, objects_at
from storage.system.formats import require_format
from storage.weights.manifest import canonical, sha256

Document: TypeAlias = dict[str, Any]
RowsByStream: TypeAlias = Mapping[str, Sequence[int]]
"""Stream -> first and last ordinal."""

FOLDER = "decisions"
FORMAT_VERSION = 1
SETTINGS = (
    "reward_range",
    "reward_cap",
    "margin",
    "gamma",
    "split",
    "evaluation_share",
    "cluster",
    "since",
    "after_live",
)
"""What a judgement asks besides the candidate: with other values the same episodes are looked at
again. A higher `until` only adds episodes."""
_FOR_PROGRAMS = {"candidate", "kind", "policy_id", "rows", "verdict", *SETTINGS}
"""The fields with texts that programs read."""


@dataclass(frozen=True)
class Decisions:
    """The documents of all decisions, oldest first, and the files that cannot be read."""

    known: tuple[Document, ...]
    damaged: Mapping[str, str]  # path -> why


class Earlier(NamedTuple):
    """How often the same episodes have been used before."""

    looks: int  # for the same candidate, with other numbers of episodes or other settings
    others: int  # for other candidates (the number of candidates)
    alike: bool = True  # whether all of these looks had the settings of the new judgement


def without_texts(root: Root, texts: Iterable[str]) -> int:
    """Replace texts by "[erased]" in all decisions; return how many decisions were changed.

    They are what people wrote as reasons, and names of tags' values in judgements. A text within a
    longer word or number stays, as do the fields that programs read. So does a damaged decision.
    """
    objects, changed = objects_at(root), 0
    forms = {unicodedata.normalize(form, one) for one in texts for form in ("NFC", "NFD")}
    longest_first = sorted(forms, key=len, reverse=True)
    pattern = re.compile(
        f"(?<![0-9A-Za-z])(?:{'|'.join(map(re.escape, longest_first))})(?![0-9A-Za-z])"
    )
    for policy in objects.names(f"{FOLDER}/"):
        for document in load_decisions(root, policy.rstrip("/").rpartition("/")[2]).known:
            kept = {
                name: value if name in _FOR_PROGRAMS else _without(value, pattern)
                for name, value in document.items()
            }
            if kept != document:
                _write(objects, kept)
                changed += 1
    return changed


def _without(value: Any, pattern: re.Pattern[str]) -> Any:
    if isinstance(value, str):
        return pattern.sub("[erased]", value)
    if isinstance(value, list):
        return [_without(one, pattern) for one in value]
    if isinstance(value, dict):
        return {_without(key, pattern): _without(one, pattern) for key, one in value.items()}
    return value


def record(
    root: Root,
    decision: Mapping[str, Any],
    *,
    clock: Callable[[], float] = time.time,
) -> str:
    """Write a decision to a new file, and return its place.

    `decision` has at least `policy_id` and `candidate`; one that judged nothing needs no more of
    what a judgement has: its `verdict` is None, with `episodes` 0 and no `rows`. `clock` gives
    seconds since the epoch. Raises OSError.
    """
    decided = int(clock() * 1_000_000)
    unjudged: Document = {"verdict": None, "episodes": 0, "rows": {}}
    document = {"format": FORMAT_VERSION, "decided": decided, **unjudged, **decision}
    objects = objects_at(root)
    return f"{objects}/{_write(objects, document)}"


def _write(objects: Objects, document: Document) -> str:
    """Write a decision with its digest; its name follows from what it is about."""
    stored = json.loads(canonical(document, "decision"))  # names that are numbers become texts
    document = document | {_DIGEST: sha256(canonical(stored, "decision"))}
    folder = f"{FOLDER}/{check_policy_id(str(document['policy_id']))}"
    name = f"{folder}/{document['decided']:016d}-{str(document['candidate'])[:12]}.json"
    objects.replace(name, json.dumps(document, indent=1, allow_nan=False).encode() + b"\n")
    return name


def decision_files(root: Root, policy_id: str) -> tuple[str, ...]:
    """The names of all decisions about a policy's candidates, oldest first."""
    names = objects_at(root).names(f"{FOLDER}/{check_policy_id(policy_id)}/")
    return tuple(
        name
        for name in sorted(names)
        if name.endswith(".json") and name.rpartition("/")[2][0].isdecimal()
    )


def load_decisions(root: Root, policy_id: str, *, latest: int | None = None) -> Decisions:
    """Read all decisions about a policy's candidates under a root, or the `latest` ones.

    Raises NewerFormat.
    """
    known: list[Document] = []
    damaged: dict[str, str] = {}
    objects = objects_at(root)
    for name in decision_files(root, policy_id)[-latest if latest else None :]:
        try:
            document = json.loads(objects.read(name))
            require_format(document, FORMAT_VERSION, f"{objects}/{name}")
            document = _whole(document)
        except (
            OSError,
            ValueError,
            TypeError,
            LookupError,
            AttributeError,
            RecursionError,
        ) as error:
            damaged[f"{objects}/{name}"] = f"{type(error).__name__}: {error}"
        else:
            known.append(document)
    return Decisions(tuple(known), damaged)


_DIGEST = "sha256"
"""The field with the digest of the others; decisions of release 0.1.0 have none."""
_ALWAYS = {"candidate", "decided", "episodes", "published", "reasons", "rows", "verdict", "version"}


def _whole(document: Document) -> Document:
    """The document without its digest. Raises ValueError if it is damaged."""
    digest = document.pop(_DIGEST, None)
    if digest is None and (missing := _ALWAYS - document.keys()):
        raise ValueError(f"expected the fields of a decision, got none of {sorted(missing)}")
    if digest not in (None, sha256(canonical(document, "decision"))):
        raise ValueError("the content does not match its digest")
    return document


def earlier_of(
    known: Sequence[Document], candidate: str, rows: RowsByStream, episodes: int, settings: Document
) -> Earlier:
    """Count the earlier looks and candidates in decisions on overlapping rows.

    `rows`, `episodes` and `settings` are those of the new judgement. A repetition with the same
    number of episodes and settings is no further look, because its result is the same. Nor is a
    judgement without a comparison: no interval was computed that could have decided.
    """
    looks = [one for one in known if one.get("comparisons") != []]
    overlapping = [one for one in looks if _overlap(one.get("rows") or {}, rows)]
    others = {one["candidate"] for one in overlapping} - {candidate}
    wanted = _settings(settings)
    own = [
        (one["episodes"], _settings(one)) for one in overlapping if one["candidate"] == candidate
    ]
    before = list(dict.fromkeys([*own, (episodes, wanted)]))
    before = before[: before.index((episodes, wanted))]
    return Earlier(len(before), len(others), all(one == wanted for _, one in before))


def _settings(one: Document) -> tuple[Any, ...]:
    earlier = {"margin": "0"}  # of a decision of release 0.1.0
    values = (one.get(name, earlier.get(name)) for name in SETTINGS)
    return tuple(tuple(value) if isinstance(value, list) else value for value in values)


def _overlap(one: RowsByStream, other: RowsByStream) -> bool:
    return any(
        first <= other[stream][1] and other[stream][0] <= last
        for stream, (first, last) in one.items()
        if stream in other
    )
