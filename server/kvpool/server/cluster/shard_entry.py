"""The entry of one shard in the directory: its reads, swaps and changes, for a replica."""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Final

from kvpool.server.cluster.directory import DamagedRecordError, Directory, DirectoryError, Entry, ShardName
from kvpool.server.cluster.replica import Effect, ReadDirectory, Replica, SendSwap, WentBackError

_RETRY_SECONDS: Final = 0.2
_ALERT_SECONDS: Final = 30.0
"""Interval at which a directory that cannot be used is logged again."""

_log = logging.getLogger("kvpool.server.cluster")


class ShardEntry:
    """Calls the directory until it answers, and tells a replica what it says.

    Args:
        directory: The directory.
        shard: The shard.
        name: `CLUSTER/SHARD`, for the log.
        replica: The replica.
        carry_out: Carries out what the replica decides.

    Attributes:
        error: Why the directory cannot be used; empty while it can.
    """

    def __init__(
        self,
        directory: Directory,
        shard: ShardName,
        name: str,
        replica: Replica,
        carry_out: Callable[[list[Effect]], None],
    ) -> None:
        self.error = ""
        self._directory = directory
        self._shard = shard
        self._name = name
        self._replica = replica
        self._carry_out = carry_out
        self._alerted_seconds = float("-inf")

    async def swap(self, swap: SendSwap) -> None:
        """Sends a swap once. The replica decides whether it is sent again."""
        try:
            outcome = await self._directory.compare_and_swap(self._shard, swap.revision, swap.record)
        except (DirectoryError, DamagedRecordError) as error:
            self.failed(error)
            await asyncio.sleep(_RETRY_SECONDS)
            self._carry_out(self._replica.swap_ended(None))
            return
        self._works()
        try:
            effects = self._replica.swap_ended(outcome)
        except WentBackError as error:
            self.failed(error)
            await asyncio.sleep(_RETRY_SECONDS)
            effects = self._replica.swap_ended(None)
        self._carry_out(effects)

    async def read(self) -> None:
        """Reads the entry once."""
        try:
            entry = await self._directory.get(self._shard)
        except (DirectoryError, DamagedRecordError) as error:
            self.failed(error)
            await asyncio.sleep(_RETRY_SECONDS)
            self._carry_out([ReadDirectory()])
            return
        self._take(entry)

    async def watch(self) -> None:
        """Takes each change of the entry, indefinitely."""
        while True:
            try:
                async for entry in self._directory.watch(self._shard):
                    self._take(entry)
            except (DirectoryError, DamagedRecordError) as error:
                self.failed(error)
            await asyncio.sleep(_RETRY_SECONDS)

    def failed(self, error: Exception) -> None:
        """Notes, and logs from time to time, that the directory cannot be used."""
        self.error = str(error)
        now_seconds = time.monotonic()
        if now_seconds - self._alerted_seconds >= _ALERT_SECONDS:
            self._alerted_seconds = now_seconds
            _log.error("directory cannot be used", extra={"shard": self._name, "error": str(error)})

    def _take(self, entry: Entry) -> None:
        try:
            effects = self._replica.directory_read(entry)
        except WentBackError as error:
            self.failed(error)
            return
        self._works()
        self._carry_out(effects)

    def _works(self) -> None:
        if self.error:
            _log.warning("directory works again", extra={"shard": self._name})
        self.error, self._alerted_seconds = "", float("-inf")
