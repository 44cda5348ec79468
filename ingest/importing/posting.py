"""Cut whole episodes into requests of the bulk route, and post them to the collector.

The cuts depend on the episodes alone, so that a repeated run makes the same requests. Each has an
idempotency key made of the import's name and the request's number. The collector skips and counts
the episodes that it knows under the key; other rows under the same key are a conflict. One request
is prepared while the previous one is being sent.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ingest.columns.arrow_kinds import Array
from ingest.delivery.transport import Delivery, Transport
from ingest.importing.episodes import WholeEpisodes
from ingest.importing.readers import stream_bytes
from ingest.importing.report import Account, BadRow
from ingest.protocol import messages as wire
from ingest.protocol.errors import CollectorUnavailable, ImportFailed, Refusal

ROWS, BYTES = 100_000, 8_000_000
"""The least rows or bytes of a request, except for the last one."""

LARGEST_ROWS, LARGEST, HEAD_BYTES = 900_000, 0.9, 6_000
"""Limits above which an episode is sent in pieces.

They are rows, and bytes: a share of `max_bulk`, from which a space for the head is subtracted.
"""


class ImportRequest(NamedTuple):
    """The episodes of one request body; `number` is part of its key."""

    episodes: WholeEpisodes
    number: int


class RequestCutter:
    """Collects episodes and cuts them into requests, between episodes."""

    def __init__(self, max_bulk: int) -> None:
        self._most_bytes = max(HEAD_BYTES, int(max_bulk * LARGEST) - HEAD_BYTES)
        self._bytes = min(BYTES, self._most_bytes // 4)
        self._waiting: list[WholeEpisodes] = []
        self._number = 0

    def add(self, episodes: WholeEpisodes) -> Iterator[ImportRequest]:
        if len(episodes.begins):
            self._waiting.append(episodes)
            yield from self._cut(last=False)

    def finish(self) -> Iterator[ImportRequest]:
        """Yield the remaining requests; numbers then start at 0 again."""
        if self._waiting:
            yield from self._cut(last=True)
        self._number = 0

    def _cut(self, *, last: bool) -> Iterator[ImportRequest]:
        if not last and sum(one.table.num_rows for one in self._waiting) < self._least():
            return
        whole = _behind(self._waiting)
        sizes = np.cumsum(row_bytes(whole.table))
        ends = np.append(whole.begins[1:], whole.table.num_rows)
        before_rows = before_bytes = first = 0
        while first < len(ends):
            enough = (ends - before_rows >= ROWS) | (sizes[ends - 1] - before_bytes >= self._bytes)
            enough[:first] = False
            if not enough.any() and not last:
                break
            end = int(enough.argmax()) + 1 if enough.any() else len(ends)
            # an episode that would make the body too large begins the next request
            too_large = sizes[ends[end - 1] - 1] - before_bytes > self._most_bytes
            too_long = ends[end - 1] - before_rows > LARGEST_ROWS
            end -= (too_large or too_long) and end - first > 1
            yield from self._requests(whole.slice(first, end))
            first, before_rows = end, int(ends[end - 1])
            before_bytes = int(sizes[before_rows - 1])
        self._waiting = [whole.slice(first, len(ends))] if first < len(ends) else []

    def _least(self) -> int:
        """The number of rows below which measuring their bytes is not worthwhile."""
        table = self._waiting[0].table
        each = 2 * int(table.nbytes) // max(1, int(table.num_rows))
        return min(ROWS, self._bytes // max(1, each))

    def _requests(self, episodes: WholeEpisodes) -> Iterator[ImportRequest]:
        for piece in self._pieces(episodes):
            yield ImportRequest(piece, self._number)
            self._number += 1

    def _pieces(self, episodes: WholeEpisodes) -> Iterator[WholeEpisodes]:
        """Yield the episodes; those that are too large for a request as consecutive pieces.

        All pieces but the last are truncated, with the next observation as their final one.
        """
        table = episodes.table
        sizes = np.cumsum(row_bytes(table))
        if sizes[-1] <= self._most_bytes and len(sizes) <= LARGEST_ROWS:
            yield episodes
            return
        # Arrow stores a final observation for each row, which can double a row's size
        count = int(max(2 * sizes[-1] // self._most_bytes, len(sizes) // LARGEST_ROWS)) + 2
        bounds = np.linspace(0, len(sizes), min(count, len(sizes)) + 1).astype(int).tolist()
        name = table["eps_id"][0].as_py()
        if "agent_id" in table.column_names:
            text = (
                f"expected at most {LARGEST_ROWS} steps, and {self._most_bytes} bytes, of an agent"
            )
            raise ImportFailed(f"{text} in an episode, got {len(sizes)} and {sizes[-1]} in {name}")
        for at, (begin, end) in enumerate(pairwise(bounds)):
            rows = slice(begin, end)
            piece = _piece(table, begin, end, name, at)
            units, numbers = episodes.units[rows], episodes.numbers[rows]
            yield WholeEpisodes(piece, np.zeros(1, np.int64), units, numbers)


def _piece(table: Any, begin: int, end: int, name: str, at: int) -> Any:
    """The rows [begin, end) of an episode as an episode of its own."""
    piece, rows = table.slice(begin, end - begin), end - begin
    own = name if at == 0 else f"{name}~{at + 1}"
    columns = {one: piece[one] for one in piece.column_names}
    columns |= {"eps_id": pa.repeat(pa.scalar(own), rows), "t": pa.array(np.arange(rows))}
    if at:
        before = name if at == 1 else f"{name}~{at}"
        columns["continues"] = pa.repeat(pa.scalar(before), rows)
        if "tags" in columns:
            columns["tags"] = pa.repeat(table["tags"][0], rows)
    if end < len(table):
        is_last = np.arange(rows) == rows - 1
        columns["truncateds"] = pa.array(is_last)
        for one in piece.column_names:
            if one.partition(".")[0] == "obs":  # only its last row is read
                columns[f"final_{one}"] = table[one].slice(begin + 1, rows)
    return pa.table(columns)


def row_bytes(table: Any) -> Array:
    """The size of each row in a body in bytes, int64 (rows,)."""
    total = np.zeros(table.num_rows, np.int64)
    for column in table.columns:
        kind = column.type
        if pa.types.is_string(kind) or pa.types.is_large_string(kind):
            total += 4 + pc.binary_length(column).fill_null(0).to_numpy()
        elif pa.types.is_fixed_size_list(kind):
            total += kind.list_size * kind.value_type.bit_width // 8
        else:
            total += max(1, kind.bit_width // 8)
    return total


def _behind(some: Sequence[WholeEpisodes]) -> WholeEpisodes:
    rows = np.cumsum([0, *(one.table.num_rows for one in some)])
    begins = [one.begins + before for one, before in zip(some, rows.tolist(), strict=False)]
    tables = [one.table for one in some]
    table = pa.concat_tables(tables, promote_options="permissive").combine_chunks()
    units = np.concatenate([one.units for one in some])
    numbers = np.concatenate([one.numbers for one in some])
    return WholeEpisodes(table, np.concatenate(begins), units, numbers)


# --- sending -----------------------------------------------------------------------------------


class RequestSender:
    """Posts requests one after another, on a thread, and adds the results to the report."""

    def __init__(
        self, transport: Transport, timeout: float, labels: Sequence[str], account: Account
    ) -> None:
        self._transport, self._timeout = transport, timeout
        self._labels, self._account = labels, account
        self._thread = ThreadPoolExecutor(1, "headrace-import")
        self._sent: tuple[ImportRequest, Future[wire.EventsReply]] | None = None
        self._failed = False

    def send(self, request: ImportRequest, name: str) -> None:
        """Post a request after the previous one; after one that failed, post nothing.

        The collector must never have a request without those before it: a second run would find
        other rows under their numbers. Raises ImportFailed, CollectorUnavailable.
        """
        if self._failed:
            return
        body = stream_bytes(request.episodes.table)
        self.wait()
        headers = {
            "Content-Type": wire.ARROW,
            "Headrace-CRC32": f"{zlib.crc32(body):08x}",
            "Idempotency-Key": f"{name}:{request.number}",
        }
        self._sent = request, self._thread.submit(self._post, body, headers)

    def wait(self) -> None:
        """Wait for the answer to the latest request, and add it to the report."""
        if self._sent is not None:
            request, future = sent = self._sent
            self._sent = None
            try:
                reply = future.result()
            except KeyboardInterrupt:
                self._sent = sent  # `abandon` still counts its answer
                raise
            except Exception as error:
                self._failed = True
                if isinstance(error, ImportFailed):
                    label = self._labels[int(request.episodes.units[0])]
                    raise ImportFailed(f"{label}: {error}") from error
                raise
            self._take(request, reply)

    def abandon(self) -> None:
        """Let no request be sent again; count the answer to the one that is under way."""
        self._transport.closing.set()
        with contextlib.suppress(CollectorUnavailable, ImportFailed, Refusal):
            self.wait()

    def close(self) -> None:
        self._transport.closing.set()
        self._thread.shutdown(wait=True)

    def _post(self, body: bytes, headers: dict[str, str]) -> wire.EventsReply:
        try:
            delivery = Delivery(self._transport, "POST", "/v1/steps", body, headers)
            return delivery.run(wire.EventsReply, self._timeout)
        except Refusal as refusal:
            if refusal.code == "conflict":
                raise ImportFailed(
                    "the collector knows this import with other rows: its source, the order of its "
                    "rows, its options, or the policy's spaces have changed since. Under another "
                    "name all of its rows would be stored, also those that are stored already "
                    f"({refusal.message})"
                ) from refusal
            raise

    def _take(self, request: ImportRequest, reply: wire.EventsReply) -> None:
        """Add a reply to the report; its counts of events include episodes' starts and ends.

        The collector accepts episodes in order, so the known ones come first.
        """
        episodes, report = request.episodes, self._account.report
        refused = self._refused(episodes, reply)
        lengths = np.diff(np.append(episodes.begins, len(episodes.numbers)))
        fine = np.delete(lengths, refused)
        beyond = reply.refused_count - len(refused) if reply.refused_count else 0
        left_out = int(lengths[refused].sum())
        if beyond > 0:  # the reply only counts these
            taken = reply.accepted + reply.duplicates - 2 * (len(fine) - beyond)
            left_out += max(0, int(fine.sum()) - taken)
        events = np.cumsum(fine + 2)
        known = int(np.searchsorted(events, reply.duplicates, side="right"))
        rows_known = max(0, reply.duplicates - 2 * known)
        report.rows_left_out += left_out
        report.skipped_known += known
        report.rows_known += rows_known
        report.episodes += len(fine) - known - max(0, beyond)
        report.steps += len(episodes.numbers) - left_out - rows_known

    def _refused(self, episodes: WholeEpisodes, reply: wire.EventsReply) -> list[int]:
        """The indices of refused episodes, after describing and counting them."""
        places = []
        for item in reply.refused:
            row = item.index
            place = int(np.searchsorted(episodes.begins, row, side="right")) - 1
            name = episodes.table["eps_id"][row].as_py()
            text = str(item.error.get("message", ""))
            for lead in ("Episode", "episode"):
                text = text.removeprefix(f"{lead} {name}: ")
            text = text.replace(name, "of it")
            reason = f"{item.error['code']}: {text}"
            source = self._labels[int(episodes.units[row])]
            self._account.name(BadRow(source, int(episodes.numbers[row]), reason, name))
            self._account.count(reason, 1)
            places.append(place)
        if reply.refused_count > len(places):
            self._account.count(
                "refused by the collector, not named", reply.refused_count - len(places)
            )
        return sorted(set(places))
