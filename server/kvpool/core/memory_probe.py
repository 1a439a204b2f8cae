"""The memory that changes may use, so that a lack of it refuses a change before anything is changed.

1. A change first reserves the bytes that it may need, from a quantum. When that is used up, the process must be able
   to map the next quantum, these bytes and a reserve beyond. The mapping is removed at once, untouched: this costs
   microseconds.
2. The reserve is what a change that cannot be refused may need, such as the end of a session or a table of the prefix
   map that grows, and what other code of the process needs. gRPC's code ends the process if memory is short.
3. Memory that was freed but not returned to the system cannot be mapped. A small change may use it: the process must be
   able to make objects of that size, and then to map half the reserve.
4. With a maximum, a mapping counts as impossible if the resident memory of the process would exceed the maximum with
   it. So a change is refused before a container reaches its limit: the kernel refuses it no mapping, and kills it.
"""

from collections.abc import Sized
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, PAGESIZE, mmap
from pathlib import Path
from typing import Final

QUANTUM_BYTES: Final = 2**20
RESERVE_BYTES: Final = 2**26
TABLE_BYTES: Final = 128
"""Part of the reserve per cached block: tables of the prefix map grow by a copy to twice their size."""
_OBJECT_BYTES: Final = 448
"""Size of an object that lies in an arena of small objects, as nearly all objects of a pool do."""
_STATM: Final = Path("/proc/self/statm")


class MemoryProbe:
    """The memory of the process that was seen to be available.

    A mapping is tried, not an allocation: freed memory that the heap keeps would satisfy a large allocation, but not
    the next arena of objects.

    Attributes:
        max_bytes: Maximum of the process's resident memory; 0: no maximum. A server sets it when it begins to serve:
            records of a journal or of a primary are executed without it, as they were accepted before.
    """

    __slots__ = ("_left_bytes", "max_bytes")

    def __init__(self) -> None:
        self._left_bytes = 0
        self.max_bytes = 0

    def reserve(self, num_bytes: int, cached: Sized = ()) -> None:
        """Reserves bytes for a change.

        Args:
            num_bytes: The most that the change needs.
            cached: The cached blocks of the pool that it changes.

        Raises:
            MemoryError: The process cannot get these bytes and keep the reserve.
        """
        self._left_bytes -= num_bytes
        if self._left_bytes >= 0:
            return
        self._left_bytes = 0
        kept_bytes = reserve_bytes(len(cached))
        if self._can_map(num_bytes + QUANTUM_BYTES + kept_bytes):
            self._left_bytes = QUANTUM_BYTES
            return
        if num_bytes > QUANTUM_BYTES:
            raise MemoryError
        held = [bytes(_OBJECT_BYTES) for _ in range(num_bytes // _OBJECT_BYTES + 1)]
        if not (held and self._can_map(kept_bytes // 2)):
            raise MemoryError

    def _can_map(self, num_bytes: int) -> bool:
        if self.max_bytes and resident_bytes() + num_bytes > self.max_bytes:
            return False
        try:
            mmap(-1, num_bytes, MAP_PRIVATE | MAP_ANONYMOUS).close()
        except OSError:
            return False
        return True


def reserve_bytes(num_cached_blocks: int) -> int:
    """Returns the reserve that a change of a pool with this number of cached blocks leaves free."""
    return RESERVE_BYTES + num_cached_blocks * TABLE_BYTES


def resident_bytes() -> int:
    """Returns the memory of the process that is resident."""
    return int(_STATM.read_bytes().split()[1]) * PAGESIZE


process_memory: Final = MemoryProbe()
"""The probe of this process."""
