"""What looks after tokens, versions and connections while a collector serves.

Also of `ingest.collector.held_record`.
"""

from __future__ import annotations

import asyncio

import pytest

from ingest.server.process import keep_following


class Stumbling:
    """A follower that fails at its first look."""

    def __init__(self) -> None:
        self.looks = 0
        self.went_on = asyncio.Event()

    async def follow(self) -> None:
        self.looks += 1
        if self.looks == 1:
            raise RuntimeError("planted")
        self.went_on.set()
        await asyncio.Event().wait()


def test_an_error_that_nobody_foresaw_is_told_and_ends_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Otherwise a revoked token would be let in from then on, and nobody would know why."""

    async def body() -> None:
        one = Stumbling()
        task = asyncio.create_task(keep_following(one, again=0.0))
        async with asyncio.timeout(10):
            await one.went_on.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert one.looks == 2

    asyncio.run(body())
    assert "Stumbling failed, and goes on" in caplog.text
    assert "planted" in caplog.text
