"""One rank of a data-parallel group: learns 100 times from its half of each batch."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import safetensors.numpy
import torch

from policy.rollout_worker import RolloutWorker
from tests.policy.toy_envs import CountEnv

UPDATES = 100


def make(seed):
    torch.set_num_threads(1)
    return RolloutWorker(CountEnv, rollout_fragment_length=32, seed=seed)


def batches():
    """The same 100 batches of 32 rows for whoever asks."""
    source = make(99)
    rows = [source.sample() for _ in range(4)]
    rng = np.random.default_rng(0)
    for i in range(UPDATES):
        batch = rows[i % 4].copy()
        batch["advantages"] = rng.normal(size=batch.count)
        yield batch


def main(url, rank, out):
    worker = make(seed=rank)  # ranks begin with weights of their own
    worker.setup_torch_data_parallel(url, rank, 2, "gloo")
    begin, _ = worker.compute_gradients(next(batches()).slice(16 * rank, 16 * (rank + 1)))
    safetensors.numpy.save_file({str(i): one for i, one in enumerate(begin)}, f"{out}.gradients")
    for batch in batches():
        worker.learn_on_batch(batch.slice(16 * rank, 16 * (rank + 1)))
    safetensors.numpy.save_file(worker.get_weights()["default"], out)
    try:
        worker.learn_on_batch(next(batches()).slice(0, 16 + rank))
    except ValueError as error:
        Path(f"{out}.refused").write_text(str(error))
    worker.stop()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
