"""Every route of wire protocol v1: its input, its answer, its refusals.

The server binds these routes and `/openapi.json` describes them: there is no second list.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ingest.access.tokens import (
    ACTING,
    ANY,
    COUNTING,
    EITHER,
    ERASING,
    LOGGING,
    NOBODY_NEEDED,
    PUBLISHING,
    READING,
)
from ingest.protocol import messages as wire
from ingest.web.limits import ServerLimits

HTML = "text/html"
TEXT = "text/plain"

EVERYWHERE = (
    "malformed",
    "unauthorized",
    "forbidden",
    "too_slow",
    "too_large",
    "unsupported_media",
    "busy",
    "header_too_large",
    "draining",
)
"""Codes that any route may answer with, because they concern the request itself."""

EVENT = (
    "not_found",
    "completed",
    "already_started",
    "conflict",
    "gap",
    "abandoned",
    "broken",
    "no_action",
    "window_closed",
    "unknown_instance",
    "decision_unknown",
    "invalid",
    "other_schema",
    "disk_full",
)
"""Codes with which an event may be refused."""


class RouteEntry(msgspec.Struct, frozen=True):
    """One method of one path.

    A caller needs one of the scopes in `needed`. `handler` is the name of the method of
    `ingest.server.routes.Routes` that answers. `body` is the message type that is accepted (JSON or
    msgpack), or the media type of other content; the same for `reply`. `refuses` are codes in
    addition to EVERYWHERE; `query` and `headers` map the supported names to descriptions.
    """

    method: str
    path: str
    needed: frozenset[str]
    handler: str
    summary: str
    body: Any = None
    reply: Any = wire.JSON
    status: int = 200
    refuses: tuple[str, ...] = ()
    statuses: tuple[int, ...] = ()  # in addition to `status` and the refusals' statuses
    query: dict[str, str] = msgspec.field(default_factory=dict)
    headers: dict[str, str] = msgspec.field(default_factory=dict)
    large: bool = False  # the message may be as large as a bulk import

    def limit(self, limits: ServerLimits) -> int:
        """The most bytes of a body; 0 if the route takes none, whatever the headers say."""
        if self.body is None:
            return 0
        return limits.max_bulk if self.large or self.body == wire.ARROW else limits.max_message


_INSTANCE = {"Headrace-Instance": "The client instance that the call belongs to."}
_SINGLE = {
    **_INSTANCE,
    "Idempotency-Key": "Names the call, so that it may be sent again: at most 200 characters.",
}
_ONE = "/v1/episodes/{id}"
_STATUS = {
    "policy": "The policy whose rewards come first.",
    "span": "0 to 3: the last 4 hours, 3 days, 45 days, or all.",
}

ROUTES = (
    RouteEntry(
        "POST",
        "/v1/events",
        LOGGING,
        "events",
        "Log a batch of events; each is judged by itself, and the reply names the refused ones.",
        body=wire.Batch,
        reply=wire.EventsReply,
        refuses=("invalid", "disk_full"),
    ),
    RouteEntry(
        "POST",
        "/v1/actions",
        ACTING,
        "actions",
        "Log pending events, then ask the live policies for actions.",
        body=wire.ActionBatch,
        reply=wire.ActionsReply,
        refuses=("invalid", "disk_full"),
    ),
    RouteEntry(
        "POST",
        "/v1/instances",
        EITHER,
        "instances",
        "Register a client instance, or find a named import again.",
        body=wire.Register,
        reply=wire.Registered,
        status=201,
        refuses=("invalid", "disk_full"),
    ),
    RouteEntry(
        "POST",
        "/v1/steps",
        LOGGING,
        "steps",
        "Import whole episodes as an Arrow stream of shard columns.",
        body=wire.ARROW,
        reply=wire.EventsReply,
        refuses=("invalid", "conflict", "disk_full"),
        headers={
            "Headrace-CRC32": "CRC-32 of the body, 8 hex digits. Needed.",
            "Idempotency-Key": "Names the import, so that it may be sent again.",
        },
    ),
    RouteEntry("GET", "/v1/spec", ANY, "spec", "Policies, their spaces and live versions, limits."),
    RouteEntry(
        "POST",
        "/v1/episodes",
        LOGGING,
        "start",
        "Start an episode.",
        body=wire.Start,
        reply=wire.StartReply,
        status=201,
        refuses=EVENT,
        headers=_SINGLE,
    ),
    RouteEntry(
        "GET",
        _ONE,
        EITHER,
        "episode",
        "The state of an episode.",
        reply=wire.EpisodeState,
        refuses=("not_found",),
    ),
    RouteEntry(
        "POST",
        _ONE + "/log_action",
        LOGGING,
        "log_action",
        "Log an action that the caller chose.",
        body=wire.LogAction,
        reply=wire.EventsReply,
        refuses=EVENT,
        headers=_SINGLE,
    ),
    RouteEntry(
        "POST",
        _ONE + "/log_returns",
        LOGGING,
        "log_returns",
        "Log a reward of the last action.",
        body=wire.LogReturns,
        reply=wire.EventsReply,
        refuses=EVENT,
        headers=_SINGLE,
    ),
    RouteEntry(
        "POST",
        _ONE + "/end",
        LOGGING,
        "end",
        "End an episode.",
        body=wire.End,
        reply=wire.EventsReply,
        refuses=EVENT,
        headers=_SINGLE,
    ),
    RouteEntry(
        "POST",
        _ONE + "/action",
        ACTING,
        "action",
        "Ask the live policy for an action; the step is logged.",
        body=wire.GetAction,
        reply=wire.ActionReply,
        refuses=(*EVENT, "no_version"),
        headers=_SINGLE,
    ),
    RouteEntry(
        "POST",
        "/v1/rank",
        ACTING,
        "rank",
        "Choose among actions with features; the event is logged, so `log` is needed, too.",
        body=wire.Rank,
        reply=wire.RankReply,
        status=201,
        refuses=EVENT,
    ),
    RouteEntry(
        "POST",
        "/v1/reward/{id}",
        LOGGING,
        "reward",
        "Log a reward of a ranked event.",
        body=wire.RankedReward,
        reply=wire.EventsReply,
        refuses=EVENT,
        headers=_SINGLE,
    ),
    RouteEntry(
        "POST",
        "/v1/activate/{id}",
        LOGGING,
        "activate",
        "Let a ranked event count that was not active.",
        body=wire.Activate,
        reply=wire.EventsReply,
        refuses=EVENT,
    ),
    RouteEntry(
        "GET",
        "/v1/policies/{id}/weights",
        READING,
        "weights",
        "The live weights, or those of one version.",
        reply=wire.MSGPACK,
        refuses=("no_route", "not_found", "no_version"),
        statuses=(304,),
        query={"version": "A version's number, in place of what is live."},
        headers={
            "If-None-Match": "The ETag of the known weights: 304 while these are live.",
            "Prefer": "wait=SECONDS: answer when newer weights are live, or after that time.",
        },
    ),
    RouteEntry(
        "GET",
        "/v1/policies/{id}/versions",
        PUBLISHING,
        "versions",
        "The published versions, the live one, and the next number.",
        reply=wire.Versions,
        refuses=("no_route", "invalid"),
    ),
    RouteEntry(
        "POST",
        "/v1/policies/{id}/versions",
        PUBLISHING,
        "publish",
        "Publish trained weights under the number that comes next.",
        body=wire.Publish,
        reply=wire.NowLive,
        status=201,
        refuses=("no_route", "invalid", "conflict", "pinned", "disk_full"),
        large=True,
    ),
    RouteEntry(
        "POST",
        "/v1/policies/{id}/rollback",
        PUBLISHING,
        "rollback",
        "Go back to an earlier version, which becomes a new one.",
        body=wire.Rollback,
        reply=wire.NowLive,
        status=201,
        refuses=("no_route", "not_found", "invalid", "conflict", "disk_full"),
    ),
    RouteEntry(
        "POST",
        "/v1/policies/{id}/resume",
        PUBLISHING,
        "resume",
        "End what a rollback pinned, so that the policy may be published again.",
        body=wire.Resume,
        reply=wire.NowLive,
        refuses=("no_route", "not_found", "invalid", "disk_full"),
    ),
    RouteEntry(
        "GET",
        "/v1/policies/{id}/served",
        PUBLISHING,
        "served",
        "The live version of a policy, and the version that each registered collector serves.",
        reply=wire.Serving,
        refuses=("no_route", "invalid"),
    ),
    RouteEntry(
        "GET",
        "/v1/ledger",
        COUNTING,
        "ledger",
        "A snapshot of where every acknowledged step is.",
        reply=wire.JournalLedger,
    ),
    RouteEntry(
        "GET",
        "/v1/ledger/records",
        COUNTING,
        "ledger_records",
        "Recorded shards, a page at a time.",
        reply=wire.LedgerPage,
        refuses=("invalid",),
        query={"after": "The plan id after which the page begins."},
    ),
    RouteEntry(
        "POST",
        "/v1/erase",
        ERASING,
        "erase",
        "Erase episodes from the journal; `headrace erase` then erases them from the shards.",
        body=wire.Erase,
        reply=wire.Erased,
        refuses=("invalid", "disk_full"),
    ),
    RouteEntry(
        "GET", "/healthz", NOBODY_NEEDED, "healthz", "Whether the journal works.", statuses=(503,)
    ),
    RouteEntry("GET", "/readyz", NOBODY_NEEDED, "readyz", "503 once it drains.", statuses=(503,)),
    RouteEntry(
        "GET", "/metrics", ANY, "metrics", "Metrics in the text form of Prometheus.", reply=TEXT
    ),
    RouteEntry("GET", "/openapi.json", ANY, "openapi", "This description."),
    RouteEntry(
        "GET",
        "/v1/status",
        ANY,
        "status",
        "What the status page shows, as `headrace status --json` prints it.",
        query=_STATUS,
    ),
    RouteEntry(
        "POST",
        "/login",
        NOBODY_NEEDED,
        "login",
        "Set a cookie for a browser that sends a token; it is accepted with GET alone.",
        body=wire.Login,
        status=204,
        refuses=("invalid",),
    ),
    RouteEntry("GET", "/", ANY, "status_page", "The status page.", reply=HTML, query=_STATUS),
)
