"""The log of a rank: what an operator wants to read, each thing once."""

import logging
from typing import Final

from kvpool.gpu_worker.settings import WorkerSettings
from kvpool.gpu_worker.units import format_bytes
from kvpool.gpu_worker.words import Heard, Initialized, Planned, Ready, Registered, Status
from kvpool.server.core.errors import KvpoolError
from kvpool.server.core.world import PoolState

_TOLD_RANKS: Final = 8

_log = logging.getLogger("kvpool.worker")


class WorkerLog:
    """Writes what happens to one rank."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._rank = f"rank {settings.rank} of {settings.world_size}"
        self._trouble = ""
        self._pool: tuple[PoolState, tuple[int, ...]] | None = None

    def heard(self, message: Heard) -> None:
        """Says what is new in a message."""
        match message:
            case Registered():
                level = logging.DEBUG if self._trouble else logging.INFO
                where = self._settings.pool, self._settings.server
                _log.log(level, "%s registered with pool %s at %s", self._rank, *where)
            case Planned():
                _log.info("%s: epoch %d is planned", self._rank, message.epoch)
            case Status():
                self._status(message)
            case _:
                pass

    def _status(self, status: Status) -> None:
        if self._trouble and status.heartbeat_sequence:  # registering alone is no sign that it goes well
            self._trouble = ""
            _log.info("%s is back at %s", self._rank, self._settings.server)
        if self._pool != (status.state, status.absent_ranks):
            self._pool = status.state, status.absent_ranks
            level = logging.WARNING if status.state is PoolState.DEGRADED else logging.INFO
            absent = told_ranks(status.absent_ranks)
            _log.log(level, "%s: the pool is %s%s", self._rank, status.state.value, absent)

    def allocating(self, planned: Planned) -> None:
        """Says what is asked of the device."""
        tensors = planned.config.tensors
        size_bytes = sum(tensor.size_bytes for tensor in tensors)
        _log.info(
            "%s allocates %s blocks for epoch %d: %s in %d buffers",
            *(self._rank, f"{planned.config.num_blocks:,}", planned.epoch, format_bytes(size_bytes), len(tensors)),
        )

    def initialized(self, word: Initialized) -> None:
        """Says what there is for an epoch."""
        got, planned = word.allocation.num_blocks, word.allocation.config.num_blocks
        if got < planned:
            _log.warning("%s backed off: its memory holds %s of %s blocks", self._rank, f"{got:,}", f"{planned:,}")
        _log.info("%s holds %s blocks for epoch %d", self._rank, f"{got:,}", word.epoch)

    def ready(self, ready: Ready) -> None:
        """Says that an epoch began."""
        _log.info("%s is ready: %s blocks, epoch %d", self._rank, f"{ready.num_blocks:,}", ready.epoch)

    def passed(self, epoch: int) -> None:
        """Says that an epoch is over."""
        _log.warning("%s: epoch %d has passed", self._rank, epoch)

    def joins_later(self, error: KvpoolError, pause_seconds: float) -> None:
        """Says a trouble, once however often it comes in a row."""
        if error.reason != self._trouble:
            _log.warning("%s: %s: %s; keeps trying to join", self._rank, error.reason, error)
        self._trouble = error.reason
        _log.debug("%s: %s: %s; joins again in %.1f s", self._rank, error.reason, error, pause_seconds)

    def left(self) -> None:
        """Says that the rank goes as it was told to."""
        _log.info("%s leaves pool %s", self._rank, self._settings.pool)

    def crashed(self, error: BaseException) -> None:
        """Writes an error that is nobody's refusal, with its trace."""
        _log.error("%s cannot go on", self._rank, exc_info=error)


def told_ranks(absent_ranks: tuple[int, ...]) -> str:
    """The ranks that are not there, as the end of a sentence."""
    if not absent_ranks:
        return ""
    more = ", ..." if len(absent_ranks) > _TOLD_RANKS else ""
    return f", absent ranks: {', '.join(map(str, absent_ranks[:_TOLD_RANKS]))}{more}"
