"""Makes a standby the primary while this server can still help: for an operator, or before it stops.

Servers of different versions may execute a record with different results, so a standby of another version never
follows. It loads the state while no turn is given, and takes over from exactly this state.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from kvpool.server.cluster.admission import Admission
from kvpool.server.cluster.directory import MemberId
from kvpool.server.cluster.replica import Effect, Replica, Role
from kvpool.server.cluster.shipper import Shipper

_SECONDS: Final = 5.0
_COPY_SECONDS: Final = 30.0
"""Maximum time in which a standby of another version loads the state, while no turn is given."""

_log = logging.getLogger("kvpool.server.cluster")


class HandOvers:
    """The hand-overs of one primary, one at a time.

    Args:
        shard: `CLUSTER/SHARD`.
        replica: The role.
        shipper: The connected standbys.
        admission: The standbys that it accepts.
        carry_out: Carries out what the replica decides.
        wait_changed: Waits for the next change of the role, of the entry or of the connected standbys.
    """

    def __init__(  # noqa: PLR0913 - the parts that it connects
        self,
        shard: str,
        replica: Replica,
        shipper: Shipper,
        admission: Admission,
        *,
        carry_out: Callable[[list[Effect]], None],
        wait_changed: Callable[[], Awaitable[object]],
    ) -> None:
        self._shard = shard
        self._replica = replica
        self._shipper = shipper
        self._admission = admission
        self._carry_out = carry_out
        self._wait_changed = wait_changed
        self._lock = asyncio.Lock()

    async def run(self, hold: Callable[[], None], resume: Callable[[], None], to: str = "") -> bool:
        """Makes an in-sync standby the primary; if there is none, one of another version, which gets the state first.

        A call waits until an earlier one has ended.

        Args:
            hold: Begins no further turn.
            resume: Undoes it.
            to: Address of the standby for clients; empty for any standby.

        Returns:
            Whether this server was the primary, and is deposed now.
        """
        async with self._lock:
            return await self._run(hold, resume, to)

    async def _run(self, hold: Callable[[], None], resume: Callable[[], None], to: str) -> bool:
        links = self._shipper.links
        connected = [member for member in self._replica.in_sync if member.member_id in links]
        waiting = self._admission.waiting
        candidates = [member for member in (*connected, *waiting) if not to or to in member.addresses]
        if self._replica.role is not Role.PRIMARY or not candidates:
            return False
        successor = candidates[0].member_id
        copies = candidates[0] in waiting
        _log.info("handing over", extra={"shard": self._shard, "member": successor})
        hold()
        try:
            self._admission.copies_to = successor if copies else None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_COPY_SECONDS if copies else _SECONDS):
                    await self._hand_over(successor, copies=copies)
        finally:  # also if the caller has gone
            self._admission.copies_to = None
            if self._replica.role is Role.PRIMARY:
                _log.warning("not handed over", extra={"shard": self._shard})
                self._carry_out(self._replica.hand_over(None))
                if copies and successor in links:
                    links[successor].abort()
                resume()
        return self._replica.role is not Role.PRIMARY

    async def _hand_over(self, successor: MemberId, *, copies: bool) -> None:
        """Waits until the standby is the primary, or has left before it was in sync."""
        was_connected = False
        while self._replica.role is Role.PRIMARY and not self._is_in_sync(successor):
            is_connected = successor in self._shipper.links
            if was_connected and not is_connected:
                return
            was_connected = is_connected
            await self._wait_changed()
        self._carry_out(self._replica.hand_over(successor, is_alone=copies))
        while self._replica.role is Role.PRIMARY:
            await self._wait_changed()

    def _is_in_sync(self, member_id: MemberId) -> bool:
        return any(member.member_id == member_id for member in self._replica.in_sync)
