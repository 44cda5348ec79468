"""Settings that several jobs share to choose and read the rows of a log, as types of fields.

Light enough for a command line that only shows its help.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Literal, TypeAlias

from msgspec import Meta

from storage.system.periods import parse_moment


def _moment_or_live(text: str) -> int | Literal["live"]:
    return "live" if text == "live" else parse_moment("--since", text)


Since: TypeAlias = Annotated[
    int | None,
    "Only episodes that began at or after this time: 2026-11-23, ...T08:00Z.",
    Meta(extra={"parse": partial(parse_moment, "--since")}),
]
"""In microseconds of the client's `ts`; text is ISO 8601, without a zone in UTC."""
SinceLive: TypeAlias = Annotated[
    int | Literal["live"] | None,
    "As in train; or live: only episodes newer than what the live version was trained on.",
    Meta(extra={"parse": _moment_or_live}),
]
Until: TypeAlias = Annotated[
    int | None,
    "Only episodes that began before this time.",
    Meta(extra={"parse": partial(parse_moment, "--until")}),
]
Cluster: TypeAlias = Annotated[
    str | None,
    "tag:NAME: hold out and judge all episodes with the same tag value as one unit.",
]
SchemaId: TypeAlias = Annotated[
    str | None, "Schema to read, if spaces have changed; default: the declared one."
]
RetryFor: TypeAlias = Annotated[float, "Seconds to retry a shard that cannot be read."]
Seed: TypeAlias = Annotated[int, "Same seed, same result."]
