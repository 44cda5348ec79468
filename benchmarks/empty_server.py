"""A server that does nothing: the collector's own HTTP layer with an empty handler.

`python -m benchmarks.empty_server` prints its address and answers every request of a client with a
small reply.
"""

from __future__ import annotations

import asyncio
import sys

import uvicorn
import uvloop

from ingest.access.tokens import NOBODY_NEEDED
from ingest.protocol import messages as wire
from ingest.server.listening import bind
from ingest.server.options import Listening
from ingest.web.asgi import Request, Response, Router
from ingest.web.limits import ServerLimits
from storage.spaces.descriptors import parse_space, space_to_json

REPLY = wire.EventsReply(durable=True, accepted=1)


async def _nothing(request: Request) -> Response:
    return Response.of(REPLY, request)


async def _spec(request: Request) -> Response:
    spaces = {
        "observation": space_to_json(parse_space("box:4")),
        "action": space_to_json(parse_space("discrete:2")),
    }
    document = {"protocol": 1, "durable": True, "policies": {"default": spaces}}
    return Response.of(document, request)


async def _register(request: Request) -> Response:
    return Response.of(wire.Registered(instance="nobody"), request, 201)


async def _act(request: Request) -> Response:
    """Reply with the same action to every request; no episode is known, nothing is decided."""
    asked = request.decode(wire.ActionBatch)
    actions = [wire.ActionReply(episode_id=a.episode_id, action=1) for a in asked.actions]
    return Response.of(wire.ActionsReply(durable=True, actions=actions), request)


async def _serve() -> None:
    router, most = Router(ServerLimits()), ServerLimits.max_bulk
    for method, path, handler in (
        ("POST", "/v1/events", _nothing),
        ("POST", "/v1/steps", _nothing),
        ("POST", "/v1/actions", _act),
        ("POST", "/v1/instances", _register),
        ("GET", "/v1/spec", _spec),
    ):
        router.add(method, path, handler, NOBODY_NEEDED, limit=most)
    listener = bind(Listening(port=0))
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
