"""The standbys that are connected to a primary: what they have acknowledged, and which are late. No I/O, no clock.

A standby is late while a record or a mark waits for its acknowledgement for more than a quarter of
`standby_timeout_seconds`, whatever else it sends, and also if no answer waits. Time in which it is late adds up, and a
quarter of the other time is subtracted. A standby with too much is dismissed, even if it is the last one, and joins
again when nothing of it is left.
"""

from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Final

from kvpool.server.cluster.directory import Member, MemberId

NOTHING: Final = -1
"""A position before all others."""
_CLOSE_LAG: Final = 256
"""Positions by which a standby may be behind when the primary begins to wait for it."""
_GRACE: Final = 0.25
"""Share of `standby_timeout_seconds` for which a position may wait before the standby is late."""
_REPAID: Final = 0.25
"""Share of the time without waits that is subtracted."""
_MAX_INTERVAL_SECONDS: Final = 0.2
"""Maximum time that counts between two looks: a primary that was paused does not know how long its standbys took."""


@dataclass(slots=True)
class Standby:
    """A connected standby.

    Attributes:
        member: The standby.
        has_state: Whether it resumes, or has loaded a snapshot.
        gets_snapshot: Whether it is being sent a snapshot.
        acknowledged: Last position that it has acknowledged in this connection.
        is_close: Whether it has nearly caught up, so that answers may wait for it.
        joins_at: Position with which it is in sync, if answers wait for it although it is not yet; None otherwise.
        is_dismissed: Whether it is not to be in sync.
        due_position: A position that it had not acknowledged at `due_seconds`.
        due_seconds: See `due_position`.
    """

    member: Member
    has_state: bool
    gets_snapshot: bool = False
    acknowledged: int = NOTHING
    is_close: bool = False
    joins_at: int | None = None
    is_dismissed: bool = False
    due_position: int = NOTHING
    due_seconds: float = 0.0

    def lag_seconds(self, now_seconds: float) -> float:
        """How long a position has waited for its acknowledgement; 0 if none waits."""
        return now_seconds - self.due_seconds if self.acknowledged < self.due_position else 0.0


class Standbys:
    """The standbys of one primary.

    Args:
        timeout_seconds: Time for which positions wait for a standby, at once or in parts.

    Attributes:
        connected: The connected standbys.
        late_seconds: By member, for how long it was late; without those that are on time. It outlives connections.
    """

    def __init__(self, timeout_seconds: float) -> None:
        self.connected: dict[MemberId, Standby] = {}
        self.late_seconds: dict[MemberId, float] = {}
        self._timeout_seconds = timeout_seconds
        self._looked_seconds = 0.0

    def may_be_close(self, standby: Standby, last_position: int, *, is_needed: bool) -> bool:
        """Whether a standby has nearly caught up. One that was late must keep up first.

        Args:
            standby: The standby.
            last_position: The newest position.
            is_needed: Whether nothing is answered without this standby, so that its delays do not matter.
        """
        is_near = last_position - standby.acknowledged <= _CLOSE_LAG
        return is_near and (is_needed or standby.member.member_id not in self.late_seconds)

    def await_joining(self, in_sync: AbstractSet[MemberId], last_position: int) -> None:
        """Awaits each standby from now on that is close, and not in sync."""
        for member_id, standby in self.connected.items():
            if not standby.is_close or standby.is_dismissed or member_id in in_sync:
                standby.joins_at = None
            elif standby.joins_at is None:
                standby.joins_at = last_position

    @property
    def joining(self) -> set[MemberId]:
        """The standbys that are awaited although they are not in sync."""
        return {member_id for member_id, standby in self.connected.items() if standby.joins_at is not None}

    @property
    def joined(self) -> list[Member]:
        """The joining standbys that have caught up."""
        found = self.connected.values()
        return [each.member for each in found if each.joins_at is not None and each.acknowledged >= each.joins_at]

    def stays(self, member_id: MemberId) -> bool:
        """Whether an in-sync member stays one."""
        standby = self.connected.get(member_id)
        return standby is not None and standby.has_state and not standby.is_dismissed

    def acknowledged(self, member_id: MemberId) -> int:
        """The last position that a standby has acknowledged."""
        standby = self.connected.get(member_id)
        return standby.acknowledged if standby else NOTHING

    def measure(self, now_seconds: float, awaited: AbstractSet[MemberId], last_position: int) -> list[MemberId]:
        """Adds up delays, and dismisses standbys that were late for too long. Call it regularly.

        Returns:
            The standbys that are dismissed now.
        """
        interval_seconds = min(now_seconds - self._looked_seconds, _MAX_INTERVAL_SECONDS)
        self._looked_seconds = now_seconds
        grace_seconds = _GRACE * self._timeout_seconds
        limit_seconds = self._timeout_seconds - grace_seconds
        dismissed = []
        for member_id, standby in sorted(self.connected.items()):
            if standby.acknowledged >= standby.due_position:
                standby.due_position, standby.due_seconds = last_position, now_seconds
            if member_id not in awaited and member_id not in self.late_seconds:
                continue
            is_late = standby.lag_seconds(now_seconds) > grace_seconds
            change_seconds = interval_seconds if is_late else -_REPAID * interval_seconds
            late_seconds = min(self.late_seconds.pop(member_id, 0.0) + change_seconds, limit_seconds)
            if late_seconds > 0:
                self.late_seconds[member_id] = late_seconds
            if late_seconds == limit_seconds and member_id in awaited and not standby.is_dismissed:
                standby.is_dismissed = True
                dismissed.append(member_id)
        return dismissed
