"""The handlers of wire protocol v1: they pass requests to the collector, and wait for the disk."""

from __future__ import annotations

import contextlib
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

import msgspec

from ingest.access.admission import audit
from ingest.access.tokens import ACTING, LOGGING, NOBODY, Caller
from ingest.bulk_import.handler import Importer
from ingest.collector import journal_report as ledger
from ingest.collector.collector import Collector
from ingest.collector.live_policies import LivePolicies
from ingest.collector.slices import take
from ingest.collector.trainer_watch import TrainerWatch, number_in
from ingest.episodes import idempotency
from ingest.episodes.client_instances import IMPORT
from ingest.episodes.idempotency import Given
from ingest.episodes.status import episode_state
from ingest.erasure.journal import erase
from ingest.protocol import messages as wire
from ingest.protocol.agent_names import name_of
from ingest.protocol.errors import STATUS, Refusal, not_found
from ingest.server import openapi
from ingest.server.action_routes import Acting
from ingest.server.disk_space import DiskSpace
from ingest.server.rank_routes import Ranker
from ingest.server.route_table import ROUTES
from ingest.server.weight_routes import WeightChanges, WeightDownloads
from ingest.status.answers import NOTHING, Facts, PolicyFacts, status_document
from ingest.status.page import login_page, status_page
from ingest.web.asgi import Admit, Request, Response, Router
from ingest.web.connections import ConnectionWatch
from ingest.web.limits import Budget, ServerLimits
from storage.experience.reward_history import LEVELS
from storage.spaces.descriptors import space_to_json
from storage.wording import counted

if TYPE_CHECKING:
    from ingest.server.metrics import Metrics  # loaded at the first request for metrics

