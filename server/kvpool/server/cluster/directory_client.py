"""Calls the directory for one shard until it answers, and reports the answers to a replica."""

import asyncio
import logging
import time
from typing import Final

from kvpool.server.cluster import effects, events
from kvpool.server.cluster.directory import DamagedRecordError, Directory, DirectoryError
from kvpool.server.cluster.replica import Driver
from kvpool.wire.backoff import Backoff

_ALERT_SECONDS: Final = 30.0
"""Interval at which a directory that cannot be used is logged again."""

_log = logging.getLogger("kvpool.server.cluster")


class DirectoryClient:
    """The calls for the entry of a shard: its reads, swaps and changes.

    Args:
        driver: Runs the replica.
        directory: The directory.
        name: Name of the shard.

    Attributes:
        error: Why the directory cannot be used; empty while it can.
    """

    def __init__(self, driver: Driver, directory: Directory, name: str) -> None:
        self.error = ""
        self._driver = driver
        self._directory = directory
        self._name = name
        self._alerted_seconds = float("-inf")
        self._backoff = Backoff(0.1, 0.2)

    async def swap(self, swap: effects.SendSwap) -> None:
        """Sends a swap once. The replica has it sent again while its outcome is unknown."""
        try:
            result = await self._directory.compare_and_swap(swap.revision, swap.record)
            self._driver.step(events.SwapEnded(result))
        except (DirectoryError, DamagedRecordError) as error:
            self._failed(error)
            await asyncio.sleep(self._backoff.next())
            self._driver.step(events.SwapEnded(None))
        else:
            self._works()

    async def read(self) -> None:
        """Reads the entry, and tries again until it can be read."""
        while True:
            try:
                entry = await self._directory.get()
            except (DirectoryError, DamagedRecordError) as error:
                self._failed(error)
            else:
                self._read(events.DirectoryRead(entry))
                return
            await asyncio.sleep(self._backoff.next())

    async def watch(self) -> None:
        """Reads each change of the entry, indefinitely."""
        while True:
            try:
                async for entry in self._directory.watch():
                    self._read(events.DirectoryRead(entry))
            except (DirectoryError, DamagedRecordError) as error:
                self._failed(error)
            await asyncio.sleep(self._backoff.next())

    def _read(self, message: events.DirectoryRead) -> None:
        try:
            self._driver.step(message)
        except DirectoryError as error:  # it regressed: a later entry may be newer again
            self._failed(error)
        else:
            self._works()

    def _failed(self, error: Exception) -> None:
        """Records, and logs from time to time, that the directory cannot be used."""
        self.error = str(error)
        now_seconds = time.monotonic()
        if now_seconds - self._alerted_seconds >= _ALERT_SECONDS:
            self._alerted_seconds = now_seconds
            _log.error("directory cannot be used", extra={"shard": self._name, "error": str(error)})

    def _works(self) -> None:
        if self.error:
            _log.warning("directory works again", extra={"shard": self._name})
        self.error, self._alerted_seconds = "", float("-inf")
        self._backoff.reset()
