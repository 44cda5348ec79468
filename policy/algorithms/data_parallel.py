"""Learning in several processes with the same weights and the mean of all ranks' gradients.

    setup_torch_data_parallel("tcp://127.0.0.1:29500", world_rank=0, world_size=2, backend="gloo")

If loss terms are means over rows, and all ranks have the same number of rows, the mean of the
ranks' gradients is the gradient of the joined batch. So different numbers of rows raise an error on
every rank, and so does an error on one rank.
"""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

_REFUSED = -1  # stands for every count of a rank that raised


def join_group(url: str, world_rank: int, world_size: int, backend: str) -> None:
    """Join this process to a process group.

    `url`: where rank 0 listens; `world_rank`: 0 to `world_size` - 1; `backend`: see
    torch.distributed. Raises ValueError for a rank outside the world, or if the process is already
    in a group.
    """
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
    """Replace the weights by those of rank 0, so that all ranks start with the same."""
    for tensor in module.state_dict().values():
        dist.broadcast(tensor, 0)


@contextmanager
def all_or_none(counts: Mapping[str, int], world_size: int) -> Iterator[None]:
    """Run a block that sets `counts`; continue only if it succeeded on all ranks with equal counts.

    `counts` has the same names in the same order on every rank, before the block. An error within
    the block is raised on this rank, and ValueError on the others; ValueError on every rank if the
    counts differ. So no rank waits for another forever.
    """
    try:
        yield
    except Exception:
        if world_size > 1:
            _gathered([_REFUSED] * len(counts), world_size)
        raise
    if world_size > 1:
        found = _gathered(list(counts.values()), world_size)
        refusing = np.flatnonzero((found == _REFUSED).any(axis=1)).tolist()
        if refusing:
            raise ValueError(f"data parallel: expected all ranks to learn, but {refusing} refused")
        differing = [
            f"{found[:, i].tolist()} of {name}"
            for i, name in enumerate(counts)
            if len(set(found[:, i].tolist())) > 1
        ]
        if differing:
            text = ", ".join(differing)
            raise ValueError(f"data parallel: expected the same count on every rank, got {text}")


def require_same_setup(described: str, world_size: int) -> None:
    """Raise ValueError, on every rank, unless all ranks describe the same setup."""
    digest = hashlib.sha256(described.encode()).digest()[:8]
    found = _gathered([int.from_bytes(digest, "little", signed=True)], world_size)
    if len(set(found[:, 0].tolist())) > 1:
        raise ValueError(
            "data parallel: expected the same policies, trained ones and shapes on every rank, "
            f"here they are {described}"
        )


def _gathered(numbers: Sequence[int], world_size: int) -> npt.NDArray[np.int64]:
    """(world_size, M) int64: M numbers from each rank."""
    found = [torch.zeros(len(numbers), dtype=torch.int64) for _ in range(world_size)]
    dist.all_gather(found, torch.tensor(list(numbers), dtype=torch.int64))
    return torch.stack(found).numpy()


def average_gradients(gradients: Sequence[npt.NDArray[np.float32]], world_size: int) -> None:
    """Replace each gradient by its mean over all ranks, in place."""
    if world_size == 1:
        return
    for gradient in gradients:
        shared = torch.from_numpy(gradient)
        dist.all_reduce(shared, op=dist.ReduceOp.SUM)
        gradient /= world_size


def get_node_ip() -> str:
    """The address of this machine for other machines; 127.0.0.1 if it has no other."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # connecting a datagram socket only chooses a route, without sending anything
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
