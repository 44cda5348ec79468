"""Broken builds that can be abused: the attacks of tests/attack have to catch them."""

from __future__ import annotations

from typing import Any

import msgspec

from ingest.bulk_import import arrow_stream as bulk_stream
from ingest.bulk_import import handler as bulk
from ingest.protocol import messages as wire
from ingest.protocol.errors import Refusal
from ingest.server import memory
from ingest.server.route_table import RouteEntry
from ingest.web.asgi import Request
from ingest.web.connections import BoundedProtocol, ConnectionWatch
from ingest.web.cost_limits import Penalties
from ingest.web.limits import Budget
from storage.spaces import codec
from tests.faults.mutants import Patch, mutant


@mutant(json_bodies="5xx")
def refusals_escape(patch: Patch) -> None:
    """Invalid JSON does not count as the caller's error."""

    def decode(self: Request, kind: type[wire.M]) -> wire.M:
        return msgspec.json.decode(self.body, type=kind)

    patch.replace(Request, "decode", decode)


@mutant(json_bodies="peak", msgpack_bodies="peak")
def containers_are_not_counted(patch: Patch) -> None:
    """A byte may become seventy in memory."""
    patch.replace(Request, "_require_few_values", lambda self: None)


@mutant(long_texts="long")
def texts_are_not_cut(patch: Patch) -> None:
    """A refused value is repeated in the answer at any length."""
    begin = patch.original(Refusal, "__init__")

    def whole(self: Refusal, code: str, message: str, *given: Any, **named: Any) -> None:
        begin(self, code, message, *given, **named)
        self.message = message

    patch.replace(Refusal, "__init__", whole)
    patch.replace(codec, "_shown", repr)


@mutant(costly_bodies=("slowed", "memory"))
def refused_work_is_free(patch: Patch) -> None:
    """Refused work has no penalty."""
    patch.replace(Penalties, "charge", lambda self, account, cost, now: 0.0)


@mutant(floods="endless")
def no_time_for_headers(patch: Patch) -> None:
    """Slow connections have no time limit."""
    patch.replace(ConnectionWatch, "sweep", lambda self, now: None)


@mutant(floods="memory")
def bodies_without_a_bound(patch: Patch) -> None:
    """Bodies have no limit on memory."""

    def take(self: Budget, nbytes: int, account: str = "", own: int = 0) -> bool:
        self.held += nbytes
        return True

    patch.replace(Budget, "take", take)


@mutant(floods=("memory", "starved"))
def bodies_are_not_counted(patch: Patch) -> None:
    """The memory for bodies always counts as empty."""
    patch.replace(Budget, "take", lambda self, nbytes, account="", own=0: True)
    patch.replace(Budget, "give", lambda self, nbytes, account="": None)


@mutant(floods="memory")
def memory_is_kept(patch: Patch) -> None:
    """Memory taken by bodies is never returned."""
    patch.replace(memory, "return_memory", lambda: None)


@mutant(floods=("memory", "starved"))
def every_route_reads_a_body(patch: Patch) -> None:
    """A route checks neither its body nor its caller."""
    patch.replace(RouteEntry, "limit", lambda self, limits: limits.max_bulk)


@mutant(raw_sockets="smuggled")
def codings_are_not_looked_at(patch: Patch) -> None:
    """A message with two lengths is accepted."""
    original = patch.original(BoundedProtocol, "__init__")

    def lenient(self: BoundedProtocol, *args: Any, **given: Any) -> None:
        original(self, *args, **given)
        self.parser.set_dangerous_leniencies(
            lenient_chunked_length=True,
            lenient_transfer_encoding=True,
            lenient_data_after_close=True,
        )

    patch.replace(BoundedProtocol, "__init__", lenient)


@mutant(arrow_streams="5xx")
def any_stream_is_read(patch: Patch) -> None:
    """Arrow's own errors reach the caller as ours."""

    def read(body: bytes) -> bulk_stream.ArrowBatches:
        import pyarrow  # noqa: PLC0415 - as late as the sound build does

        table = pyarrow.ipc.open_stream(body).read_all()
        return bulk_stream.ArrowBatches(table.schema, table.to_batches(), table.num_rows)

    for module in (bulk, bulk_stream):
        patch.replace(module, "read_batches", read)