HTML = "text/html; charset=utf-8"
_LOADS = (
    b"default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    b"connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
PAGE = (
    (b"cache-control", b"no-store"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
    (b"content-security-policy", _LOADS),
)
"""The headers of pages: they load nothing, call this collector alone, and stand in no frame."""
_NUMBER_EVENTS = (
    "register an instance and number the events (start, seq), or send them as single calls"
)


class Routes:
    """Binds a collector and its live policies to the routes of `route_table`.

    `version` is the program's.
    """

    def __init__(
        self,
        collector: Collector,
        live: LivePolicies,
        *,
        version: str = "",
        limits: ServerLimits | None = None,
        connections: ConnectionWatch | None = None,
        trainers: TrainerWatch | None = None,
        disks: DiskSpace | None = None,
    ) -> None:
        self._trainers, self._disks = trainers, disks
        self._began = time.monotonic()
        self.collector = collector
        self.live = live
        self.acting = Acting(collector, live)
        self._ranker = Ranker(collector, live)
        self.imports = Importer(collector)
        self.limits = limits or ServerLimits()
        self._version = version
        self._connections = connections
        self._openapi = b""
        self._router: Router | None = None
        self._metrics: Metrics | None = None
        self._acted_on: set[Given] = set()  # calls that are being answered
        self.weights = WeightDownloads(live).weights
        self.publish, self.rollback = (
            (publishing := WeightChanges(live)).publish,
            publishing.rollback,
        )
        self.versions, self.served = publishing.versions, publishing.served
        self.resume = publishing.resume
        self.log_action = self._single(wire.LogAction)
        self.log_returns = self._single(wire.LogReturns)
        self.end = self._single(wire.End)

    def router(self, budget: Budget | None = None, *, admit: Admit | None = None) -> Router:
        """The application; all bodies share `budget`, and `admit` authorizes callers."""
        login = Response(401, login_page(), HTML, PAGE)
        router = Router(self.limits, budget=budget, admit=admit, login=login)
        for route in ROUTES:
            handler = getattr(self, route.handler)
            limit = route.limit(self.limits)
            router.add(route.method, route.path, handler, route.needed, limit=limit)
        self._router = router
        return router

    # --- logging ---------------------------------------------------------------------------

    async def events(self, request: Request) -> Response:
        idempotency.require_none(request.headers.get(b"idempotency-key"), _NUMBER_EVENTS)
        try:
            batch = request.decode(wire.Batch)
        except Refusal as refusal:
            if await self._breaks_episode(request, refusal):
                raise refusal.with_broken_episode() from refusal
            raise
        _require_events(request.caller, batch.events)
        reply = await take(self.collector, batch, len(request.body), request.caller)
        return Response.of(reply, request, wasted=_wasted(reply, batch, request))

    async def _breaks_episode(self, request: Request, refusal: Refusal) -> bool:
        """Break the episode of an event that does not decode, if it is alone in its batch.

        A larger batch is refused as a whole, so that its good events can be sent again; and so is
        one with another fault than its event. The event must be the episode's next one. Returns
        whether the episode was broken.
        """
        if not (refusal.path or "").startswith("$.events[0]"):
            return False
        try:
            batch = request.decode(wire.LoneEvent)
        except Refusal:
            return False
        (event,) = batch.events
        name = name_of(event)
        if event.type == "start" or not self.collector.judge.is_owner(batch.instance, name):
            return False
        if event.seq not in (None, self.collector.assembler.episodes[name].next_seq):
            return False
        request.caller.require(LOGGING, "an event")
        request.caller.charge(1)
        row = self.collector.compose(lambda row: row.break_episode(name, str(refusal)))
        await self.collector.journal.durable(row)
        return True

    async def instances(self, request: Request) -> Response:
        instead = "a name in the body identifies the instance when the call is repeated"
        idempotency.require_none(request.headers.get(b"idempotency-key"), instead)
        message = request.decode(wire.Register)
        if message.name is not None and message.name.startswith(IMPORT):
            text = f"expected a name that does not begin with {IMPORT!r}: those belong to keys"
            raise Refusal("invalid", f"{text} of /v1/steps", "$.name")
        registered, row = self.collector.register(message, request.caller.token_id)
        await self.collector.journal.durable(row)
        return Response.of(registered, request, 201)

    async def start(self, request: Request) -> Response:
        event = request.decode(wire.Start)
        if not event.episode_id:
            key = idempotency.key_of(request.headers.get(b"idempotency-key"))
            token = request.caller.token_id
            name = secrets.token_hex(16) if key is None else idempotency.episode_of(key, token)
            event = msgspec.structs.replace(event, episode_id=name)
        await self._accept_single(request, event)
        reply = wire.StartReply(
            episode_id=event.episode_id, agent_id=event.agent_id, durable=self.collector.keeps
        )
        return Response.of(reply, request, 201)

    def _single(self, kind: type[Any]) -> Callable[[Request], Awaitable[Response]]:
        async def handler(request: Request) -> Response:
            reply = await self._accept_single(request, _named(request, kind))
            return Response.of(reply, request)

        return handler

    async def _accept_single(self, request: Request, event: wire.Event) -> wire.EventsReply:
        """Accept one event of a single call; a refusal is the answer."""
        given = self._given(request, event)
        batch = wire.Batch(instance=request.instance, events=[event])
        reply, row = self.collector.accept(batch, single=True, caller=request.caller, given=given)
        await self.collector.journal.durable(row)
        if reply.refused:
            error = dict(reply.refused[0].error)
            path = error.pop("path").removeprefix("$.events[0]")
            raise Refusal(**error, path=f"${path}" if path else None)
        return reply

    def _given(self, request: Request, message: Any) -> Given | None:
        """The Idempotency-Key of a single call. Raises Refusal."""
        key = idempotency.key_of(request.headers.get(b"idempotency-key"))
        if key is None:
            return None
        judge, policies = self.collector.judge, self.collector.assembler.policies
        if policies.redacts:  # a digest of the original would allow guesses of its content
            # the rules are unknown without an episode; use those of the only policy, if there is
            # one
            rules = judge.rules_for(message) or judge.rules_for(wire.Start())
            message = self.collector.redactor.event(message, rules)
        return Given.of(key, request.instance, message, request.caller.token_id)

    async def steps(self, request: Request) -> Response:
        reply, wasted = await self.imports.take(request)
        return Response.of(reply, request, wasted=wasted)

    # --- acting ----------------------------------------------------------------------------

    async def action(self, request: Request) -> Response:
        """Choose one action; it is durable before the reply."""
        call = _named(request, wire.GetAction)
        given = self._given(request, call)
        with self._being_answered(given):
            actions = [self._repeated(call, given)]
            message = wire.ActionBatch(instance=request.instance, actions=actions)
            reply = await self.acting.act(message, request.caller, given)
        (answer,) = reply.actions
        if answer.error is not None:
            path = answer.error.pop("path", "").removeprefix("$.actions[0]")
            raise Refusal(**answer.error, path=f"${path}" if path else None)
        answer.durable = reply.durable
        return Response.of(answer, request)

    @contextlib.contextmanager
    def _being_answered(self, given: Given | None) -> Iterator[None]:
        """Allow only one call at a time with a key. Raises Refusal."""
        if given is None:
            yield
            return
        if given in self._acted_on:
            raise Refusal("busy", "this call is in progress", retry_after=1.0)
        self._acted_on.add(given)
        try:
            yield
        finally:
            self._acted_on.discard(given)

    def _repeated(self, call: wire.GetAction, given: Given | None) -> wire.GetAction:
        """The call with its earlier sequence number, if its key is known. Raises Refusal."""
        known = self.collector.known(given)
        if known is None:
            return call
        episode = self.collector.assembler.episodes.get(name_of(call))
        if episode is not None and episode.next_seq != known.seq + 1:
            text = "the answer is no longer kept: later events of its episode were accepted"
            raise Refusal("conflict", text, "Idempotency-Key", call.episode_id, episode.next_seq)
        return msgspec.structs.replace(call, seq=known.seq)

    async def actions(self, request: Request) -> Response:
        idempotency.require_none(request.headers.get(b"idempotency-key"), _NUMBER_EVENTS)
        message = request.decode(wire.ActionBatch)
        _require_events(request.caller, message.events, actions=len(message.actions))
        return Response.of(await self.acting.act(message, request.caller), request)

    async def rank(self, request: Request) -> Response:
        reply = await self._ranker.rank(request.decode(wire.Rank), request.caller)
        return Response.of(reply, request, 201)

    async def reward(self, request: Request) -> Response:
        event = self._ranker.reward(request.params["id"], request.decode(wire.RankedReward))
        return Response.of(await self._accept_single(request, event), request)

    async def activate(self, request: Request) -> Response:
        request.decode(wire.Activate)
        return Response.of(await self._ranker.activate(request.params["id"]), request)

    # --- asking ----------------------------------------------------------------------------

    async def spec(self, request: Request) -> Response:
        await self.live.look()
        policies = {
            name: {
                "observation": space_to_json(policy.observation),
                "action": space_to_json(policy.action),
                "schema_id": policy.schema_id,
                "spec": policy.spec,
                "live_version": self.live.version(name),
                "weights": self._weights_of(name),
                "episode_timeout": policy.episode_timeout,
                "reward_window": policy.reward_window,
                "reward_combination": policy.reward_combination,
                "reward_default": policy.reward_default,
                "reward_range": policy.reward_range,
                "candidate_features": policy.candidate_features,
                "flow": {
                    "steps_per_version": policy.steps_per_version,
                    "max_policy_lag": policy.max_policy_lag,
                },
            }
            for name, policy in self.collector.policies.items()
        }
        document = {
            "protocol": wire.PROTOCOL_VERSION,
            "version": self._version,
            "collector_id": self.collector.collector_id,
            "durable": self.collector.keeps,
            "fields": wire.EARLIER_FIELDS + wire.FIELDS,
            "policies": policies,
            "limits": {
                "max_body": self.limits.max_message,
                "max_bulk": self.limits.max_bulk,
                "max_events": wire.MAX_EVENTS,
            },
        }
        return Response.of(document, request)

    def _weights_of(self, policy_id: str) -> dict[str, Any]:
        """The wanted and the served versions of a policy."""
        standing, version = self.live.standing(policy_id), self.live.version(policy_id)
        wanted = standing.wanted
        pin = wanted and wanted.pinned
        return {
            "wanted": wanted and {"version": wanted.version, "generation": wanted.generation},
            "served": None
            if version is None
            else {"version": version, "generation": self.live.generation(policy_id)},
            "why": standing.why,
            "pinned": pin and pin.to_json(),
        }

    async def episode(self, request: Request) -> Response:
        name = request.params["id"]
        state = episode_state(self.collector.assembler, name)
        if state is None:
            raise not_found(name)
        return Response.of(state, request)

    async def openapi(self, request: Request) -> Response:
        if not self._openapi:
            self._openapi = msgspec.json.encode(openapi.document(self._version))
        return Response(200, self._openapi)

    async def metrics(self, request: Request) -> Response:
        from ingest.server import metrics  # noqa: PLC0415 - the first scrape loads it, not the start

        if self._router is None:
            raise Refusal("no_route", "there is no router to read metrics from")
        if self._metrics is None:
            self._metrics = metrics.Metrics(
                metrics.Sources(
                    self.collector,
                    self.live,
                    self._router,
                    self.acting,
                    self._connections,
                    self._trainers,
                    self._disks,
                )
            )
        return Response(200, self._metrics.text(), metrics.CONTENT_TYPE)

    async def ledger(self, request: Request) -> Response:
        return Response.of(await ledger.ledger(self.collector), request)

    async def ledger_records(self, request: Request) -> Response:
        text = parse_qs(request.query).get("after", ["-1"])[0]
        if not re.fullmatch(r"-?\d{1,18}", text):
            raise Refusal("invalid", f"expected a plan id, got {text[:40]!r}", "after")
        return Response.of(await ledger.records(self.collector, int(text)), request)

    async def erase(self, request: Request) -> Response:
        marks = request.decode(wire.Erase).tombstones
        audit("erased", tombstones=len(marks), token=request.caller.token_id)
        return Response.of(await erase(self.collector, marks), request)

    async def healthz(self, request: Request) -> Response:
        failed = self.collector.journal.failure
        if failed is not None:
            cause = {} if request.caller is NOBODY else {"cause": str(failed)}
            return Response.of({"status": "failed", **cause}, request, 503)
        return Response.of({"status": "ok"}, request)

    async def readyz(self, request: Request) -> Response:
        ready = self.collector.journal.failure is None and not self.collector.draining
        counts = self._counts().values() if request.caller is not NOBODY else ()
        flat = {name: value for group in counts for name, value in group.items()}
        return Response.of({"ready": ready, **flat}, request, 200 if ready else 503)

    def _counts(self) -> dict[str, dict[str, Any]]:
        """The counts of `/readyz`, by the time that they cover, as the status page titles it."""
        assembler, sealing = self.collector.assembler, self.collector.sealing
        stats = self.collector.stats
        return {
            "Now": {
                "collector_id": self.collector.collector_id,
                "episodes_open": len(assembler.episodes),
                "episodes_awaiting_rewards": len(assembler.closing),
                "steps_awaiting_rewards": assembler.steps_awaiting_rewards,
                "bytes_waiting": sealing.pending_bytes,
            },
            "Since this collector started": {
                "episodes_ended": sum(stats.ended.values()),
                "events_accepted": stats.accepted,
                "events_repeated": stats.duplicates,
                "events_refused": stats.refused,
            },
            "Over the journal's whole life": {
                "steps": assembler.steps,
                "steps_in_shards": sealing.totals.rows,
                "shards": sealing.totals.shards,
            },
        }

    async def status_page(self, request: Request) -> Response:
        await self.live.look()
        page = status_page(self._status(request))
        return Response(200, page, HTML, PAGE)

    async def login(self, request: Request) -> Response:
        if self._router is None:
            raise Refusal("no_route", "there is no router that knows tokens")
        given = request.decode(wire.Login)
        cookie = self._router.admit.log_in(request.headers, given.token)
        return Response(204, headers=((b"set-cookie", cookie.encode()),))

    async def status(self, request: Request) -> Response:
        await self.live.look()
        return Response.of(self._status(request), request)

    def _status(self, request: Request) -> dict[str, Any]:
        """The document of the page: for the policy and the span of the query, if they exist."""
        asked = parse_qs(request.query)
        chosen, span = (asked.get(name, [""])[0] for name in ("policy", "span"))
        chosen = (
            chosen if chosen in self.collector.policies else next(iter(self.collector.policies))
        )
        level = int(span) if span in map(str, range(len(LEVELS))) else None
        return status_document(self._facts(), chosen=chosen, level=level)

    def _facts(self) -> Facts:
        """The content of the status page."""
        collector = self.collector
        stalled = collector.flow.stalled()
        return Facts(
            policies=[
                self._policy_facts(name, stalled.get(name, 0.0)) for name in collector.policies
            ],
            made=time.time_ns() // 1000,
            steps=collector.assembler.steps,
            in_shards=collector.sealing.totals.rows,
            open=len(collector.assembler.episodes),
            awaiting=len(collector.assembler.closing),
            silent=collector.silent_seconds,
            running=time.monotonic() - self._began,
            full=collector.journal.full,
            refused=collector.stats.refused,
            hours_left={} if self._disks is None else self._disks.hours_left(),
            needs=list(self._needs()),
            counts=self._counts(),
            root="" if self.live.root is None else str(self.live.root),
        )

    def _policy_facts(self, name: str, stalled: float) -> PolicyFacts:
        found, served = self._weights_of(name), self.live.standing(name).wanted
        pin, watch = found["pinned"], self._trainers
        alive, status = (None, {}) if watch is None else watch.status_of(name)
        return PolicyFacts(
            name=name,
            served=_named_version(found["served"]),
            wanted=_named_version(found["wanted"]),
            why=found["why"],
            held=pin and f"{pin['by']}: {pin['why']}",
            share=served.canary_share if served else 0.0,
            roles=self.live.roles(name),
            trainer=alive,
            rows_trained=number_in(status.get("rows_trained")),
            retrying=number_in(status.get("retrying")),
            stalled=stalled,
            hint=str(status.get("hint") or ""),
            history=self.collector.played.history(name),
            decisions=() if watch is None else watch.decisions(name),
        )

    def _needs(self) -> Iterator[str]:
        """Conditions of the collector that need an operator."""
        collector = self.collector
        if collector.journal.failure is not None:
            yield f"The collector has failed: {collector.journal.failure}"
        if collector.journal.full:
            yield "The disk had no space at the last write: events get 507 until it has."
        if collector.draining:
            yield "The collector is being stopped."
        damage = collector.damage
        rows = damage.missing_rows + damage.lost_rows + damage.damaged_rows
        if rows or damage.lost_state or damage.set_aside is not None:
            yield f"The journal was found damaged ({counted(rows, 'row')}): see the log."
        if collector.sealer.failures:
            repeated = counted(collector.sealer.failures, "write")
            yield f"{repeated} of a shard had to be repeated since the start: see the log."
        if self._router is not None and (errors := self._router.statuses[500]):
            found = counted(errors, "answer was an internal error", "answers were internal errors")
            yield f"{found} since the start: a bug."
        lost = {} if self._trainers is None else self._trainers.off_chain()
        for name, versions in lost.items():
            if versions:
                yield f"{name}: off the chain: versions {', '.join(map(str, versions))}"


def _named_version(found: Mapping[str, int] | None) -> str:
    return NOTHING if found is None else f"version {found['version']}"


def _wasted(reply: wire.EventsReply, batch: wire.Batch, request: Request) -> float:
    """The share of a batch that was invalid, 0 to 1; 1 if nothing was valid.

    By bytes, not by events, because one refused event may be most of a body.
    """
    if not reply.refused:
        return 0.0
    if not (reply.accepted or reply.duplicates):
        return 1.0
    codes = {STATUS[one.error["code"]] for one in reply.refused}
    if codes.isdisjoint((400, 422)):
        return 0.0
    refused = [batch.events[one.index] for one in reply.refused]
    try:
        size = len(wire.encode(refused, request.content_type))
    except (ValueError, TypeError, OverflowError, RecursionError, msgspec.MsgspecError):
        return 1.0  # no Headrace client could have sent this
    return min(1.0, size / len(request.body))


def _require_events(caller: Caller, events: Sequence[wire.Event], *, actions: int = 0) -> None:
    """Raise Refusal unless the caller may log events, and send the decisions among them.

    Counts them, and the requested actions, as one request's for the caller's limits.
    """
    if events:
        caller.require(LOGGING, "an event")
    if not caller.may(ACTING) and any(type(event) is wire.Decision for event in events):
        caller.require(ACTING, "a decision")
    caller.charge(len(events) + actions)


def _named(request: Request, kind: type[wire.M]) -> wire.M:
    """Decode a single call's message, with the episode id of the path."""
    message: Any = request.decode(kind)
    name = request.params["id"]
    if message.episode_id not in ("", name):
        text = f"expected episode {name!r} as in the path, got {message.episode_id!r}"
        raise Refusal("invalid", text, "$.episode_id", name)
    replaced: wire.M = msgspec.structs.replace(message, episode_id=name)
    return replaced
