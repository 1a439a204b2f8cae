"""Communication between ranks: sums over the heads of a layer, and hidden states from stage to stage."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import distributed

from examples.reference_engine.weights import Placement


class Collectives(Protocol):
    """Communication that the model needs."""

    def all_reduce(self, share: torch.Tensor) -> torch.Tensor:
        """Sums over the tensor-parallel ranks of this stage; all of them must call it."""

    def send(self, hidden: torch.Tensor) -> None:
        """Sends hidden states (num_tokens, hidden_size) to the next stage."""

    def recv(self, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
        """Receives hidden states of the previous stage, with the type and device of `like`."""


class Alone:
    """A single rank: sums are its own values, and there is no other stage."""

    def all_reduce(self, share: torch.Tensor) -> torch.Tensor:
        """See `Collectives`."""
        return share

    def send(self, hidden: torch.Tensor) -> None:
        """See `Collectives`: never called."""
        raise RuntimeError(f"{tuple(hidden.shape)} for the next stage, but there is one stage")

    def recv(self, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
        """See `Collectives`: never called."""
        raise RuntimeError(f"{tuple(shape)} on {like.device} from the previous stage, but there is one stage")


class ProcessGroup:
    """Ranks in separate processes, connected by gloo. Tensors on a GPU are copied through the host."""

    def __init__(self, placement: Placement, meeting_point: Path, rank: int) -> None:
        """Joins the other ranks and waits until all have joined. One instance per process.

        Args:
            placement: The part that this rank has.
            meeting_point: A new file that all ranks can write, used for rendezvous.
            rank: Number of this rank, [0, tp_size * pp_size).
        """
        size = placement.tp_size * placement.pp_size
        distributed.init_process_group("gloo", init_method=f"file://{meeting_point}", rank=rank, world_size=size)
        stages = [list(range(first, first + placement.tp_size)) for first in range(0, size, placement.tp_size)]
        self._stage = [distributed.new_group(ranks) for ranks in stages][placement.pp_rank]
        self._rank = rank
        self._tp_size = placement.tp_size

    def all_reduce(self, share: torch.Tensor) -> torch.Tensor:
        """See `Collectives`."""
        if self._tp_size == 1:
            return share
        total = share.cpu() if share.is_cuda else share.clone()
        distributed.all_reduce(total, group=self._stage)
        return total.to(share.device)

    def send(self, hidden: torch.Tensor) -> None:
        """See `Collectives`."""
        distributed.send(hidden.cpu().contiguous(), self._rank + self._tp_size)

    def recv(self, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
        """See `Collectives`."""
        hidden = torch.empty(tuple(shape), dtype=like.dtype)
        distributed.recv(hidden, self._rank - self._tp_size)
        return hidden.to(like.device)

    @staticmethod
    def close() -> None:
        """Leaves the process group."""
        distributed.destroy_process_group()
