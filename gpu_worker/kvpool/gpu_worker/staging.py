"""Arrays that the host writes each step and the device reads."""

from collections.abc import Sequence

import torch


class StagedArray:
    """An array on the host, in pinned memory where the device is a GPU, and the device's copy of it.

    Copies return before they are done, so the host must `wait` before it writes again. An array has its own wait: a
    step that fills several does not wait for its own copies, only for those of the step before.

    Attributes:
        host: numpy view; writing it changes nothing on the device.
        device: Tensor of the same shape. It keeps its address, so that captured graphs may read it.
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, fill: int = 0) -> None:
        self._pinned = torch.full(tuple(shape), fill, dtype=dtype, pin_memory=device.type == "cuda")
        self.host = self._pinned.numpy()
        self.device = torch.full(tuple(shape), fill, dtype=dtype, device=device)
        self._copied = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Blocks until the device has read the last copy; what its stream had to do before that is waited for too."""
        if self._copied is not None:
            self._copied.synchronize()

    def copy(self, start: int, stop: int) -> torch.Tensor:
        """Issues the copy of host[start:stop] on the current stream; returns that part of the device's tensor."""
        part = self.device[start:stop]
        part.copy_(self._pinned[start:stop], non_blocking=True)
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self.device.device))
        return part
