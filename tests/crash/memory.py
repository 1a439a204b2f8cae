"""Files shared by processes: one represents the memory of a pool's blocks, one counts the progress."""

import fcntl
import hashlib
import mmap
import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from kvpool.client import Request

CELL_BYTES: Final = 33
_SLOTS: Final = 64


class Cells:
    """Contents of the blocks: one cell at the beginning of each block, with the content written last."""

    def __init__(self, buffer: "mmap.mmap | memoryview", block_bytes: int = CELL_BYTES) -> None:
        self._buffer = buffer
        self._block_bytes = block_bytes

    def read(self, block_id: int) -> bytes:
        """Reads the content of a block."""
        start = block_id * self._block_bytes
        return bytes(self._buffer[start : start + CELL_BYTES])

    def write(self, block_id: int, content: bytes) -> None:
        """Writes the content of a block."""
        start = block_id * self._block_bytes
        self._buffer[start : start + CELL_BYTES] = content


class Memory(Cells):
    """The cells in a file.

    Each incarnation of a pool (none_hash and epoch) has its own file, since ranks allocate new tensors per epoch.
    """

    def __init__(self, folder: Path, incarnation: str, num_blocks: int) -> None:
        super().__init__(_shared(folder / f"memory-{incarnation}", num_blocks * CELL_BYTES))


def content(request: Request, group: int, end_tokens: int, hash_block_size: int, *, full: bool) -> bytes:
    """Content of a group's block after the tokens up to `end_tokens` are computed. For a full block, its hash."""
    if full:
        return bytes([group]) + request.hashes[end_tokens // hash_block_size - 1][-32:]
    return bytes([group]) + _digest(request.token_ids[:end_tokens])


def _digest(token_ids: Sequence[int]) -> bytes:
    return hashlib.blake2b(struct.pack(f"<{len(token_ids)}I", *token_ids), digest_size=32).digest()


class Progress:
    """Number of answered steps per scheduler."""

    def __init__(self, folder: Path) -> None:
        self._map = _shared(folder / "progress", _SLOTS * 8)

    def count(self, slot: int) -> None:
        """Counts a step."""
        struct.pack_into("<Q", self._map, slot * 8, self.of(slot) + 1)

    def of(self, slot: int) -> int:
        """Number of answered steps of a scheduler."""
        return int(struct.unpack_from("<Q", self._map, slot * 8)[0])


class StepLock:
    """Lock that a scheduler holds during a step, and the killer while it stops the scheduler: GPU steps run on."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @contextmanager
    def held(self) -> Iterator[None]:
        """Waits for the lock and holds it."""
        file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)  # kept open, a long run would use all descriptors
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
        finally:
            os.close(file)


def _shared(path: Path, size_bytes: int) -> mmap.mmap:
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.ftruncate(file, size_bytes)
        return mmap.mmap(file, size_bytes)
    finally:
        os.close(file)
