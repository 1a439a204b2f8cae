"""Memory of a step: scratch memory of kernels, and arrays that the host writes and the device reads."""

from collections.abc import Sequence

import torch

from kvpool.core.errors import InvalidArgumentError, WrongStateError


class Workspace:
    """A scratch buffer that all builders of a device share. It only grows; the largest request sets its size.

    Kernels of one stream run one after the other, so they may use the same bytes. Contents do not survive a kernel.
    """

    def __init__(self, device: torch.device) -> None:
        self._buffer = torch.zeros(0, dtype=torch.uint8, device=device)
        self._locked = False

    @property
    def device(self) -> torch.device:
        """Device of the buffer."""
        return self._buffer.device

    @property
    def size_bytes(self) -> int:
        """Size of the buffer."""
        return self._buffer.numel()

    def get(self, size_bytes: int) -> torch.Tensor:
        """Returns scratch memory, growing the buffer if needed.

        Args:
            size_bytes: Size, at least 0.

        Returns:
            uint8 (size_bytes,). Results of earlier calls stay valid, even if a larger buffer replaces theirs.

        Raises:
            InvalidArgumentError: `size_bytes` is negative.
            WrongStateError: The buffer is too small and locked.
        """
        if size_bytes < 0:
            raise InvalidArgumentError("size_bytes", f"{size_bytes} is negative")
        if size_bytes > self.size_bytes:
            if self._locked:
                raise WrongStateError(
                    "WORKSPACE_LOCKED", f"{size_bytes} bytes of workspace requested, locked at {self.size_bytes}"
                )
            self._buffer = torch.zeros(size_bytes, dtype=torch.uint8, device=self.device)
        return self._buffer[:size_bytes]

    def lock(self) -> None:
        """Stops the buffer from growing, because captured graphs hold its address."""
        self._locked = True


class StagedArray:
    """An array on the host and its copy on the device. The host memory is pinned if the device is a GPU.

    Copies are asynchronous, so the host must `wait` before it writes again. Each array has its own event: a step that
    fills several arrays waits only for the copies of the previous step, not for its own.

    Attributes:
        host: numpy view; writing it does not change the device.
        device: Tensor of the same shape. Its address is stable, so captured graphs may read it.
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, fill: int = 0) -> None:
        self._pinned = torch.full(tuple(shape), fill, dtype=dtype, pin_memory=device.type == "cuda")
        self.host = self._pinned.numpy()
        self.device = torch.full(tuple(shape), fill, dtype=dtype, device=device)
        self._copied = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Blocks until the device has read the last copy, including earlier work on its stream."""
        if self._copied is not None:
            self._copied.synchronize()

    def copy(self, start: int, stop: int) -> torch.Tensor:
        """Starts the copy of host[start:stop] on the current stream; returns that part of the device tensor."""
        part = self.device[start:stop]
        part.copy_(self._pinned[start:stop], non_blocking=True)
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self.device.device))
        return part
