"""A worker's inputs and outputs: the argument of their creators, and its own sampler as an input.

    def from_shards(ioctx): return ShardReader(ioctx.log_dir)
    def to_shards(ioctx): return ParquetOutputWriter(ioctx.log_dir, ioctx.worker.descriptors())
    RolloutWorker(..., input_creator=from_shards, output_creator=to_shards)

Samplers become inputs by `SamplerInput`, `AsyncSamplerInput` and `FakeInput`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from queue import Empty, Full, Queue
from typing import TYPE_CHECKING, Any

from policy.sampling.episode import SamplingWorker
from storage.experience.interfaces import InputReader, OutputWriter
from storage.experience.multi_agent_batch import MultiAgentBatch
from storage.experience.sample_batch import SampleBatch

if TYPE_CHECKING:  # it loads torch, which an IOContext does not need
    from policy.sampling.sampler import Sampler

AHEAD = 5
"""The batches that a sampler in its own thread may be ahead."""
WAIT_SECONDS = 600.0


@dataclass(frozen=True)
class IOContext:
    """The argument of input and output creators.

    `log_dir` is by default the working directory.
    """

    log_dir: str = field(default_factory=os.getcwd)
    config: Mapping[str, Any] = field(default_factory=dict)
    worker_index: int = 0
    worker: SamplingWorker | None = None
    sampler: InputReader | None = None

    def default_sampler_input(self) -> InputReader:
        """The worker's own sampler. Raises ValueError for a worker without an environment."""
        if self.sampler is None:
            raise ValueError("default_sampler_input: this worker has no environment to sample from")
        return self.sampler


class NoopOutput(OutputWriter):
    """Writes nothing."""

    def write(self, batch: SampleBatch | MultiAgentBatch) -> None:
        return None


class SamplerInput(InputReader):
    """The worker's sampler as an input; a batch is a fragment or an episode."""

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler

    def next(self, timeout: float | None = None) -> Any:
        return self.sampler.next_batch()


class FakeInput(InputReader):
    """Samples once, then returns copies of the first batch forever.

    Used to measure everything except sampling. It returns copies because batches are changed in
    place.
    """

    def __init__(self, source: InputReader) -> None:
        self._source = source
        self._first: Any = None

    def next(self, timeout: float | None = None) -> Any:
        if not self._first:  # or one without rows
            self._first = self._source.next(timeout)
        return self._first.copy()

    def close(self) -> None:
        self._source.close()


class AsyncSamplerInput(InputReader):
    """A sampler in its own thread, at most `AHEAD` batches ahead.

    An exception of the sampler is raised by `next`, and again by every later call.
    """

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._queue: Queue[Any] = Queue(AHEAD)
        self._stopping = threading.Event()
        self._failed: BaseException | None = None
        self._thread: threading.Thread | None = None

    def next(self, timeout: float | None = None) -> Any:
        """The next batch. Raises TimeoutError if none comes for 600 s (or `timeout`)."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)
            self._thread.start()
        if self._failed is not None and self._queue.empty():
            raise self._failed
        wait = WAIT_SECONDS if timeout is None else timeout
        try:
            batch = self._queue.get(timeout=wait)
        except Empty:
            raise TimeoutError(f"the sampler gave no batch for {wait:g} s") from None
        if batch is None:
            raise self._failed or RuntimeError("the sampler was stopped")
        return batch

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._put(self._sampler.next_batch())
        except BaseException as error:
            self._failed = error
        finally:
            self._put(None)

    def _put(self, batch: Any) -> None:
        while not self._stopping.is_set():
            try:
                self._queue.put(batch, timeout=0.1)
            except Full:
                continue
            return

    def close(self) -> None:
        """Stop after the current step; wait at most 5 s for an environment that blocks."""
        self._stopping.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=5.0)
