"""Execution of a scheduler's steps in memory that a real `kvpool worker --lend` lends, in the scheduler's own process.

The fence of the lender alone decides which steps run; the lease is not checked. The process may be stopped in the
middle of a step, and then writes when it continues. Before some steps it sleeps: it unmaps the memory for a moment.
"""

import hashlib
import random
import time
from pathlib import Path
from typing import Final

from crash.execution import Outcome, Task, compute
from crash.memory import Cells
from crash.scheduler import LENT_POOL
from kvpool.client import AbortedError, KvpoolError
from kvpool.core.ids import PoolName, TableLease
from kvpool.core.ranks.messages import DeclaredMemory
from kvpool.core.specs.kinds import FullAttentionSpec
from kvpool.core.specs.pool_config import HashScheme, KVCacheGroup, PoolConfig
from kvpool.lending.lender_client import connect_lender

NUM_BLOCKS: Final = 64
_SPEC: Final = FullAttentionSpec(4, 1, 16, "float32")
BLOCK_BYTES: Final = _SPEC.page_size_bytes
_SLEEPS: Final = 0.05
"""Fraction of the steps before which the process sleeps."""
_NONE_HASH: Final = hashlib.sha256(b"crash").digest()


def declared(max_model_len: int) -> DeclaredMemory:
    """What the schedulers declare."""
    groups = (KVCacheGroup(_SPEC, ("layer",)),)
    config = PoolConfig(
        PoolName(LENT_POOL), NUM_BLOCKS, max_model_len, groups, hash_scheme=HashScheme(none_hash=_NONE_HASH)
    )
    return DeclaredMemory(config, NUM_BLOCKS * BLOCK_BYTES)


class OnLentMemory:
    """Runs steps on blocks of a mapped buffer; see `Executor`.

    Attributes:
        lease: Lease of the session; set before the first step.
    """

    lease: TableLease

    def __init__(self, address: str, name: str, max_model_len: int) -> None:
        """Maps the memory.

        Raises:
            KvpoolError: The lender is away, or the pool does not open in time.
        """
        self._draw = random.Random(name)  # noqa: S311 - reproducible
        self._lender = connect_lender(address, LENT_POOL, client_name=name, timeout_seconds=2.0)
        try:
            self._memory = self._lender.map(declared(max_model_len), 10.0)
        except KvpoolError:
            self._lender.close()
            raise
        buffer = memoryview(self._memory.buffer.numpy()).cast("B")  # type: ignore[arg-type] # numpy before 2.1
        self._cells = Cells(buffer, BLOCK_BYTES)

    def run(self, tasks: list[Task], seconds: float) -> Outcome:
        """See `Executor`."""
        try:
            if self._draw.random() < _SLEEPS:
                self._memory.unmap()
                time.sleep(seconds)
            self._memory.map_again()  # also if that failed before
            with self._memory.step(self.lease):
                time.sleep(seconds)
                return compute(self._cells, tasks)
        except AbortedError as error:
            return Outcome(error.reason)
        except KvpoolError:
            return Outcome("AWAY")

    def close(self) -> None:
        """Gives the memory back."""
        self._lender.close()


def cells_at_rest(folder: Path) -> Cells:
    """The cells in the newest memory of a lender's folder."""
    newest = max(folder.rglob("memory-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    return Cells(memoryview(newest.read_bytes()), BLOCK_BYTES)
