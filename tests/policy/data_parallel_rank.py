"""The ranks of a data-parallel group: each learns 20 times from its half of each batch. In a second
group, each then learns from batches of two policies that do not match the other rank's.

The ranks are forked from a process that has learned once, and so loaded torch and its compiler.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import safetensors.numpy
import torch

from policy.worker.rollout_worker import RolloutWorker
from storage.experience.multi_agent_batch import MultiAgentBatch
from storage.system.process import die_with_parent
from tests.policy.toy_envs import CountEnv

UPDATES = 20


def make(seed):
    torch.set_num_threads(1)
    return RolloutWorker(CountEnv, rollout_fragment_length=32, seed=seed)


def batches():
    """The same batches of 32 rows on every rank."""
    source = make(99)
    rows = [source.sample() for _ in range(4)]
    rng = np.random.default_rng(0)
    for i in range(UPDATES):
        batch = rows[i % 4].copy()
        batch["advantages"] = rng.normal(size=batch.count)
        yield batch


SPACES = (CountEnv.observation_space, CountEnv.action_space)


def make_two(trained=None):
    """Policies a and b, without an environment."""
    torch.set_num_threads(1)
    policy = {name: (None, *SPACES, {}) for name in ("a", "b")}
    return RolloutWorker(policy=policy, policies_to_train=trained, seed=1)


def misfits(rank):
    """Batches that the ranks may not learn from at the same time -> this rank's batch."""
    rows = next(batches()).slice(0, 8)
    infinite = rows.copy()
    infinite["advantages"], infinite["action_logp"] = np.full(8, -1.0), np.full(8, -1e6)
    a, b = {"a": rows}, {"b": rows}
    return {
        "others": [a, b][rank],
        "more": [a | b, b][rank],
        "unknown": [a | {"c": rows}, a][rank],
        "infinite": [a | {"b": infinite}, a | b][rank],
    }


def learn_of_two(url, rank, out):
    worker = make_two()
    worker.setup_torch_data_parallel(url, rank, 2, "gloo")
    before = worker.get_weights()["b"]
    for name, rows in misfits(rank).items():
        try:
            worker.learn_on_batch(MultiAgentBatch(rows, 8))
        except (ValueError, KeyError, FloatingPointError) as error:
            Path(f"{out}.{name}").write_text(f"{type(error).__name__}: {error}")
    same = all((array == before[name]).all() for name, array in worker.get_weights()["b"].items())
    rows = next(batches()).slice(8 * rank, 8 * (rank + 1))
    both = [("a", rows), ("b", rows)]  # in another order on every rank
    worker.learn_on_batch(MultiAgentBatch(dict(both[:: 1 - 2 * rank]), 8))
    found = {f"{k}/{n}": v for k, w in worker.get_weights().items() for n, v in w.items()}
    safetensors.numpy.save_file(found | {"same": np.array([same])}, f"{out}.two")
    worker.stop()


def join_unlike(url, rank, out):
    worker = make_two(["a", "b"][: 1 + rank])
    try:
        worker.setup_torch_data_parallel(url, rank, 2, "gloo")
    except ValueError as error:
        Path(f"{out}.unlike").write_text(str(error))


def learn(url, rank, out):
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


def main(outs, urls):
    make(seed=0).learn_on_batch(next(batches()))
    ranks = []
    for rank, out in enumerate(outs):
        if (pid := os.fork()) == 0:
            die_with_parent(os.getppid())
            for part, url in zip((learn, learn_of_two, join_unlike), urls, strict=True):
                part(url, rank, out)
            return 0
        ranks.append(pid)
    return sum(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0 for pid in ranks)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:3], sys.argv[3:]))
