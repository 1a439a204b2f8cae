"""The log of a rank, one record per event. The built site lists the events."""

import logging
from typing import Final

from kvpool.core.errors import KvpoolError
from kvpool.core.ranks.messages import Planned, PoolState, PoolStatus, Ready, Registered, ServerMessage
from kvpool.gpu_worker.rank_effects import Allocation
from kvpool.gpu_worker.settings import WorkerSettings

_MAX_LISTED_RANKS: Final = 16

_log = logging.getLogger("kvpool.worker")


class WorkerLog:
    """Logs the events of one rank.

    Attributes:
        server: Address of the server of the current stream.
    """

    def __init__(self, settings: WorkerSettings) -> None:
        self._rank_fields: dict[str, object] = {"pool": settings.pool, "rank": settings.rank}
        self.server = settings.server
        self._last_reason = ""
        self._epoch = 0
        self._pool: tuple[PoolState, tuple[int, ...]] | None = None

    def received(self, message: ServerMessage) -> None:
        """Logs the changes that a message reports."""
        match message:
            case Registered():
                level = logging.DEBUG if self._last_reason else logging.INFO
                _log.log(level, "rank registered", extra={**self._rank_fields, "server": self.server})
            case Ready():
                self._pool_ready(message.epoch)
            case PoolStatus():
                self._status(message)
            case _:
                pass

    def _pool_ready(self, epoch: int) -> None:
        if self._pool and self._pool[0] is PoolState.DEGRADED and epoch == self._epoch:
            _log.info("pool resumed", extra={**self._rank_fields, "epoch": epoch})
        self._pool, self._epoch = (PoolState.READY, ()), epoch

    def _status(self, status: PoolStatus) -> None:
        if self._last_reason and status.heartbeat_sequence:  # a registration alone does not show that the server works
            self._last_reason = ""
            _log.info("server back", extra={**self._rank_fields, "server": self.server})
        now = status.state, status.absent_ranks
        if now == self._pool or status.state is PoolState.READY:  # a Ready message reports that
            return
        self._pool = now
        absent_ranks = list(status.absent_ranks[:_MAX_LISTED_RANKS])
        fields = {**self._rank_fields, "epoch": status.epoch, "absent_ranks": absent_ranks}
        if not status.absent_ranks:  # all ranks are present and allocate
            return
        if status.state is PoolState.FORMING:
            _log.info("pool forming", extra=fields)
        elif status.state is PoolState.DEGRADED:
            _log.warning("pool degraded", extra=fields)

    def allocating(self, planned: Planned) -> None:
        """Logs the planned allocation."""
        tensors = planned.config.tensors
        size_bytes = sum(tensor.size_bytes for tensor in tensors)
        fields = {**self._rank_fields, "epoch": planned.epoch, "blocks": planned.config.num_blocks}
        _log.info("rank allocating", extra={**fields, "buffers": len(tensors), "bytes": size_bytes})

    def allocated(self, epoch: int, allocation: Allocation) -> None:
        """Logs the size of an allocation."""
        size_bytes, planned_blocks = allocation.allocated_bytes, allocation.config.num_blocks
        fields = {**self._rank_fields, "epoch": epoch, "blocks": allocation.num_blocks, "bytes": size_bytes}
        if allocation.num_blocks < planned_blocks:
            _log.warning("rank allocated less than planned", extra={**fields, "planned_blocks": planned_blocks})
        else:
            _log.debug("rank allocated", extra=fields)

    def ready(self, ready: Ready, allocated_bytes: int, device: str) -> None:
        """Logs the start of an epoch."""
        fields = {**self._rank_fields, "epoch": ready.epoch, "blocks": ready.num_blocks}
        _log.info("rank ready", extra={**fields, "bytes": allocated_bytes, "device": device})

    def passed(self, epoch: int) -> None:
        """Logs the end of an epoch."""
        _log.warning("epoch passed", extra={**self._rank_fields, "epoch": epoch})

    def joins_later(self, error: KvpoolError, pause_seconds: float) -> None:
        """Logs the end of a stream; a repeated reason at debug level."""
        level = logging.DEBUG if error.reason == self._last_reason else logging.WARNING
        self._last_reason = error.reason
        fields = {**self._rank_fields, "server": self.server, "reason": error.reason, "error": str(error)}
        _log.log(level, "stream ended, joining again", extra={**fields, "seconds": round(pause_seconds, 3)})

    def left(self) -> None:
        """Logs that the rank has left on request."""
        _log.info("rank left", extra=self._rank_fields)

    def failed(self, error: Exception) -> None:
        """Logs the error that ended the rank, with a traceback unless it is a `KvpoolError`."""
        if isinstance(error, KvpoolError):
            _log.error("rank failed", extra={**self._rank_fields, "reason": error.reason, "error": str(error)})
        else:
            _log.error("rank failed", extra=self._rank_fields, exc_info=error)
