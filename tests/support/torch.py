"""Devices that tensors are tested on, and tensors seen as bytes."""

import pytest
import torch

_NO_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")

on_each_device = pytest.mark.parametrize(
    "device", [torch.device("cpu"), pytest.param(torch.device("cuda:0"), marks=_NO_CUDA)], ids=str
)
"""Runs a test on CPU, and on the first GPU where there is one; where there is none, it is reported as skipped."""


def bytes_of(view: torch.Tensor) -> torch.Tensor:
    """A view's bytes, uint8 (*shape, size of an element): what is written to them is written to the view."""
    return view.unsqueeze(-1).view(torch.uint8)
