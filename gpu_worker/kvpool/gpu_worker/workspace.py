"""Scratch memory of kernels: one a device, whoever needs the most decides its size."""

import torch

from kvpool.core.errors import InvalidArgumentError, WrongStateError


class Workspace:
    """A buffer that all builders of a device share, and that only grows.

    Kernels of one stream run one after the other, so they may use the same bytes; what they leave there is nobody's.
    """

    def __init__(self, device: torch.device) -> None:
        self._buffer = torch.zeros(0, dtype=torch.uint8, device=device)
        self._locked = False

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self._buffer.device

    @property
    def size_bytes(self) -> int:
        """Its size."""
        return self._buffer.numel()

    def get(self, size_bytes: int) -> torch.Tensor:
        """At least this much scratch memory.

        Args:
            size_bytes: At least 0.

        Returns:
            uint8 (size_bytes,). What an earlier call returned stays valid, though a larger buffer may take its place.

        Raises:
            InvalidArgumentError: `size_bytes` is negative.
            WrongStateError: It would have to grow, and is locked.
        """
        if size_bytes < 0:
            raise InvalidArgumentError("size_bytes", f"{size_bytes} is negative")
        if size_bytes > self.size_bytes:
            if self._locked:
                raise WrongStateError(
                    "WORKSPACE_LOCKED", f"{size_bytes} bytes of workspace asked for, locked at {self.size_bytes}"
                )
            self._buffer = torch.zeros(size_bytes, dtype=torch.uint8, device=self.device)
        return self._buffer[:size_bytes]

    def lock(self) -> None:
        """Lets it grow no more: captured graphs hold its address."""
        self._locked = True
