"""What vLLM's build for CPUs lacks for data parallelism of MoE models: exchanges of as many tokens as each engine has.

An extension of workers (`worker_extension_cls`), which is imported before they compute.
"""

from typing import Any

import torch
from torch import distributed
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator


def _all_gatherv(self: Any, tensors: list[torch.Tensor], dim: int, sizes: list[int]) -> list[torch.Tensor]:
    """Concatenates the rows of all ranks."""
    assert dim == 0
    gathered = []
    for tensor in tensors:
        padded = tensor.new_zeros((max(sizes), *tensor.shape[1:]))
        padded[: len(tensor)] = tensor
        parts = [torch.empty_like(padded) for _ in sizes]
        distributed.all_gather(parts, padded, group=self.device_group)
        gathered.append(torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)]))
    return gathered


def _reduce_scatterv(self: Any, tensor: torch.Tensor, dim: int, sizes: list[int]) -> torch.Tensor:
    """Adds the rows of all ranks; returns those of this rank."""
    assert dim == 0
    added = tensor.contiguous().clone()
    distributed.all_reduce(added, group=self.device_group)
    start = sum(sizes[: self.rank_in_group])
    return added[start : start + sizes[self.rank_in_group]]


CpuCommunicator.all_gatherv = _all_gatherv
CpuCommunicator.reduce_scatterv = _reduce_scatterv


class Extension:
    """Adds no method."""
