"""What happens to a replica: see `Replica.step`."""

from dataclasses import dataclass

from kvpool.server.cluster.directory import Member, MemberId, SwapResult, VersionedRecord

# Of the directory


@dataclass(frozen=True, slots=True)
class DirectoryRead:
    """The shard's entry was read, or a watch yielded it."""

    entry: VersionedRecord


@dataclass(frozen=True, slots=True)
class SwapEnded:
    """The swap that was sent has an outcome; None if it is unknown."""

    result: SwapResult | None


# Of a standby's connection to its primary


@dataclass(frozen=True, slots=True)
class Welcomed:
    """The primary accepted this standby."""


@dataclass(frozen=True, slots=True)
class PrimaryHeard:
    """The primary was heard last at a time.

    Attributes:
        seconds: The time, on the clock of `Replica.tick`; None if there is no connection, so that none is silent.
        sends_records: Whether it sends records; if not, it may be silent for longer.
    """

    seconds: float | None
    sends_records: bool


@dataclass(frozen=True, slots=True)
class SnapshotLoaded:
    """This standby has the primary's state."""


@dataclass(frozen=True, slots=True)
class Executed:
    """This standby has everything up to a position, and so has its journal unless that is down."""

    position: int


@dataclass(frozen=True, slots=True)
class StateDiffers:
    """The state of this standby differed from the primary's. It is empty now."""


@dataclass(frozen=True, slots=True)
class StreamLost:
    """The connection to the primary has ended, or could not be made."""


# Of a primary


@dataclass(frozen=True, slots=True)
class Appended:
    """A record or mark has this position, and is being sent to the standbys."""

    position: int


@dataclass(frozen=True, slots=True)
class StandbyConnected:
    """A standby was accepted. One that does not resume needs a snapshot."""

    member: Member
    resumes: bool


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """A standby has executed everything up to a position."""

    member_id: MemberId
    position: int


@dataclass(frozen=True, slots=True)
class StandbyLost:
    """The connection of a standby has ended."""

    member_id: MemberId


@dataclass(frozen=True, slots=True)
class HandOver:
    """A standby shall be the primary once it is in sync and has everything.

    No turn is given meanwhile. Marks are appended, and records of what takes no turn, such as the end of a lease.

    Attributes:
        member_id: The standby; None: this server keeps its role. A swap that was sent may still take it.
        is_alone: Whether the others stop being in sync, because they cannot follow it.
    """

    member_id: MemberId | None
    is_alone: bool = False


Event = (
    DirectoryRead
    | SwapEnded
    | Welcomed
    | PrimaryHeard
    | SnapshotLoaded
    | Executed
    | StateDiffers
    | StreamLost
    | Appended
    | StandbyConnected
    | Acknowledged
    | StandbyLost
    | HandOver
)
