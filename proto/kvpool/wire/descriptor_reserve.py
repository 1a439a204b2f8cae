"""File descriptors that are kept for work that must succeed when clients have taken all others."""

import contextlib
import os
import weakref
from collections.abc import Iterator


class DescriptorReserve:
    """Descriptors that are held until their owner opens files. Used by one thread at a time.

    Args:
        num_files: Number of descriptors. Others may take one while it is free, so reserve more than are needed.
    """

    def __init__(self, num_files: int) -> None:
        self._num_files = num_files
        self._held: list[int] = []
        self._finalizer = weakref.finalize(self, _close_all, self._held)
        self.fill()

    @contextlib.contextmanager
    def released(self) -> Iterator[None]:
        """Frees the descriptors while files are opened in the block."""
        _close_all(self._held)
        try:
            yield
        finally:
            self.fill()

    def fill(self) -> None:
        """Takes the descriptors that are not held, as far as there are free ones."""
        with contextlib.suppress(OSError):
            while len(self._held) < self._num_files:
                self._held.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))

    def close(self) -> None:
        """Frees the descriptors for good. The end of the object does so, too."""
        self._finalizer()


def _close_all(descriptors: list[int]) -> None:
    while descriptors:
        os.close(descriptors.pop())
