"""Learning on several processes at once: every rank holds the same weights, and learns from the
mean of all ranks' gradients.

    setup_torch_data_parallel("tcp://127.0.0.1:29500", world_rank=0, world_size=2, backend="gloo")

With loss terms that are means over rows, and equal counts on every rank, the mean of the ranks'
gradients is the gradient of the joined batch: counts that differ are refused on every rank.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

__all__ = [
    "average_gradients",
    "broadcast_weights",
    "find_free_port",
    "get_node_ip",
    "join_group",
    "require_equal_counts",
]


def join_group(url: str, world_rank: int, world_size: int, backend: str) -> None:
    """Join the process group of this process. Raises ValueError for a rank outside the world."""
    if not 0 <= world_rank < world_size:
        raise ValueError(f"world_rank: expected 0 to {world_size - 1}, got {world_rank}")
    if dist.is_initialized():
        raise ValueError("this process is already in a group: one worker a process")
    dist.init_process_group(backend, init_method=url, rank=world_rank, world_size=world_size)


def leave_group() -> None:
    """Leave the process group, if this process is in one."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def broadcast_weights(module: torch.nn.Module) -> None:
    """Take the weights of rank 0, so that all begin alike."""
    for tensor in module.state_dict().values():
        dist.broadcast(tensor, 0)


def require_equal_counts(count: int, world_size: int) -> None:
    """Raise ValueError, on every rank, unless all of them learn from as many rows."""
    if world_size == 1:
        return
    counts = [torch.zeros(1, dtype=torch.int64) for _ in range(world_size)]
    dist.all_gather(counts, torch.tensor([count]))
    found = [int(one) for one in counts]
    if len(set(found)) > 1:
        raise ValueError(f"data parallel: expected the same count on every rank, got {found}")


def average_gradients(gradients: Sequence[npt.NDArray[np.float32]], world_size: int) -> None:
    """Replace each gradient by its mean over all ranks, in place: summed, then divided."""
    if world_size == 1:
        return
    for gradient in gradients:
        shared = torch.from_numpy(gradient)
        dist.all_reduce(shared, op=dist.ReduceOp.SUM)
        gradient /= world_size


def get_node_ip() -> str:
    """The address by which others reach this machine; 127.0.0.1 when it has no other."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # a datagram socket that connects sends nothing: it only chooses a route
            probe.connect(("192.0.2.1", 1))
            address: str = probe.getsockname()[0]
        except OSError:
            return "127.0.0.1"
    return address


def find_free_port() -> int:
    """A TCP port that is free now; another process may take it before it is used."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
    return port
