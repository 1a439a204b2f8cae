"""Makes a standby the primary while this server can still help: for an operator, or before it stops.

Servers of different versions may execute a record with different results, so a standby of another version does not
follow. It loads the state while no turn is given, then takes over. Meanwhile it executes only records of what takes no
turn, such as the end of a lease. Another result than the primary's ends the hand-over.

*Version* means `core_fingerprint`: releases of kvpool with the same one follow each other.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Final

from kvpool.server.cluster import events
from kvpool.server.cluster.facts import Role
from kvpool.server.cluster.replica import Driver
from kvpool.server.cluster.standby_check import StandbyCheck

_SECONDS: Final = 5.0
_COPY_SECONDS: Final = 30.0
"""Maximum time in which a standby of another version loads the state, while no turn is given."""

_log = logging.getLogger("kvpool.server.cluster")


class HandOvers:
    """The hand-overs of one primary, one at a time.

    Args:
        driver: Runs the replica.
        check: The standbys that it accepts.
        shard: Name of the shard.
    """

    def __init__(self, driver: Driver, check: StandbyCheck, shard: str) -> None:
        self._driver = driver
        self._check = check
        self._shard = shard
        self._lock = asyncio.Lock()

    async def run(self, hold: Callable[[], None], resume: Callable[[], None]) -> bool:
        """Makes an in-sync standby the primary; if there is none, one of another version, which gets the state first.

        A call waits until an earlier one has ended.

        Args:
            hold: Begins no further turn.
            resume: Undoes it.

        Returns:
            Whether this server was the primary, and is deposed now.
        """
        async with self._lock:
            replica, waiting = self._driver.replica, self._check.waiting
            connected = [member for member in replica.in_sync if member.member_id in replica.standbys.connected]
            candidates = [*connected, *waiting]
            if replica.role is not Role.PRIMARY or not candidates:
                return False
            successor = candidates[0].member_id
            copies = candidates[0] in waiting
            _log.info("handing over", extra={"shard": self._shard, "member": successor})
            hold()
            try:
                self._driver.step(events.HandOver(successor, is_alone=copies))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_COPY_SECONDS if copies else _SECONDS):
                        while replica.role is Role.PRIMARY and replica.successor:
                            await self._driver.changed.wait()
            finally:  # also if the caller has gone
                if replica.role is Role.PRIMARY:
                    _log.warning("not handed over", extra={"shard": self._shard})
                    self._driver.step(events.HandOver(None))
                    resume()
            return replica.role is not Role.PRIMARY
