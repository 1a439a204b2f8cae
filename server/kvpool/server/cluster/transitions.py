"""The roles of a server in its shard, and the table of what moves a server between them.

After each message that may matter, a replica makes the first transition of its role whose condition holds. Every swap
is sent by a transition. `Replica` has the invariants I1 to I7 that they keep.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Final

from kvpool.server.cluster import effects
from kvpool.server.cluster.directory import ShardRecord

if TYPE_CHECKING:
    from kvpool.server.cluster.replica import Replica


class Role(Enum):
    """What a server does for its shard.

    A `CANDIDATE` has sent a swap that may make it the primary, or remove it. A `DEPOSED` server answers nothing more.
    """

    STARTING = "starting"
    STANDBY = "standby"
    CANDIDATE = "candidate"
    PRIMARY = "primary"
    DEPOSED = "deposed"


# Conditions


def _awaits_outcome(replica: "Replica") -> bool:
    return replica.pending is not None


def _operator_claims_term(replica: "Replica") -> bool:
    return replica.config.claim_term > replica.known_term


def _won_as_primary(replica: "Replica") -> bool:
    return replica.has_won and _is_named_primary(replica)


def _has_no_record(replica: "Replica") -> bool:
    return replica.entry.record is None


def _is_in_sync_without_state(replica: "Replica") -> bool:
    return replica.is_in_sync and not replica.has_state


def _was_primary_before_restart(replica: "Replica") -> bool:
    return _is_named_primary(replica) and replica.record.term == replica.past_own_term


def _is_named_primary(replica: "Replica") -> bool:
    return replica.record.primary == replica.me.member_id


def _lost_primary_in_sync(replica: "Replica") -> bool:
    return replica.is_stream_lost and replica.is_in_sync


def _lost_primary_not_in_sync(replica: "Replica") -> bool:
    return replica.is_stream_lost and not replica.has_read_since


def _is_replaced(replica: "Replica") -> bool:
    record = replica.entry.record
    return record is None or (record.primary, record.term) != (replica.me.member_id, replica.term)


def _members_changed(replica: "Replica") -> bool:
    return replica.next_members() != replica.in_sync


def _has_caught_up_successor(replica: "Replica") -> bool:
    successor = replica.successor
    if successor is None or replica.record.member(successor) is None:
        return False
    return replica.standbys.acknowledged(successor) >= replica.last_position


def _otherwise(_: "Replica") -> bool:
    return True


# Actions


def _nothing(_: "Replica") -> None:
    pass


def _claim_first_term(replica: "Replica") -> None:
    _claim(replica, 1)


def _claim_term_of_operator(replica: "Replica") -> None:
    replica.known_term = replica.config.claim_term - 1
    _claim(replica, replica.config.claim_term)


def _claim_next_term(replica: "Replica") -> None:
    _claim(replica, replica.record.term + 1)


def _withdraw(replica: "Replica") -> None:
    """Leaves the in-sync members, as the state is lost. Another member takes over; the last one starts empty."""
    record, others = replica.record, replica.other_members()
    if not others:
        _claim_next_term(replica)
    elif _is_named_primary(replica):
        _swap(replica, replace(record, in_sync=others, term=record.term + 1, primary=others[0].member_id))
    else:
        _swap(replica, replace(record, in_sync=others))


def _become_primary(replica: "Replica") -> None:
    is_state_lost = not replica.has_state and replica.known_term > 1
    replica.term, replica.has_state = replica.known_term, True
    replica.num_lost_states += is_state_lost
    _leave(replica)
    replica.effects.append(effects.BecomePrimary(replica.term, is_state_lost))


def _read_directory(replica: "Replica") -> None:
    _leave(replica)
    replica.effects.append(effects.ReadDirectory())


def _follow(replica: "Replica") -> None:
    replica.follows = True
    replica.effects.append(effects.Follow(replica.record.term, replica.record.primary_member))


def _be_deposed(replica: "Replica") -> None:
    replica.pending = None
    replica.effects.append(effects.BeDeposed(replica.entry.record))


def _change_members(replica: "Replica") -> None:
    _swap(replica, replace(replica.record, in_sync=replica.next_members()))


def _hand_over(replica: "Replica") -> None:
    successor = replica.record.member(replica.successor) if replica.successor else None
    if successor:
        in_sync = (successor,) if replica.is_successor_alone else replica.other_members()
        _swap(replica, ShardRecord(replica.record.term + 1, successor.member_id, in_sync, ""))


def _claim(replica: "Replica", term: int) -> None:
    _swap(replica, ShardRecord(term, replica.me.member_id, (replica.me,), ""))


def _swap(replica: "Replica", record: ShardRecord) -> None:
    _leave(replica)  # I4: before the swap is sent
    revision = replica.entry.revision if replica.entry.record else 0
    replica.pending = effects.SendSwap(revision, replace(record, change_id=replica.new_id()))
    replica.effects.append(replica.pending)


def _leave(replica: "Replica") -> None:
    if replica.follows:
        replica.effects.append(effects.Leave())
    replica.follows = False


# The table


@dataclass(frozen=True, slots=True)
class Transition:
    """What a server does in some roles under a condition.

    Attributes:
        roles: The roles.
        condition: Whether it is made.
        becomes: The next role.
        action: What it does.
    """

    roles: tuple[Role, ...]
    condition: Callable[["Replica"], bool]
    becomes: Role
    action: Callable[["Replica"], None]


_NEW: Final = (Role.STARTING,)
_WAITING: Final = (Role.STARTING, Role.STANDBY, Role.CANDIDATE)
_CANDIDATE: Final = (Role.CANDIDATE,)
_STANDBY: Final = (Role.STANDBY,)
_PRIMARY: Final = (Role.PRIMARY,)

TRANSITIONS: Final = (
    Transition(_CANDIDATE, _awaits_outcome, Role.CANDIDATE, _nothing),
    Transition(_NEW, _operator_claims_term, Role.CANDIDATE, _claim_term_of_operator),
    Transition(_WAITING, _has_no_record, Role.CANDIDATE, _claim_first_term),
    Transition(_CANDIDATE, _won_as_primary, Role.PRIMARY, _become_primary),
    Transition(_WAITING, _is_in_sync_without_state, Role.CANDIDATE, _withdraw),
    Transition(_WAITING, _was_primary_before_restart, Role.CANDIDATE, _claim_next_term),
    Transition(_WAITING, _is_named_primary, Role.PRIMARY, _become_primary),
    Transition(_STANDBY, _lost_primary_in_sync, Role.CANDIDATE, _claim_next_term),
    Transition(_STANDBY, _lost_primary_not_in_sync, Role.STANDBY, _read_directory),
    Transition(_WAITING, _otherwise, Role.STANDBY, _follow),
    Transition(_PRIMARY, _awaits_outcome, Role.PRIMARY, _nothing),
    Transition(_PRIMARY, _is_replaced, Role.DEPOSED, _be_deposed),
    Transition(_PRIMARY, _members_changed, Role.PRIMARY, _change_members),
    Transition(_PRIMARY, _has_caught_up_successor, Role.PRIMARY, _hand_over),
)
