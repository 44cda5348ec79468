"""A server that does nothing: the collector's own HTTP layer with an empty handler.

`python -m benchmarks.empty_server` prints its address and answers every POST with a small reply.
"""

from __future__ import annotations

import asyncio
import sys

import uvicorn
import uvloop

from ingest import wire
from ingest.http import Request, Response, Router
from ingest.server import bind

REPLY = wire.EventsReply(durable=True, accepted=1)


async def _nothing(request: Request) -> Response:
    return Response.of(REPLY, request)


async def _serve() -> None:
    router = Router(64_000_000)
    for path in ("/v1/events", "/v1/actions"):
        router.add("POST", path, _nothing)
    listener = bind("127.0.0.1", 0)
    config = uvicorn.Config(
        router, http="httptools", loop="none", lifespan="off", ws="none", access_log=False,
        log_config=None, server_header=False, date_header=False, proxy_headers=False,
    )  # fmt: skip
    print(f"ready http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    await uvicorn.Server(config).serve(sockets=[listener])


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve())
