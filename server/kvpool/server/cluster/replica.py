"""Decides the role of one server of a shard, and which answers its primary may send. No I/O, no clock.

A driver gives a replica each event (`step`) and the time (`tick`), carries out what is ready (`ready`), and says when
that is done (`advance`), as with the `RawNode` of etcd's raft library.

A primary sends its records to the standbys, one position per record, and they acknowledge positions. An *in-sync*
member is one that the directory lists: it has acknowledged every record whose answer was sent.

I1. One primary per term. The term rises only by compare-and-swap.
I2. Only a member that is in sync at revision r takes over, by compare-and-swap at r.
I3. An output that depends on a position leaves only when every awaited member has acknowledged it in this term. Awaited
    are the in-sync members, those of a swap whose outcome is not known, and those that are about to be added.
I4. A standby acknowledges nothing from the moment it sends its takeover, until it reads that it lost and joins again.
I5. A member is removed by a swap that is known to have won. A member is added when it has acknowledged everything up to
    the moment from which it is awaited.
I6. A new primary has executed all that it acknowledged: a standby executes a record before it acknowledges it.
I7. What a call only reads is answered after a confirmation that was requested after the call arrived: `Gate`.

`transitions` has the table of every change of a role, and every swap. A swap with an unknown outcome is
sent again until its outcome is known (see `directory`).
"""

import asyncio
from typing import Final, Protocol

from kvpool.server.cluster import effects, events
from kvpool.server.cluster.directory import (
    DirectoryRegressedError,
    MemberId,
    Seen,
    SwapResult,
    VersionedRecord,
)
from kvpool.server.cluster.facts import Facts, Role
from kvpool.server.cluster.standbys import NOTHING, Standby
from kvpool.server.cluster.transitions import TRANSITIONS

STALL_SECONDS: Final = 10.0
"""Maximum silence of a primary before it sends records: it may write a snapshot of its own first."""
_EACH: Final = (Role.STARTING, Role.STANDBY, Role.CANDIDATE, Role.PRIMARY)
_STANDBY_EVENTS: Final = (
    events.Welcomed,
    events.PrimaryHeard,
    events.SnapshotLoaded,
    events.Executed,
    events.StateDiffers,
    events.StreamLost,
)
_PRIMARY_EVENTS: Final = (
    events.Appended,
    events.StandbyConnected,
    events.Acknowledged,
    events.StandbyLost,
    events.HandOver,
)
_ROLES: Final[dict[type[events.Event], tuple[Role, ...]]] = {
    **dict.fromkeys(_STANDBY_EVENTS, (Role.STANDBY,)),
    **dict.fromkeys(_PRIMARY_EVENTS, (Role.PRIMARY,)),
}
"""The roles in which an event means something, if not all."""


