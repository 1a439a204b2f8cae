"""What ranks say to each other: sums over a layer's heads, hidden states from stage to stage."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import distributed

from examples.reference_engine.weights import Placement


class Collectives(Protocol):
    """What the model needs of the other ranks."""

    def all_reduce(self, share: torch.Tensor) -> torch.Tensor:
        """The sum over the tensor ranks of this stage; all of them call it."""

    def send(self, hidden: torch.Tensor) -> None:
        """Gives hidden states (num_tokens, hidden_size) to the next stage."""

    def recv(self, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
        """Waits for what the stage before sends; of the type and on the device of `like`."""


class Alone:
    """A single rank: sums are what it has, and there is no other stage."""

    def all_reduce(self, share: torch.Tensor) -> torch.Tensor:
        """See `Collectives`."""
        return share

    def send(self, hidden: torch.Tensor) -> None:
        """See `Collectives`: never called."""
        raise RuntimeError(f"{tuple(hidden.shape)} for a next stage, and there is one stage")

    def recv(self, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
        """See `Collectives`: never called."""
        raise RuntimeError(f"{tuple(shape)} on {like.device} from a stage before, and there is one stage")


class ProcessGroup:
    """Ranks in processes of their own, by way of gloo: tensors on a GPU pass through the host."""

    def __init__(self, placement: Placement, meeting_point: Path, rank: int) -> None:
        """Joins the others; returns when all are there. One in a process.

        Args:
            placement: The part that this rank has.
            meeting_point: A file that all can write and that is not there before, for them to find each other.
            rank: This rank, [0, tp_size * pp_size).
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
        """Leaves the others."""
        distributed.destroy_process_group()
