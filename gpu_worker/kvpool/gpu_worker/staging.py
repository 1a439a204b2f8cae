"""Arrays that the host writes each step and the device reads.

1. The host may write an array only once the device has read the last copy out of it: `Fence.wait` before writing,
   `Fence.record` after copying. Copies from pinned memory return before they are done.
2. Device tensors keep their addresses, so that captured graphs may read them.
"""

from collections.abc import Sequence

import torch


class Fence:
    """Says when the device has read what was copied from pinned memory. Costs nothing on CPU, where copies block."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def record(self) -> None:
        """Marks the copies issued so far, on the device's current stream."""
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(self._device))

    def wait(self) -> None:
        """Blocks until the copies marked last are done. Work that was queued before them is waited for too."""
        if self._event is not None:
            self._event.synchronize()


class StagedArray:
    """An array on the host, in pinned memory where the device is a GPU, and the device's copy of it.

    Attributes:
        host: numpy view; writing it changes nothing on the device.
        device: Tensor of the same shape.
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, fill: int = 0) -> None:
        self._pinned = torch.full(tuple(shape), fill, dtype=dtype, pin_memory=device.type == "cuda")
        self.host = self._pinned.numpy()
        self.device = torch.full(tuple(shape), fill, dtype=dtype, device=device)

    def copy(self, start: int, stop: int) -> torch.Tensor:
        """Issues the copy of host[start:stop]; returns that part of the device's tensor."""
        part = self.device[start:stop]
        part.copy_(self._pinned[start:stop], non_blocking=True)
        return part