class Replica(Facts):
    """The role of one server in its shard; see `Facts` for its arguments and attributes."""

    def __repr__(self) -> str:
        return f"<Replica {self.me.member_id}: {self.role.value}, term {self.known_term}>"

    # The verbs

    def step(self, event: events.Event) -> None:
        """Handles an event. One that means nothing in this role is ignored.

        Raises:
            DirectoryRegressedError: The directory has lost what this server has seen, and this server is not the
                primary. Nothing was changed; a swap stays pending.
        """
        if self.role in _ROLES.get(type(event), _EACH) and self._learn(event):
            self._decide()

    def tick(self, now_seconds: float) -> None:
        """Looks for a silent primary, and for late and missing standbys. Call it regularly."""
        if self.role is Role.PRIMARY:
            self._look_for_late(now_seconds)
        elif self.role is Role.STANDBY and self.heard.seconds is not None:
            limit_seconds = self.config.takeover_seconds if self.heard.sends_records else STALL_SECONDS
            if now_seconds - self.heard.seconds > limit_seconds:
                self.effects.append(effects.ReportSilence())
                self.step(events.StreamLost())

    def ready(self) -> effects.Ready:
        """What to persist, to send and to answer now, in this order. Call `advance` when that is done."""
        return effects.Ready(self.seen, tuple(self.effects), self.confirmed)

    def advance(self) -> None:
        """Records that what was ready is done."""
        self.effects.clear()

    # Events

    def _learn(self, event: events.Event) -> bool:  # noqa: C901, PLR0912 - a case per event
        """Records an event. Returns whether a transition may follow."""
        is_due = False
        match event:
            case events.Acknowledged(member_id, position):
                is_due = self._acknowledge(member_id, position)
            case events.Appended(position):
                self.last_position = position
                if not self.awaited:
                    self._confirm()
            case events.StandbyConnected(member, resumes):
                self.standbys.connected[member.member_id] = Standby(member, has_state=resumes)
                is_due = True
            case events.StandbyLost(member_id):
                self.standbys.connected.pop(member_id, None)
                if member_id == self.successor and not self.record.member(member_id):
                    self.successor = None  # it has left before it was in sync
                is_due = True
            case events.HandOver(member_id, is_alone):
                self._hand_over(member_id, is_alone=is_alone)
                is_due = True
            case events.Executed(position):
                self.effects.append(effects.Acknowledge(position))
            case events.PrimaryHeard():
                self.heard = event
            case events.Welcomed():
                self.is_stream_lost = False
            case events.SnapshotLoaded():
                self.has_state = True
            case events.StateDiffers():
                self.has_state, is_due = False, True
            case events.StreamLost():
                self.is_stream_lost, self.has_read_since = True, False
                is_due = True
            case events.DirectoryRead(entry):
                is_due = self._read(entry)
            case events.SwapEnded(result):
                is_due = self._end_swap(result)
        return is_due

    def _read(self, entry: VersionedRecord) -> bool:
        if self.pending:
            self.newest = max(self.newest, entry, key=lambda each: each.revision)
            return False
        is_first = self.role is Role.STARTING
        is_newer = entry.revision > self.entry.revision
        self.has_read_since = True
        if is_newer or is_first:
            self._set_entry(entry)
        if is_first and entry.record and entry.record.primary == self.me.member_id:
            self.past_own_term = entry.record.term
        return is_newer or is_first or self.is_stream_lost

    def _end_swap(self, result: SwapResult | None) -> bool:
        pending = self.pending
        if pending is None:
            return False
        if result is None:
            self.effects.append(pending)
            return False
        is_passed = self.newest.revision > max(self.entry.revision, result.entry.revision)
        found = self.newest if is_passed else result.entry
        self._set_entry(found)
        self.pending, self.is_stream_lost = None, False  # I4: join again first
        self.has_won = found.record is not None and found.record.change_id == pending.record.change_id
        return True

    def _set_entry(self, entry: VersionedRecord) -> None:
        """Sets the newest entry. A primary that is not named any more is deposed anyway."""
        record = entry.record
        found = Seen(record.term, entry.revision) if record else Seen()
        is_claimed = self.role is Role.STARTING and self.config.claim_term > max(self.known_term, found.term)
        if found < self.seen and self.role is not Role.PRIMARY and not is_claimed:
            age = "an older record of " if found.term == self.known_term else ""
            held = f"{age}term {found.term}" if record else "no record of the shard"
            raise DirectoryRegressedError(
                f"the directory holds {held}, this server has seen term {self.known_term}; if the shard was not "
                "removed, no other server of the shard runs, and this one has the newest state: start it with "
                f"--claim-term {self.known_term + 1}"
            )
        self.entry = entry
        self.seen = max(self.seen, found)
        self.lacks_members = len(self.in_sync) < self.config.min_in_sync

    def _acknowledge(self, member_id: MemberId, position: int) -> bool:
        standby = self.standbys.connected.get(member_id)
        if standby is None:
            return False
        standby.acknowledged, standby.has_state = position, True
        self._confirm()
        if standby.is_close:
            return standby.joins_at is not None or member_id == self.successor
        is_needed = self.lacks_members or member_id in self.awaited
        standby.is_close = self.standbys.may_be_close(standby, self.last_position, is_needed=is_needed)
        if standby.is_close and self.lacks_members:
            self.standbys.late_seconds.pop(member_id, None)
        return standby.is_close

    def _confirm(self) -> None:
        """Updates the confirmed position (I3)."""
        if self.role is not Role.PRIMARY or self.lacks_members:
            self.confirmed = NOTHING
            return
        acknowledged = map(self.standbys.acknowledged, self.awaited)
        self.confirmed = min((self.last_position, *acknowledged))

    def _hand_over(self, member_id: MemberId | None, *, is_alone: bool) -> None:
        if member_id is None and self.successor and self.is_successor_alone:
            self.effects.append(effects.EndStandby(self.successor))  # it must not follow
        self.successor, self.is_successor_alone = member_id, is_alone
        if standby := self.standbys.connected.get(member_id) if member_id else None:
            standby.is_dismissed = False

    def _look_for_late(self, now_seconds: float) -> None:
        """Dismisses late standbys, and those of an earlier primary that do not connect to this one in time."""
        if self.primary_since_seconds is None:
            self.primary_since_seconds = now_seconds
        late = self.standbys.measure(now_seconds, self.awaited, self.last_position)
        self.effects += map(effects.ReportLate, late)
        connected = self.standbys.connected
        self.effects += [effects.EndStandby(each) for each in sorted(self.dismissed)]
        is_overdue = now_seconds - self.primary_since_seconds > self.config.standby_timeout_seconds
        if late or (is_overdue and self.awaited - connected.keys()):
            self._decide()

    @property
    def dismissed(self) -> list[MemberId]:
        """Dismissed standbys for which nothing waits: their connections can be ended."""
        connected = self.standbys.connected.items()
        return [each for each, standby in connected if standby.is_dismissed and each not in self.awaited]

    # Decisions

    def _decide(self) -> None:
        """Makes the first transition whose condition holds."""
        if self.role is Role.PRIMARY:
            self.standbys.await_joining({member.member_id for member in self.in_sync}, self.last_position)
        for transition in TRANSITIONS:
            if self.role in transition.roles and transition.condition(self):
                self.role = transition.becomes
                transition.action(self)
                break
        self.has_won = False
        self.awaited = frozenset(self._members_to_await())
        self._confirm()
        if self.role is Role.PRIMARY:
            self._send_snapshots()

    def _members_to_await(self) -> set[MemberId]:
        """The members that the directory lists, or soon may, and those that are about to be added (I3, I5)."""
        listed = (*self.in_sync, *(self.pending.record.in_sync if self.pending else ()))
        return ({member.member_id for member in listed} | self.standbys.joining) - {self.me.member_id}

    def _send_snapshots(self) -> None:
        """Has snapshots sent to standbys without a state; not to one that is in sync, or that a swap may make so.

        Its state may be the only one that is complete when this primary dies.
        """
        for member_id, standby in self.standbys.connected.items():
            if not standby.has_state and not standby.gets_snapshot and member_id not in self.awaited:
                standby.gets_snapshot = True
                self.effects.append(effects.SendSnapshot(member_id))


class Driver(Protocol):
    """What runs a replica, for the parts that report to it.

    Attributes:
        replica: The replica.
        changed: Set, and replaced, with each change of the role, of the entry, and of the connected standbys.
    """

    replica: Replica
    changed: asyncio.Event

    def step(self, event: events.Event) -> None:
        """Gives the replica an event, and carries out what is ready then.

        Raises:
            DirectoryRegressedError: See `Replica.step`.
        """
