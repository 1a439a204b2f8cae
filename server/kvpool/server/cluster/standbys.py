"""Counts the standbys of a primary, admits spares while it lacks some, and dismisses surplus and late ones.

1. A spare is admitted while fewer standbys than wanted are in sync, connected or promised. Others are always admitted.
2. A spare is dismissed when the wanted number is in sync without it, for `adopt_seconds`. So a standby that is in sync
   always remains, and one that returns only for a moment costs nothing.
3. A member that is in sync, or may become so by a swap, is never refused: its state may be needed.
4. A standby is late while a record waits for its acknowledgement for more than a quarter of `standby_timeout_seconds`,
   whatever else it sends. Time in which it is late adds up, and a quarter of the other time is subtracted. A standby
   with too much is dismissed, even if it is the last one, and joins again when nothing of it is left.
"""

import logging
from typing import Final

from kvpool.core.errors import ExhaustedError
from kvpool.server.cluster.config import ClusterConfig
from kvpool.server.cluster.directory import MemberId
from kvpool.server.cluster.messages import ENOUGH_STANDBYS, Hello
from kvpool.server.cluster.replica import Effect, Replica
from kvpool.server.cluster.shipper import Shipper

PROMISE_SECONDS: Final = 10.0
"""Time in which a spare that was answered WELCOME connects. Its process starts again before."""
_GRACE: Final = 0.25
"""Share of `standby_timeout_seconds` for which a record may wait before the standby is late."""
_REPAID: Final = 0.25
"""Share of the time without waits that is subtracted."""
_MAX_INTERVAL_SECONDS: Final = 0.2
"""Maximum time that counts between two looks: a primary that was paused does not know how long its standbys took."""

_log = logging.getLogger("kvpool.server.cluster")


class Standbys:
    """Counts the standbys of a primary.

    Args:
        config: The settings.
        replica: Knows who is in sync.
        shipper: Knows who is connected.
        me: The primary.
    """

    def __init__(self, config: ClusterConfig, replica: Replica, shipper: Shipper, me: MemberId) -> None:
        self._wanted = config.wanted_standbys
        self._adopt_seconds = config.adopt_seconds
        self._replica = replica
        self._shipper = shipper
        self._me = me
        self._promised: dict[MemberId, float] = {}  # until when
        self._surplus_since_seconds: float | None = None
        self._timeout_seconds = config.standby_timeout_seconds
        self._looked_seconds = 0.0

    @property
    def num_missing(self) -> int:
        """Number of standbys that the shard lacks, those that are not in sync included."""
        return max(self._wanted - len(self._in_sync), 0)

    @property
    def _in_sync(self) -> set[MemberId]:
        return {member.member_id for member in self._replica.in_sync} - {self._me}

    def check_spare(self, hello: Hello, now_seconds: float) -> None:
        """Checks that there is a place for a spare, and keeps it for one that asks.

        Raises:
            ExhaustedError: There is none.
        """
        member_id = hello.member.member_id
        promised = {each: due for each, due in self._promised.items() if due > now_seconds and each != member_id}
        others = self._replica.awaited | self._shipper.links.keys() | promised.keys()
        if member_id not in self._replica.awaited and len(others - {member_id}) >= self._wanted:
            raise ExhaustedError(ENOUGH_STANDBYS, f"the shard has {self._wanted} standbys, as many as it should have")
        self._promised = {**promised, member_id: now_seconds + PROMISE_SECONDS} if hello.asks else promised

    def dismiss_surplus(self, now_seconds: float) -> list[Effect]:
        """Ends the connections of dismissed spares, and dismisses one that the shard has had too many for a while."""
        links, in_sync = self._shipper.links, self._in_sync
        for member_id in self._replica.dismissed & links.keys():
            links[member_id].abort()
        surplus = [each for each, link in links.items() if link.is_spare and len(in_sync - {each}) >= self._wanted]
        if not surplus:
            self._surplus_since_seconds = None
            return []
        since_seconds = self._surplus_since_seconds
        if since_seconds is None:
            self._surplus_since_seconds = since_seconds = now_seconds
        return self._replica.dismiss(surplus[-1]) if now_seconds - since_seconds >= self._adopt_seconds else []

    def dismiss_late(self, now_seconds: float) -> list[Effect]:
        """Dismisses the standbys for which answers have waited too long (rule 4). Call it regularly."""
        interval_seconds = min(now_seconds - self._looked_seconds, _MAX_INTERVAL_SECONDS)
        self._looked_seconds = now_seconds
        grace_seconds = _GRACE * self._timeout_seconds
        limit_seconds = self._timeout_seconds - grace_seconds
        late, awaited = self._shipper.late_seconds, self._replica.awaited
        effects: list[Effect] = []
        for member_id in sorted(self._shipper.links.keys() & (awaited | late.keys())):
            before_seconds = late.get(member_id, 0.0)
            is_late = self._shipper.links[member_id].lag_seconds(now_seconds) > grace_seconds
            change_seconds = interval_seconds if is_late else -_REPAID * interval_seconds
            late[member_id] = min(before_seconds + change_seconds, limit_seconds)
            if late[member_id] <= 0:
                del late[member_id]
            elif late[member_id] == limit_seconds and member_id in awaited:
                if before_seconds < limit_seconds:
                    _log.warning("standby late", extra={"member": member_id, "seconds": self._timeout_seconds})
                effects += self._replica.dismiss_late(member_id)
        return effects
