"""Files that processes share: one stands for the memory that a pool's blocks name, one tells of progress."""

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


class Memory:
    """What the blocks hold: a cell a block, in which stands what was computed there last.

    Each incarnation of a pool, by none_hash and epoch, has a file of its own, as ranks that are planned anew allocate
    anew.
    """

    def __init__(self, folder: Path, incarnation: str, num_blocks: int) -> None:
        self._map = _shared(folder / f"memory-{incarnation}", num_blocks * CELL_BYTES)

    def read(self, block_id: int) -> bytes:
        """What stands in a block."""
        return self._map[block_id * CELL_BYTES : (block_id + 1) * CELL_BYTES]

    def write(self, block_id: int, content: bytes) -> None:
        """Computes a block."""
        self._map[block_id * CELL_BYTES : (block_id + 1) * CELL_BYTES] = content


def content(request: Request, group: int, end_tokens: int, hash_block_size: int, *, full: bool) -> bytes:
    """What a block of the group holds once its tokens up to `end_tokens` are computed: of a full one its hash."""
    if full:
        return bytes([group]) + request.hashes[end_tokens // hash_block_size - 1][-32:]
    return bytes([group]) + _digest(request.token_ids[:end_tokens])


def _digest(token_ids: Sequence[int]) -> bytes:
    return hashlib.blake2b(struct.pack(f"<{len(token_ids)}I", *token_ids), digest_size=32).digest()


class Progress:
    """How many steps each scheduler was answered."""

    def __init__(self, folder: Path) -> None:
        self._map = _shared(folder / "progress", _SLOTS * 8)

    def count(self, slot: int) -> None:
        """Counts a step."""
        struct.pack_into("<Q", self._map, slot * 8, self.of(slot) + 1)

    def of(self, slot: int) -> int:
        """Steps of a scheduler."""
        return int(struct.unpack_from("<Q", self._map, slot * 8)[0])


class StepLock:
    """Held by a scheduler while a step of it runs, and by who stops it: a GPU's step does not stop with its process."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Waits for the lock and holds it."""
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)


def _shared(path: Path, size_bytes: int) -> mmap.mmap:
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.ftruncate(file, size_bytes)
        return mmap.mmap(file, size_bytes)
    finally:
        os.close(file)
