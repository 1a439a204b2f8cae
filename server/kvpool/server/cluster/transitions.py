"""The roles of a server in its shard, and the table of what moves a server between them.

After each message that may matter, a replica makes the first transition of its role whose condition holds. Every swap
is sent by a transition. `Replica` has the invariants I1 to I7 that they keep.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from kvpool.server.cluster import effects
from kvpool.server.cluster.directory import Seen, ShardRecord
from kvpool.server.cluster.facts import NOT_CONNECTED, Facts, Role

# Conditions


def _awaits_outcome(facts: Facts) -> bool:
    return facts.pending is not None


def _operator_claims_term(facts: Facts) -> bool:
    return facts.config.claim_term > facts.known_term


def _won_as_primary(facts: Facts) -> bool:
    return facts.has_won and _is_named_primary(facts)


def _has_no_record(facts: Facts) -> bool:
    return facts.entry.record is None


def _is_in_sync_without_state(facts: Facts) -> bool:
    return facts.is_in_sync and not facts.has_state


def _was_primary_before_restart(facts: Facts) -> bool:
    return _is_named_primary(facts) and facts.record.term == facts.past_own_term


def _is_named_primary(facts: Facts) -> bool:
    return facts.record.primary == facts.me.member_id


def _lost_primary_in_sync(facts: Facts) -> bool:
    return facts.is_stream_lost and facts.is_in_sync


def _lost_primary_not_in_sync(facts: Facts) -> bool:
    return facts.is_stream_lost and not facts.has_read_since


def _is_replaced(facts: Facts) -> bool:
    record = facts.entry.record
    return record is None or (record.primary, record.term) != (facts.me.member_id, facts.term)


def _members_changed(facts: Facts) -> bool:
    return facts.next_members() != facts.in_sync


def _has_caught_up_successor(facts: Facts) -> bool:
    successor = facts.successor
    if successor is None or facts.record.member(successor) is None:
        return False
    return facts.standbys.acknowledged(successor) >= facts.last_position


def _otherwise(_: Facts) -> bool:
    return True


# Actions


def _nothing(_: Facts) -> None:
    pass


def _claim_first_term(facts: Facts) -> None:
    _claim(facts, 1)


def _claim_term_of_operator(facts: Facts) -> None:
    facts.seen = Seen(facts.config.claim_term - 1)
    _claim(facts, facts.config.claim_term)


def _claim_next_term(facts: Facts) -> None:
    _claim(facts, facts.record.term + 1)


def _withdraw(facts: Facts) -> None:
    """Leaves the in-sync members, as the state is lost. Another member takes over; the last one starts empty."""
    record, others = facts.record, facts.other_members()
    if not others:
        _claim_next_term(facts)
    elif _is_named_primary(facts):
        _swap(facts, replace(record, in_sync=others, term=record.term + 1, primary=others[0].member_id))
    else:
        _swap(facts, replace(record, in_sync=others))


def _become_primary(facts: Facts) -> None:
    is_state_lost = not facts.has_state and facts.known_term > 1
    facts.term, facts.has_state = facts.known_term, True
    facts.num_lost_states += is_state_lost
    _leave(facts)
    facts.effects.append(effects.BecomePrimary(facts.term, is_state_lost))


def _read_directory(facts: Facts) -> None:
    _leave(facts)
    facts.effects.append(effects.ReadDirectory())


def _follow(facts: Facts) -> None:
    facts.follows = True
    facts.effects.append(effects.Follow(facts.record.term, facts.record.primary_member))


def _be_deposed(facts: Facts) -> None:
    facts.pending = None
    facts.effects.append(effects.BeDeposed(facts.entry.record))


def _change_members(facts: Facts) -> None:
    _swap(facts, replace(facts.record, in_sync=facts.next_members()))


def _hand_over(facts: Facts) -> None:
    successor = facts.record.member(facts.successor) if facts.successor else None
    if successor:
        in_sync = (successor,) if facts.is_successor_alone else facts.other_members()
        _swap(facts, ShardRecord(facts.record.term + 1, successor.member_id, in_sync, ""))


def _claim(facts: Facts, term: int) -> None:
    _swap(facts, ShardRecord(term, facts.me.member_id, (facts.me,), ""))


def _swap(facts: Facts, record: ShardRecord) -> None:
    _leave(facts)  # I4: before the swap is sent
    revision = facts.entry.revision if facts.entry.record else 0
    facts.pending = effects.SendSwap(revision, replace(record, change_id=facts.new_id()))
    facts.effects.append(facts.pending)


def _leave(facts: Facts) -> None:
    if facts.follows:
        facts.effects.append(effects.Leave())
    facts.follows, facts.heard = False, NOT_CONNECTED


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
    condition: Callable[[Facts], bool]
    becomes: Role
    action: Callable[[Facts], None]


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
