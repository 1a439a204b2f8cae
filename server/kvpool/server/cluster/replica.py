"""Decides the role of one server of a shard, and which answers its primary may send. No I/O, no clock.

A primary sends its records to the followers, one position per record, and they acknowledge positions. An *in-sync*
member is one that the directory lists: it has acknowledged every record whose answer was sent.

I1. One primary per term. The term rises only by compare-and-swap.
I2. Only a member that is in sync at revision r takes over, by compare-and-swap at r.
I3. An output that depends on a position leaves only when every awaited member has acknowledged it in this term. Awaited
    are the in-sync members, those of a swap whose outcome is not known, and those that are about to be added.
I4. A standby acknowledges nothing from the moment it sends its takeover, until it reads that it lost and joins again.
I5. A member is removed by a swap that is known to have won. A member is added when it has acknowledged everything up to
    the moment from which it is awaited.
I6. A new primary has executed all that it acknowledged: a follower executes a record before it acknowledges it.
I7. What a call only reads is answered after a confirmation that was requested after the call arrived: `Gate`.

The caller carries out the returned effects, and reports what comes of them. A swap with an unknown outcome is sent
again until its outcome is known (see `directory`).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

from kvpool.server.cluster.directory import Entry, Member, MemberId, ShardRecord, Swap

NOTHING: Final = -1
"""A position before all others."""


class Role(Enum):
    """What a server does for its shard.

    A `CANDIDATE` has sent a swap that may make it the primary, or remove it. A `DEPOSED` server answers nothing more.
    """

    STARTING = "starting"
    STANDBY = "standby"
    CANDIDATE = "candidate"
    PRIMARY = "primary"
    DEPOSED = "deposed"


@dataclass(frozen=True, slots=True)
class SendSwap:
    """Send a compare-and-swap; report its outcome with `Replica.swap_ended`."""

    revision: int
    record: ShardRecord


@dataclass(frozen=True, slots=True)
class ReadDirectory:
    """Read the entry; report it with `Replica.directory_read`."""


@dataclass(frozen=True, slots=True)
class Follow:
    """Follow this primary, unless it is followed already. Report `followed`, `snapshot_loaded` and `stream_lost`."""

    term: int
    primary: Member


@dataclass(frozen=True, slots=True)
class BecomePrimary:
    """Serve as the primary.

    Attributes:
        term: The term.
        is_state_lost: Whether the state of the shard's last primary is lost, which all sessions must learn.
    """

    term: int
    is_state_lost: bool


@dataclass(frozen=True, slots=True)
class BeDeposed:
    """Answer nothing more, because the directory does not name this server as the primary any more.

    Attributes:
        record: The record that names it; None if the shard was removed.
    """

    record: ShardRecord | None


Effect = SendSwap | ReadDirectory | Follow | BecomePrimary | BeDeposed


class WentBackError(Exception):
    """The directory holds an older record than this server has seen: it was restored from a backup, or is another."""


class Replica:
    """The role of one server in its shard.

    Args:
        me: This server.
        has_state: Whether this server has the state that belongs to its member id; not if its journal was dropped.
        known_term: Highest term that this member has seen before it started; 0 for none.
        claimed_term: Term that an operator tells this server to begin, whatever the directory holds; has no effect once
            a server has seen it. 0 for none.
        min_in_sync: Number of in-sync members, itself included, below which a primary confirms nothing.
        new_id: Returns a random id for a change of the record.

    Attributes:
        role: The role.
        entry: The newest known entry.
        known_term: Highest term that was seen.
        has_state: Whether this server has the state of a member. A follower has it from its first snapshot on.
        num_lost_states: How often this server became the primary without the state of the last primary.
    """

    def __init__(  # noqa: PLR0913 - what a server knows when it starts
        self,
        me: Member,
        *,
        has_state: bool,
        known_term: int,
        new_id: Callable[[], str],
        claimed_term: int = 0,
        min_in_sync: int = 1,
    ) -> None:
        self.role = Role.STARTING
        self.entry = Entry(0, None)
        self.known_term = known_term
        self.has_state = has_state
        self.num_lost_states = 0
        self._me = me
        self._claimed_term = claimed_term
        self._min_in_sync = min_in_sync
        self._new_id = new_id
        self._pending: SendSwap | None = None
        self._newest = self.entry  # of those that were read or watched while a swap was pending
        self._is_primary_suspected = False
        self._past_own_term = 0  # of this member before it started
        self._term = 0  # as the primary
        self._last_position = NOTHING
        self._followers: dict[MemberId, Member] = {}  # whose stream is open
        self._without_state: set[MemberId] = set()  # followers that need a snapshot
        self._acknowledged: dict[MemberId, int] = {}  # by followers, in their stream
        self._joining: dict[MemberId, int] = {}  # position from which a follower is awaited that is not in sync
        self._successor: MemberId | None = None
        self._is_successor_alone = False
        self._dismissed: set[MemberId] = set()  # followers that are not to be in sync

    def __repr__(self) -> str:
        return f"<Replica {self._me.member_id}: {self.role.value}, term {self.known_term}>"

    # The directory

    def directory_read(self, entry: Entry) -> list[Effect]:
        """Takes an entry that was read or watched. Older ones are ignored.

        Raises:
            WentBackError: The directory has lost what this server has seen, and this server is not the primary. Nothing
                was changed.
        """
        if self.role is Role.DEPOSED:
            return []
        if self._pending:
            if entry.revision > self._newest.revision:
                self._newest = entry
            return []
        is_first = self.role is Role.STARTING
        if entry.revision <= self.entry.revision and not is_first:
            return self._decide() if self._is_primary_suspected else []
        if is_first and self._claimed_term > max(self.known_term, entry.record.term if entry.record else 0):
            self.entry, self.known_term = entry, self._claimed_term - 1
            return self._claim(self._claimed_term)
        self._check_went_back(entry)
        self.entry = entry
        if is_first and entry.record and entry.record.primary == self._me.member_id:
            self._past_own_term = entry.record.term
        if self.role is Role.PRIMARY:
            return self._changed_as_primary()
        return self._decide()

    def swap_ended(self, swap: Swap | None) -> list[Effect]:
        """Takes the outcome of the swap that was sent; None if it is unknown.

        Raises:
            WentBackError: The directory has lost what this server has seen, and this server is not the primary. The
                swap stays pending.
        """
        pending = self._pending
        if pending is None or self.role is Role.DEPOSED:
            return []
        if swap is None:
            return [pending]
        is_passed = self._newest.revision > max(self.entry.revision, swap.entry.revision)
        found = self._newest if is_passed else swap.entry
        is_own = found.record is not None and found.record.change_id == pending.record.change_id
        self._check_went_back(found)
        self.entry, self._pending = found, None
        if self.role is Role.PRIMARY:
            return self._changed_as_primary()
        if is_own and pending.record.primary == self._me.member_id:
            return self._become_primary()
        self.role = Role.STANDBY
        self._is_primary_suspected = False  # I4: join again first
        return self._decide()

    def _check_went_back(self, entry: Entry) -> None:
        """Notes the term. A primary that is not named any more ends, so it need not know why."""
        term = entry.record.term if entry.record else 0
        if term < self.known_term and self.role is not Role.PRIMARY:
            found = f"term {term}" if entry.record else "no record of the shard"
            raise WentBackError(
                f"the directory holds {found}, this server has seen term {self.known_term}; if the shard was not "
                "removed, no other server of the shard runs, and this one has the newest state: start it with "
                f"--claim-term {self.known_term + 1}"
            )
        self.known_term = max(self.known_term, term)

    def _decide(self) -> list[Effect]:
        """Decides what a server that is not the primary does next."""
        record, me = self.entry.record, self._me.member_id
        if record is None:
            return self._claim(1)
        if record.member(me) and not self.has_state:
            return self._withdraw(record)
        if record.primary == me:
            if record.term == self._past_own_term:
                return self._claim(record.term + 1)
            return self._become_primary()  # another server handed over
        self.role = Role.STANDBY
        if self._is_primary_suspected and record.member(me):
            return self._claim(record.term + 1)
        return [Follow(record.term, record.primary_member)]

    def _withdraw(self, record: ShardRecord) -> list[Effect]:
        """Leaves the in-sync members, as the state is lost. Another member takes over; the last one starts empty."""
        others = tuple(member for member in record.in_sync if member.member_id != self._me.member_id)
        if not others:
            return self._claim(record.term + 1)
        if record.primary != self._me.member_id:
            return self._swap(replace(record, in_sync=others))
        return self._swap(replace(record, in_sync=others, term=record.term + 1, primary=others[0].member_id))

    def _claim(self, term: int) -> list[Effect]:
        return self._swap(ShardRecord(term, self._me.member_id, (self._me,), ""))

    def _swap(self, record: ShardRecord) -> list[Effect]:
        if self.role is not Role.PRIMARY:
            self.role = Role.CANDIDATE
        revision = self.entry.revision if self.entry.record else 0
        self._pending = SendSwap(revision, replace(record, change_id=self._new_id()))
        return [self._pending]

    def _become_primary(self) -> list[Effect]:
        self.role = Role.PRIMARY
        self._term = self.known_term
        self._is_primary_suspected = False
        is_state_lost, self.has_state = not self.has_state and self.known_term > 1, True
        self.num_lost_states += is_state_lost
        return [BecomePrimary(self.known_term, is_state_lost)]

    # The standby

    @property
    def may_acknowledge(self) -> bool:
        """Whether a follower may acknowledge what it has executed."""
        return self.role is Role.STANDBY

    def followed(self) -> None:
        """Notes that the primary accepted this follower."""
        self._is_primary_suspected = False

    def snapshot_loaded(self) -> None:
        """Notes that this follower has the primary's state."""
        self.has_state = True

    def state_lost(self) -> list[Effect]:
        """Notes that this follower's state differs from the primary's. It stops being in sync, and joins again."""
        self.has_state = False
        return self._decide() if self.role is Role.STANDBY and self.entry.record else []

    def stream_lost(self) -> list[Effect]:
        """Takes over from a primary whose stream ended, or is silent, if this member is in sync; else follows again."""
        if self.role is not Role.STANDBY:
            return []
        self._is_primary_suspected = True
        record = self.entry.record
        if record and record.member(self._me.member_id):
            return self._decide()
        return [ReadDirectory()]  # it may have been added since

    # The primary

    @property
    def in_sync(self) -> tuple[Member, ...]:
        """The in-sync members, as far as it is known."""
        return self.entry.record.in_sync if self.entry.record else ()

    @property
    def awaited(self) -> set[MemberId]:
        """The members that must acknowledge a position before it is confirmed (I3); without this one."""
        awaited = {member.member_id for member in self.in_sync} | self._joining.keys()
        if self._pending:
            awaited |= {member.member_id for member in self._pending.record.in_sync}
        return awaited - {self._me.member_id}

    @property
    def confirmed(self) -> int:
        """The highest position whose outputs may leave."""
        if self.role is not Role.PRIMARY or self.lacks_members:
            return NOTHING
        return min((self._acknowledged.get(member, NOTHING) for member in self.awaited), default=self._last_position)

    @property
    def last_position(self) -> int:
        """The position of the newest record or mark."""
        return self._last_position

    def appended(self, position: int) -> None:
        """Notes a new position, which is being sent to the followers."""
        self._last_position = position

    def may_load_snapshot(self, member_id: MemberId) -> bool:
        """Whether a follower may replace its state: not while it is in sync, or a swap may make it so.

        Its state may be the only one that is complete when this primary dies.
        """
        return member_id not in self.awaited

    def follower_connected(self, member: Member, *, resumes: bool) -> list[Effect]:
        """Takes a follower whose stream was accepted. One that does not resume stops being in sync first."""
        member_id = member.member_id
        self._followers[member_id] = member
        self._acknowledged.pop(member_id, None)
        self._joining.pop(member_id, None)
        self._dismissed.discard(member_id)
        if resumes:
            self._without_state.discard(member_id)
        else:
            self._without_state.add(member_id)
        return self._change_members()

    def acknowledged(self, member_id: MemberId, position: int) -> list[Effect]:
        """Takes an acknowledgement of a follower, of everything up to a position.

        From the first one in its stream on, the follower is awaited. So report that one when it has nearly caught up.
        """
        if member_id not in self._followers:
            return []
        is_due = member_id in self._joining or member_id == self._successor or member_id not in self._acknowledged
        self._acknowledged[member_id] = position
        self._without_state.discard(member_id)
        return self._change_members() if is_due else []

    def follower_lost(self, member_id: MemberId) -> list[Effect]:
        """Removes a follower whose stream ended, or an in-sync member that does not connect."""
        self._followers.pop(member_id, None)
        self._without_state.discard(member_id)
        self._joining.pop(member_id, None)
        self._acknowledged.pop(member_id, None)
        self._dismissed.discard(member_id)
        return self._change_members()

    def dismiss(self, member_id: MemberId) -> list[Effect]:
        """Removes a follower for which answers wait too long, even if no other standby remains; see `dismissed`."""
        if member_id not in self._followers or member_id in self._dismissed:
            return []
        self._dismissed.add(member_id)
        return self._change_members()

    @property
    def dismissed(self) -> set[MemberId]:
        """Dismissed followers that are not awaited: their connections can be ended."""
        return self._dismissed - self.awaited

    @property
    def lacks_members(self) -> bool:
        """Whether too few members are in sync, so that nothing is confirmed."""
        return len(self.in_sync) < self._min_in_sync

    def hand_over(self, member_id: MemberId | None, *, is_alone: bool = False) -> list[Effect]:
        """Makes an in-sync follower the primary once it has acknowledged everything, if nothing is appended.

        Args:
            member_id: The follower; None: keep the role. A swap that was sent may still take it.
            is_alone: Whether the others stop being in sync, because they cannot follow it.
        """
        self._successor, self._is_successor_alone = member_id, is_alone
        self._dismissed -= {member_id}
        return self._change_members()

    def _changed_as_primary(self) -> list[Effect]:
        record = self.entry.record
        if record and (record.primary, record.term) == (self._me.member_id, self._term):
            return self._change_members()
        self.role = Role.DEPOSED
        self._pending = None
        return [BeDeposed(record)]

    def _change_members(self) -> list[Effect]:
        """Sends the swap that removes lost members and adds those that caught up, one swap at a time."""
        record = self.entry.record
        if self.role is not Role.PRIMARY or record is None:
            return []
        members = {member.member_id: member for member in record.in_sync if self._stays(member.member_id)}
        caught_up = self._await_others(record)
        if self._pending:
            return []
        members |= {member_id: self._followers[member_id] for member_id in caught_up}
        in_sync = tuple(members[member_id] for member_id in sorted(members))
        if in_sync != record.in_sync:
            return self._swap(replace(record, in_sync=in_sync))
        return self._hand_over_now(record)

    def _await_others(self, record: ShardRecord) -> list[MemberId]:
        """Awaits from now on each follower that acknowledges and is not in sync. Returns those that caught up."""
        in_sync = {member.member_id for member in record.in_sync}
        others = self._acknowledged.keys() - self._dismissed - in_sync
        self._joining = {member_id: self._joining.get(member_id, self._last_position) for member_id in others}
        return [member_id for member_id in others if self._acknowledged[member_id] >= self._joining[member_id]]

    def _stays(self, member_id: MemberId) -> bool:
        """Whether an in-sync member stays one."""
        has_state = member_id in self._followers and member_id not in self._without_state
        return (has_state and member_id not in self._dismissed) or member_id == self._me.member_id

    def _hand_over_now(self, record: ShardRecord) -> list[Effect]:
        successor = record.member(self._successor) if self._successor else None
        if successor is None or self._acknowledged.get(successor.member_id, NOTHING) < self._last_position:
            return []
        others = tuple(member for member in record.in_sync if member.member_id != self._me.member_id)
        in_sync = (successor,) if self._is_successor_alone else others
        return self._swap(ShardRecord(record.term + 1, successor.member_id, in_sync, ""))
