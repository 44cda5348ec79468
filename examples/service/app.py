"""A web service that makes decisions, and logs each to disk before it answers.

    uvicorn examples.service.app:app --workers 3

The disk is the collector's; or, with a folder in HEADRACE_SPOOL, the service's own, so that it
answers even if the collector is down. That folder must outlive the worker: the next worker delivers
its files.

A caller that gets no answer repeats the request with the same `request_id`: the decision is derived
from it, so that it is the same, and the collector stores it once.
"""

from __future__ import annotations

import os
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

from fastapi import FastAPI, HTTPException
from fastapi.responses import PlainTextResponse
from pydantic import BaseModel, Field

from headrace import BufferFull, PolicyClient, Refusal

FLUSH_SECONDS = 10.0
OFFER_SHARE = 0.3  # how often the offer is shown: the propensity of action 1

SPOOL = os.environ.get("HEADRACE_SPOOL")

# Created when a worker imports this, or before it forks (`gunicorn --preload`); both work.
client = PolicyClient(
    os.environ.get("HEADRACE_ADDRESS", "http://127.0.0.1:8642"),
    token=os.environ.get("HEADRACE_TOKEN"),
    ca=os.environ.get("HEADRACE_CA"),
    cache_dir=os.environ.get("HEADRACE_CACHE"),
    on_full="spool" if SPOOL else "raise",
    spool_dir=SPOOL,
)


@asynccontextmanager
async def lifespan(_: FastAPI) -> AsyncIterator[None]:
    yield
    client.close()  # not reached if the process is ended by SIGKILL


app = FastAPI(lifespan=lifespan)


class Asked(BaseModel):
    request_id: Annotated[str, Field(pattern=r"^[\w-]{1,100}$")]
    features: Annotated[list[float], Field(min_length=4, max_length=4)]


@app.post("/decide")
def decide(asked: Asked) -> dict[str, int]:  # not async, so that it runs in a thread and may wait
    action = int(random.Random(asked.request_id).random() < OFFER_SHARE)
    probability = OFFER_SHARE if action else 1 - OFFER_SHARE
    try:
        client.log_step(
            asked.features, action, 0.0, action_prob=probability, episode_id=asked.request_id
        )
    except Refusal as refusal:  # a retry at the worker that has just logged this request
        if refusal.code not in ("conflict", "completed"):
            raise HTTPException(422, str(refusal)) from refusal
    except ValueError as error:  # a feature that is not a float32
        raise HTTPException(422, str(error)) from error
    except BufferFull as error:
        raise HTTPException(503, "no space to store the decision: retry") from error
    if SPOOL:
        return {"action": action}
    try:
        client.flush(FLUSH_SECONDS, episode_id=asked.request_id)
    except TimeoutError as error:
        raise HTTPException(503, "not on disk yet: ask again") from error
    except Refusal as refusal:  # an earlier attempt of this request was stored
        if refusal.code not in ("conflict", "completed"):
            status = 422 if refusal.code == "invalid" else 503
            raise HTTPException(status, str(refusal)) from refusal
    return {"action": action}


@app.get("/healthz")
def healthz() -> dict[str, str]:
    """Whether this process answers. It works without its collector, so it need not restart."""
    return {"status": "ok"}


@app.get("/metrics", response_class=PlainTextResponse)
def metrics() -> str:
    return client.stats.prometheus()  # of the worker that answers
