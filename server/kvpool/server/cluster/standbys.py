"""Counts the standbys of a primary, and dismisses late ones.

A standby is late while a record waits for its acknowledgement for more than a quarter of `standby_timeout_seconds`,
whatever else it sends. Time in which it is late adds up, and a quarter of the other time is subtracted. A standby with
too much is dismissed, even if it is the last one, and joins again when nothing of it is left.
"""

import logging
from typing import Final

from kvpool.server.cluster.config import ClusterConfig
from kvpool.server.cluster.replica import Effect, Replica
from kvpool.server.cluster.shipper import Shipper

_GRACE: Final = 0.25
"""Share of `standby_timeout_seconds` for which a record may wait before the standby is late."""
_REPAID: Final = 0.25
"""Share of the time without waits that is subtracted."""
_MAX_INTERVAL_SECONDS: Final = 0.2
"""Maximum time that counts between two looks: a primary that was paused does not know how long its standbys took."""

_log = logging.getLogger("kvpool.server.cluster")


class Standbys:
    """The standbys of a primary.

    Args:
        config: The settings.
        replica: Knows who is in sync.
        shipper: Knows who is connected.
    """

    def __init__(self, config: ClusterConfig, replica: Replica, shipper: Shipper) -> None:
        self._wanted = config.wanted_standbys
        self._timeout_seconds = config.standby_timeout_seconds
        self._replica = replica
        self._shipper = shipper
        self._looked_seconds = 0.0

    @property
    def num_missing(self) -> int:
        """Number of standbys that the shard lacks, those that are not in sync included."""
        return max(self._wanted - (len(self._replica.in_sync) - 1), 0)

    def dismiss_late(self, now_seconds: float) -> list[Effect]:
        """Dismisses the standbys for which answers have waited too long. Call it regularly.

        Ends the connections of those that are dismissed.
        """
        links, late, awaited = self._shipper.links, self._shipper.late_seconds, self._replica.awaited
        for member_id in self._replica.dismissed & links.keys():
            links[member_id].abort()
        interval_seconds = min(now_seconds - self._looked_seconds, _MAX_INTERVAL_SECONDS)
        self._looked_seconds = now_seconds
        grace_seconds = _GRACE * self._timeout_seconds
        limit_seconds = self._timeout_seconds - grace_seconds
        effects: list[Effect] = []
        for member_id in sorted(links.keys() & (awaited | late.keys())):
            before_seconds = late.get(member_id, 0.0)
            is_late = links[member_id].lag_seconds(now_seconds) > grace_seconds
            change_seconds = interval_seconds if is_late else -_REPAID * interval_seconds
            late[member_id] = min(before_seconds + change_seconds, limit_seconds)
            if late[member_id] <= 0:
                del late[member_id]
            elif late[member_id] == limit_seconds and member_id in awaited:
                if before_seconds < limit_seconds:
                    _log.warning("standby late", extra={"member": member_id, "seconds": self._timeout_seconds})
                effects += self._replica.dismiss(member_id)
        return effects
