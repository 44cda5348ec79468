"""A service module for the servers that host it: WSGI, ASGI and Celery tasks.

`COLLECTOR` is the collector's address. With `BUSY`, the client has logged and its thread runs
before a preloading server forks; with `IDLE`, the thread waits for the collector by then.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable
from typing import Any

from headrace import PolicyClient

OBSERVATION = [0.0, 0.5, 1.0, -0.5]
client = PolicyClient(os.environ.get("COLLECTOR", "http://127.0.0.1:9"))
if "BUSY" in os.environ:
    for number in range(50):
        client.log_step(OBSERVATION, 1, 1.0, episode_id=f"{os.getpid()}-preload-{number}")
if "IDLE" in os.environ:
    from tests.ingest.bare_fork import await_idle

    await_idle()


def decide(name: str) -> str:
    """Log a decision; return the id of the process."""
    client.log_step(OBSERVATION, 1, 1.0, episode_id=name)
    return str(os.getpid())


def wsgi(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
    pid = decide(environ["PATH_INFO"].strip("/"))
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [pid.encode()]


async def asgi(scope: dict[str, Any], receive: Any, send: Any) -> None:
    if scope["type"] == "lifespan":
        while (await receive())["type"] != "lifespan.shutdown":
            await send({"type": "lifespan.startup.complete"})
        await asyncio.to_thread(client.close)
        return await send({"type": "lifespan.shutdown.complete"})
    pid = decide(scope["path"].strip("/"))
    await send({"type": "http.response.start", "status": 200, "headers": []})
    return await send({"type": "http.response.body", "body": pid.encode()})


def queue_app() -> Any:
    """A Celery application with a folder as its broker."""
    import celery  # noqa: PLC0415 - only its workers have it

    folder = os.environ["BROKER"]
    app = celery.Celery("hosted", broker="filesystem://", backend=f"file://{folder}/results")
    app.conf.broker_transport_options = {
        "data_folder_in": f"{folder}/queue",
        "data_folder_out": f"{folder}/queue",
        "control_folder": f"{folder}/control",
    }
    app.task(name="decide")(decide)
    return app


if "BROKER" in os.environ:
    app = queue_app()
