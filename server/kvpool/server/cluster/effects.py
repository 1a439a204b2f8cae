"""What a replica has its driver do: see `Replica.ready`."""

from dataclasses import dataclass

from kvpool.server.cluster.directory import Member, MemberId, Seen, ShardRecord


@dataclass(frozen=True, slots=True)
class SendSwap:
    """Send a compare-and-swap; report its outcome with `SwapEnded`."""

    revision: int
    record: ShardRecord


@dataclass(frozen=True, slots=True)
class ReadDirectory:
    """Read the entry; report it with `DirectoryRead`."""


@dataclass(frozen=True, slots=True)
class Follow:
    """Connect to this primary, unless this server is connected to it."""

    term: int
    primary: Member


@dataclass(frozen=True, slots=True)
class Leave:
    """End the connection to the primary: execute and acknowledge nothing more."""


@dataclass(frozen=True, slots=True)
class Acknowledge:
    """Acknowledge everything up to a position to the primary."""

    position: int


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


@dataclass(frozen=True, slots=True)
class SendSnapshot:
    """Send the state to a standby. It is not in sync, and no swap may make it so."""

    member_id: MemberId


@dataclass(frozen=True, slots=True)
class EndStandby:
    """End the connection of a standby for which nothing waits."""

    member_id: MemberId


@dataclass(frozen=True, slots=True)
class ReportSilence:
    """Report that the primary is silent."""


@dataclass(frozen=True, slots=True)
class ReportLate:
    """Report that a standby is removed because it was late for too long."""

    member_id: MemberId


Effect = (
    SendSwap
    | ReadDirectory
    | Follow
    | Leave
    | Acknowledge
    | BecomePrimary
    | BeDeposed
    | SendSnapshot
    | EndStandby
    | ReportSilence
    | ReportLate
)


@dataclass(frozen=True, slots=True)
class Ready:
    """What a driver does next, in this order.

    Attributes:
        seen: Persist this, the newest record that was seen, so that a restart recognizes an older directory.
        effects: Carry these out, one after the other.
        confirmed: Let the outputs out that wait for positions up to this one.
    """

    seen: Seen
    effects: tuple[Effect, ...]
    confirmed: int
