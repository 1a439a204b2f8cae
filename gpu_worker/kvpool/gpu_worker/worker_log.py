"""The log of a rank: what an operator wants to read, each thing once. docs/reference/logs.md lists the events."""

import logging
from typing import Final

from kvpool.core.errors import KvpoolError
from kvpool.core.ranks.messages import PoolState
from kvpool.gpu_worker.settings import WorkerSettings
from kvpool.gpu_worker.words import Allocation, Heard, Planned, Ready, Registered, Status

_TOLD_RANKS: Final = 16

_log = logging.getLogger("kvpool.worker")


class WorkerLog:
    """Writes what happens to one rank."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._who: dict[str, object] = {"pool": settings.pool, "rank": settings.rank}
        self._server = settings.server
        self._trouble = ""
        self._epoch = 0
        self._pool: tuple[PoolState, tuple[int, ...]] | None = None

    def heard(self, message: Heard) -> None:
        """Says what is new in a message."""
        match message:
            case Registered():
                level = logging.DEBUG if self._trouble else logging.INFO
                _log.log(level, "rank registered", extra={**self._who, "server": self._server})
            case Ready():
                self._pool_ready(message.epoch)
            case Status():
                self._status(message)
            case _:
                pass

    def _pool_ready(self, epoch: int) -> None:
        if self._pool and self._pool[0] is PoolState.DEGRADED and epoch == self._epoch:
            _log.info("pool resumed", extra={**self._who, "epoch": epoch})
        self._pool, self._epoch = (PoolState.READY, ()), epoch

    def _status(self, status: Status) -> None:
        if self._trouble and status.heartbeat_sequence:  # registering alone is no sign that it goes well
            self._trouble = ""
            _log.info("server back", extra={**self._who, "server": self._server})
        now = status.state, status.absent_ranks
        if now == self._pool or status.state is PoolState.READY:  # who is ready is told by Ready
            return
        self._pool = now
        fields = {**self._who, "epoch": status.epoch, "absent_ranks": list(status.absent_ranks[:_TOLD_RANKS])}
        if not status.absent_ranks:  # all are there, and allocate
            return
        if status.state is PoolState.FORMING:
            _log.info("pool forming", extra=fields)
        elif status.state is PoolState.DEGRADED:
            _log.warning("pool degraded", extra=fields)

    def allocating(self, planned: Planned) -> None:
        """Says what is asked of the device."""
        tensors = planned.config.tensors
        _log.info(
            "rank allocating",
            extra={
                **self._who,
                "epoch": planned.epoch,
                "blocks": planned.config.num_blocks,
                "buffers": len(tensors),
                "bytes": sum(tensor.size_bytes for tensor in tensors),
            },
        )

    def allocated(self, epoch: int, got: Allocation) -> None:
        """Says what the device had."""
        fields = {**self._who, "epoch": epoch, "blocks": got.num_blocks, "bytes": got.allocated_bytes}
        if got.num_blocks < got.config.num_blocks:
            _log.warning("rank allocated less than planned", extra={**fields, "planned_blocks": got.config.num_blocks})
        else:
            _log.debug("rank allocated", extra=fields)

    def ready(self, ready: Ready, allocated_bytes: int, device: str) -> None:
        """Says that an epoch began."""
        fields = {**self._who, "epoch": ready.epoch, "blocks": ready.num_blocks}
        _log.info("rank ready", extra={**fields, "bytes": allocated_bytes, "device": device})

    def passed(self, epoch: int) -> None:
        """Says that an epoch is over."""
        _log.warning("epoch passed", extra={**self._who, "epoch": epoch})

    def joins_later(self, error: KvpoolError, pause_seconds: float) -> None:
        """Says a trouble, once however often it comes in a row."""
        level = logging.DEBUG if error.reason == self._trouble else logging.WARNING
        self._trouble = error.reason
        fields = {**self._who, "server": self._server, "reason": error.reason, "error": str(error)}
        _log.log(level, "stream ended, joining again", extra={**fields, "seconds": round(pause_seconds, 3)})

    def left(self) -> None:
        """Says that the rank went as it was told to."""
        _log.info("rank left", extra=self._who)

    def failed(self, error: Exception) -> None:
        """Says why the rank ends; of what is nobody's refusal, with its trace."""
        if isinstance(error, KvpoolError):
            _log.error("rank failed", extra={**self._who, "reason": error.reason, "error": str(error)})
        else:
            _log.error("rank failed", extra=self._who, exc_info=error)
