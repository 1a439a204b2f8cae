"""What one server of a shard knows, on which its transitions depend. No I/O, no clock."""

from collections.abc import Callable
from enum import Enum
from typing import Final

from kvpool.core.errors import NotPrimaryError
from kvpool.server.cluster import effects, events
from kvpool.server.cluster.config import ClusterConfig
from kvpool.server.cluster.directory import Member, MemberId, Seen, ShardRecord, VersionedRecord
from kvpool.server.cluster.standbys import NOTHING, Standbys

NOT_CONNECTED: Final = events.PrimaryHeard(None, sends_records=False)


class Role(Enum):
    """What a server does for its shard.

    A `CANDIDATE` has sent a swap that may make it the primary, or remove it. A `DEPOSED` server answers nothing more.
    """

    STARTING = "starting"
    STANDBY = "standby"
    CANDIDATE = "candidate"
    PRIMARY = "primary"
    DEPOSED = "deposed"


class Facts:
    """The state of a replica.

    Args:
        me: This server.
        config: The settings.
        has_state: Whether this server has the state that belongs to its member id; not if its journal was dropped.
        seen: The newest record that this member has seen before it started.
        new_id: Returns a random id for a change of the record.

    Attributes:
        role: The role.
        entry: The newest known entry.
        seen: The newest record that was seen.
        has_state: Whether this server has the state of a member. A standby has it from its first snapshot on.
        num_lost_states: Number of times that this server became the primary without the state of the last primary.
        standbys: The standbys that are connected to this primary.
        lacks_members: Whether too few members are in sync, so that nothing is confirmed.
        awaited: The members that must acknowledge a position before it is confirmed (I3); without this one.
        confirmed: The highest position whose outputs may leave.
        last_position: The position of the newest record or mark.
        successor: The standby to which this primary hands over; None for none.
        is_successor_alone: Whether the other members cannot follow it.
        pending: The swap whose outcome is not known; None for none.
        has_won: Whether the swap has won whose outcome has just come.
        follows: Whether it is, or should be, connected to a primary.
        past_own_term: Term of this member before it started, if it was the primary; 0 otherwise.
        is_stream_lost: Whether the connection to the primary was lost, and no primary accepted this server since.
        has_read_since: Whether the directory was read since then.
        heard: When the primary was heard last.
        term: Term of this primary.
        primary_since_seconds: Time of the first tick as the primary.
        newest: The newest entry of those that were read while a swap was pending.
        effects: What is ready.
        me: This server.
        config: The settings.
        new_id: Returns a random id.
    """

    def __init__(
        self, me: Member, config: ClusterConfig, *, has_state: bool, seen: Seen, new_id: Callable[[], str]
    ) -> None:
        self.me = me
        self.config = config
        self.new_id = new_id
        self.role = Role.STARTING
        self.entry = VersionedRecord(0, None)
        self.seen = seen
        self.has_state = has_state
        self.effects: list[effects.Effect] = []
        self.pending: effects.SendSwap | None = None
        self.has_won = False
        self.newest = self.entry
        # As a standby
        self.follows = False
        self.past_own_term = 0
        self.is_stream_lost = False
        self.has_read_since = False
        self.heard = NOT_CONNECTED
        # As the primary
        self.term = 0
        self.num_lost_states = 0
        self.standbys = Standbys(config.standby_timeout_seconds)
        self.lacks_members = True
        self.awaited: frozenset[MemberId] = frozenset()
        self.confirmed = NOTHING
        self.last_position = NOTHING
        self.successor: MemberId | None = None
        self.is_successor_alone = False
        self.primary_since_seconds: float | None = None

    @property
    def known_term(self) -> int:
        """Highest term that was seen."""
        return self.seen.term

    @property
    def record(self) -> ShardRecord:
        """The record of the entry.

        Raises:
            ValueError: There is none.
        """
        if self.entry.record is None:
            raise ValueError("the directory has no record of the shard")
        return self.entry.record

    @property
    def is_in_sync(self) -> bool:
        """Whether the directory lists this server."""
        return any(member.member_id == self.me.member_id for member in self.in_sync)

    @property
    def in_sync(self) -> tuple[Member, ...]:
        """The in-sync members, as far as it is known."""
        return self.entry.record.in_sync if self.entry.record else ()

    @property
    def num_missing(self) -> int:
        """Number of standbys that are wanted beside this primary and not in sync; 0 for another server."""
        return max(self.config.wanted_standbys - (len(self.in_sync) - 1), 0) if self.role is Role.PRIMARY else 0

    @property
    def is_following(self) -> bool:
        """Whether this server could take over: it follows the primary, and is in sync."""
        return self.role is Role.STANDBY and self.me in self.in_sync

    @property
    def not_primary_error(self) -> NotPrimaryError:
        """The error that names the primary, as far as it is known."""
        record = self.entry.record
        is_other = record is not None and record.primary != self.me.member_id
        return NotPrimaryError(record.primary_member.addresses if record and is_other else (), self.known_term)

    def other_members(self) -> tuple[Member, ...]:
        """The in-sync members without this one."""
        return tuple(member for member in self.in_sync if member.member_id != self.me.member_id)

    def next_members(self) -> tuple[Member, ...]:
        """The in-sync members without those that were lost, and with those that have caught up."""
        members = {member.member_id: member for member in self.in_sync if self._stays(member.member_id)}
        members |= {member.member_id: member for member in self.standbys.joined}
        return tuple(members[member_id] for member_id in sorted(members))

    def _stays(self, member_id: MemberId) -> bool:
        return member_id == self.me.member_id or self.standbys.stays(member_id)
