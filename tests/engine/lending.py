"""A lender whose pool is formed on a real service when an engine maps its memory."""

import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from kvpool.client import connect
from kvpool.core.ids import PoolName
from kvpool.core.specs.pool_config import PoolConfig
from kvpool.wire.pools import config_from_proto
from support.fake_lender import Answer, FakeLender
from support.logging_process import LoggingProcess
from support.processes import KVPOOL

AVAILABLE_BYTES = 2**30


class PoolLender(FakeLender):
    """A lender.

    Attributes:
        declared: What the first engine declared.
        changes: Fields of the configuration in which the pool differs from what is declared.
    """

    def __init__(self, folder: Path, address: str) -> None:
        """Listens in a folder, for engines on the service at an address."""
        self._service = address
        self._lock = threading.Lock()
        self.declared: Any = None
        self.changes: dict[str, Any] = {}
        super().__init__(folder, AVAILABLE_BYTES)

    @property
    def config(self) -> PoolConfig:
        """The configuration that the first engine declared."""
        return config_from_proto(self.declared.config)

    def _usual_answer(self, kind: str, request: Any) -> Answer:
        if kind == "map":
            with self._lock:
                self._form(request.declared)
        return super()._usual_answer(kind, request)

    def _form(self, declared: Any) -> None:
        if self.declared is None:
            self.declared = declared
            os.truncate(self.memory, declared.size_bytes)
            self.offer.available_bytes = declared.size_bytes
            self.offer.is_lent = True
        assert self.declared == declared
        values = {name: getattr(self.config, name) for name in PoolConfig.__dataclass_fields__}
        with connect(self._service) as client:
            self.epoch = client.create_pool(PoolConfig(**{**values, **self.changes})).epoch

    def settings(self, pool: str) -> dict[str, Any]:
        """What an engine is given to run on the lent memory."""
        return attached_to(self._service, pool, self.address, reserve_tokens=0)  # blocks in vLLM's order


def attached_to(service: str, pool: str, memory: str, **settings: object) -> dict[str, Any]:
    """What an engine is given to run on memory that is lent at an address. vLLM's plugin chooses the classes.

    The weights that `tiny_engine` draws are in no file, so that their version is stated. `settings` are more of kvpool.
    """
    given = {"address": service, "pool": PoolName(pool), "memory": memory, "weights_version": "drawn", **settings}
    return {"additional_config": {"kvpool": given}}


def start_lender(
    service: str, pool: str, memory: str, rank: int = 0, world_size: int = 1, *flags: str
) -> LoggingProcess:
    """Starts a `kvpool worker` that lends the memory of a rank at an address; returns when it does."""
    options = ("--pool", pool, "--rank", str(rank), "--world-size", str(world_size), "--device", "cpu")
    memory = memory.replace("{rank}", str(rank))
    lender = LoggingProcess(
        KVPOOL, "worker", "--server", service, *options, "--memory", "1GiB", "--lend", memory, *flags
    )
    lender.wait_for("lending")
    return lender


@contextmanager
def lenders(service: str, pool: str, memory: str, world_size: int = 1) -> Iterator[None]:
    """Runs the lender of each rank; fails if one does not stop cleanly."""
    with ExitStack() as stack:
        for rank in range(world_size):
            stack.callback(_stop, start_lender(service, pool, memory, rank, world_size))
        yield


def _stop(lender: LoggingProcess) -> None:
    assert lender.stop() == 0, lender.log
