"""Tests of cluster/replica.py; they cite its rules. tests/simulation/shard covers their combinations."""

from collections.abc import Callable
from dataclasses import replace
from itertools import count

import pytest

from kvpool.server.cluster.directory import Entry, Member, MemberId, ShardRecord, Swap
from kvpool.server.cluster.replica import (
    NOTHING,
    BecomePrimary,
    BeDeposed,
    Effect,
    Follow,
    ReadDirectory,
    Replica,
    Role,
    SendSwap,
    WentBackError,
)

A, B, C = (Member(MemberId(name), (f"{name}:1",), f"{name}:2") for name in "abc")


def replica(me: Member = A, *, has_state: bool = True, known_term: int = 0, min_in_sync: int = 1) -> Replica:
    ids = count()
    return Replica(
        me,
        has_state=has_state,
        known_term=known_term,
        new_id=lambda: f"{me.member_id}{next(ids)}",
        min_in_sync=min_in_sync,
    )


def entry(revision: int, term: int, primary: Member, *others: Member) -> Entry:
    in_sync = tuple(sorted((primary, *others), key=lambda member: member.member_id))
    return Entry(revision, ShardRecord(term, primary.member_id, in_sync, "other"))


def only_swap(effects: list[Effect]) -> SendSwap:
    (effect,) = effects
    assert isinstance(effect, SendSwap)
    return effect


def win(of: Replica, swap: SendSwap) -> list[Effect]:
    return of.swap_ended(Swap(won=True, entry=Entry(swap.revision + 1, swap.record)))


def primary_with(*standbys: Member, min_in_sync: int = 1) -> Replica:
    """A primary of term 1 with in-sync standbys that have acknowledged no position."""
    made = replica(min_in_sync=min_in_sync)
    win(made, only_swap(made.directory_read(Entry(0, None))))
    for standby in standbys:
        assert made.follower_connected(standby, resumes=True) == []
        win(made, only_swap(made.acknowledged(standby.member_id, NOTHING)))
    assert made.in_sync == (A, *standbys)
    return made


def in_sync_standby() -> Replica:
    made = replica(B)
    assert made.directory_read(entry(5, 3, A, B)) == [Follow(3, A)]
    return made


# Who becomes the primary


def test_the_first_server_claims_term_1() -> None:
    made = replica(has_state=False)
    swap = only_swap(made.directory_read(Entry(0, None)))
    assert (swap.revision, swap.record) == (0, ShardRecord(1, A.member_id, (A,), "a0"))
    assert "candidate" in repr(made)
    assert win(made, swap) == [BecomePrimary(1, is_state_lost=False)]
    assert "primary" in repr(made)


def test_a_server_follows_the_primary_of_the_record() -> None:
    made = replica(B, has_state=False)
    assert made.directory_read(entry(5, 3, A)) == [Follow(3, A)]
    assert made.stream_lost() == [ReadDirectory()], "it is not in sync, as far as it knows"
    assert made.directory_read(entry(5, 3, A)) == [Follow(3, A)]


def test_an_in_sync_member_takes_over_at_the_revision_that_it_knows() -> None:
    """I2."""
    made = in_sync_standby()
    swap = only_swap(made.stream_lost())
    assert (swap.revision, swap.record.term, swap.record.in_sync) == (5, 4, (B,))
    assert not made.may_acknowledge
    assert win(made, swap) == [BecomePrimary(4, is_state_lost=False)]


def test_a_member_that_was_added_unknown_to_it_takes_over() -> None:
    made = replica(B)
    made.directory_read(entry(5, 3, A))
    assert made.stream_lost() == [ReadDirectory()]
    assert only_swap(made.directory_read(entry(6, 3, A, B))).revision == 6


def test_a_lost_takeover_joins_again_before_the_next_one() -> None:
    """I4."""
    made = in_sync_standby()
    made.stream_lost()
    assert made.swap_ended(Swap(won=False, entry=entry(6, 3, A, B, C))) == [Follow(3, A)]
    assert made.may_acknowledge
    assert made.directory_read(entry(7, 3, A, B)) == [Follow(3, A)], "the suspicion has ended"


def test_a_swap_with_an_unknown_outcome_is_sent_again_and_is_recognized() -> None:
    made = in_sync_standby()
    swap = only_swap(made.stream_lost())
    assert made.swap_ended(None) == [swap]
    assert made.directory_read(entry(6, 3, A)) == [], "nothing else is decided meanwhile"
    assert made.swap_ended(Swap(won=False, entry=Entry(6, swap.record))) == [BecomePrimary(4, is_state_lost=False)]


def test_a_restarted_primary_claims_a_new_term() -> None:
    """I1: its process is another one."""
    made = replica(A, known_term=3)
    swap = only_swap(made.directory_read(entry(5, 3, A)))
    assert swap.record.term == 4
    assert win(made, swap) == [BecomePrimary(4, is_state_lost=False)]


def test_a_successor_of_a_hand_over_becomes_the_primary_without_a_swap() -> None:
    made = in_sync_standby()
    assert made.directory_read(entry(6, 4, B)) == [BecomePrimary(4, is_state_lost=False)]


def test_an_older_entry_is_ignored() -> None:
    made = in_sync_standby()
    assert made.directory_read(entry(4, 3, C)) == []
    assert made.entry.revision == 5


@pytest.mark.parametrize("found", [Entry(0, None), entry(9, 2, A)])
def test_a_directory_that_went_back_is_refused(found: Entry) -> None:
    made = replica(known_term=3)
    with pytest.raises(WentBackError, match="has seen term 3"):
        made.directory_read(found)
    assert made.role is Role.STARTING


def test_a_swap_that_finds_a_directory_that_went_back_stays_pending() -> None:
    made = in_sync_standby()
    swap = only_swap(made.stream_lost())
    with pytest.raises(WentBackError):
        made.swap_ended(Swap(won=False, entry=entry(6, 2, A)))
    assert made.swap_ended(None) == [swap]


# Without the state


def test_an_in_sync_member_without_its_state_withdraws() -> None:
    made = replica(B, has_state=False, known_term=3)
    swap = only_swap(made.directory_read(entry(5, 3, A, B)))
    assert swap.record == ShardRecord(3, A.member_id, (A,), "b0")
    assert win(made, swap) == [Follow(3, A)]


def test_a_primary_without_its_state_makes_room_for_another_member() -> None:
    made = replica(A, has_state=False, known_term=3)
    swap = only_swap(made.directory_read(entry(5, 3, A, B)))
    assert swap.record == ShardRecord(4, B.member_id, (B,), "a0")
    assert win(made, swap) == [Follow(4, B)]


def test_the_last_member_without_its_state_tells_that_it_is_lost() -> None:
    made = replica(A, has_state=False, known_term=3)
    swap = only_swap(made.directory_read(entry(5, 3, A)))
    assert win(made, swap) == [BecomePrimary(4, is_state_lost=True)]


def test_a_standby_whose_state_differs_withdraws() -> None:
    made = in_sync_standby()
    assert only_swap(made.state_lost()).record.in_sync == (A,)
    assert not made.may_acknowledge


def test_a_follower_has_the_state_from_its_first_snapshot_on() -> None:
    made = replica(B, has_state=False)
    made.directory_read(entry(5, 3, A))
    made.snapshot_loaded()
    made.directory_read(entry(6, 3, A, B))
    assert only_swap(made.stream_lost()).record.primary == B.member_id


# What may leave


def test_a_primary_alone_confirms_everything() -> None:
    made = primary_with()
    made.appended(7)
    assert made.confirmed == 7


def test_every_awaited_member_must_have_acknowledged() -> None:
    """I3."""
    made = primary_with(B, C)
    made.appended(7)
    made.acknowledged(B.member_id, 7)
    assert made.confirmed == NOTHING
    made.acknowledged(C.member_id, 5)
    assert made.confirmed == 5


def test_too_few_in_sync_members_confirm_nothing() -> None:
    made = primary_with(B, min_in_sync=2)
    made.appended(0)
    made.acknowledged(B.member_id, 0)
    assert made.confirmed == 0
    win(made, only_swap(made.follower_lost(B.member_id)))
    assert made.confirmed == NOTHING


def test_a_lost_member_is_awaited_until_its_removal_is_known() -> None:
    """I5."""
    made = primary_with(B)
    made.appended(0)
    swap = only_swap(made.follower_lost(B.member_id))
    assert swap.record.in_sync == (A,)
    assert made.awaited == {B.member_id}
    made.swap_ended(None)
    assert made.confirmed == NOTHING
    win(made, swap)
    assert made.confirmed == 0


def test_a_follower_is_added_when_it_has_acknowledged_what_it_is_awaited_for() -> None:
    """I5."""
    made = primary_with()
    made.appended(7)
    made.follower_connected(B, resumes=True)
    assert made.acknowledged(B.member_id, 6) == []
    assert made.awaited == {B.member_id}
    made.appended(9)
    swap = only_swap(made.acknowledged(B.member_id, 7))
    assert swap.record.in_sync == (A, B)
    assert made.confirmed == 7
    win(made, swap)
    assert made.confirmed == 7


def test_a_follower_that_resumes_far_behind_is_not_awaited() -> None:
    """It acknowledges first when it has nearly caught up."""
    made = primary_with()
    made.appended(50_000)
    assert made.follower_connected(B, resumes=True) == []
    assert (made.awaited, made.confirmed) == (set(), 50_000)
    assert made.acknowledged(B.member_id, 49_900) == []
    assert (made.awaited, made.confirmed) == ({B.member_id}, 49_900)


def test_an_in_sync_member_that_resumes_is_awaited() -> None:
    """I5: it is not removed, so no answer leaves without it."""
    made = primary_with(B)
    made.appended(7)
    assert made.follower_connected(B, resumes=True) == []
    assert (made.awaited, made.confirmed) == ({B.member_id}, NOTHING)


def test_a_follower_that_loads_a_snapshot_is_not_awaited() -> None:
    made = primary_with()
    made.appended(7)
    assert made.follower_connected(B, resumes=False) == []
    assert made.confirmed == 7
    assert made.may_load_snapshot(B.member_id)
    assert only_swap(made.acknowledged(B.member_id, 7)).record.in_sync == (A, B)
    assert not made.may_load_snapshot(B.member_id)


def test_a_member_stops_being_in_sync_before_it_loads_a_snapshot() -> None:
    made = primary_with(B)
    swap = only_swap(made.follower_connected(B, resumes=False))
    assert swap.record.in_sync == (A,)
    assert not made.may_load_snapshot(B.member_id)
    win(made, swap)
    assert made.may_load_snapshot(B.member_id)


def test_a_dismissed_member_is_awaited_until_its_removal_is_known() -> None:
    """I5. Its acknowledgements count meanwhile, so no answer waits for the swap."""
    made = primary_with(B, C)
    made.appended(0)
    swap = only_swap(made.dismiss(C.member_id))
    assert swap.record.in_sync == (A, B)
    assert (made.awaited, made.dismissed) == ({B.member_id, C.member_id}, set())
    made.acknowledged(B.member_id, 0)
    assert made.confirmed == NOTHING
    assert made.acknowledged(C.member_id, 0) == []
    assert made.confirmed == 0
    assert win(made, swap) == []
    assert (made.awaited, made.dismissed) == ({B.member_id}, {C.member_id})
    assert made.acknowledged(C.member_id, 0) == []  # it is not added again
    assert made.follower_lost(C.member_id) == []
    made.follower_connected(C, resumes=True)
    made.acknowledged(C.member_id, NOTHING)
    assert (made.awaited, made.dismissed) == ({B.member_id, C.member_id}, set())


def test_the_last_standby_is_not_dismissed() -> None:
    made = primary_with(B)
    assert made.dismiss(B.member_id) == []
    assert (made.in_sync, made.dismissed) == ((A, B), set())


def test_nobody_is_dismissed_while_a_swap_may_remove_another_standby() -> None:
    made = primary_with(B, C)
    swap = only_swap(made.follower_lost(B.member_id))
    assert made.dismiss(C.member_id) == []
    assert win(made, swap) == []
    assert made.dismiss(C.member_id) == []
    assert made.in_sync == (A, C)


def test_a_dismissed_follower_that_joins_is_not_added() -> None:
    made = primary_with(B)
    made.appended(7)
    made.follower_connected(C, resumes=True)
    made.acknowledged(C.member_id, 6)
    assert made.awaited == {B.member_id, C.member_id}
    assert made.dismiss(C.member_id) == []
    assert made.awaited == {B.member_id}
    assert made.acknowledged(C.member_id, 7) == []
    assert made.dismissed == {C.member_id}


def test_a_dismissed_member_becomes_the_primary_if_it_is_told_to() -> None:
    made = primary_with(B, C)
    removal = only_swap(made.dismiss(C.member_id))
    made.hand_over(C.member_id)
    addition = only_swap(win(made, removal) or made.acknowledged(C.member_id, NOTHING))
    assert addition.record.in_sync == (A, B, C)
    assert only_swap(win(made, addition)).record.primary == C.member_id


def test_members_change_one_swap_at_a_time() -> None:
    made = primary_with(B, C)
    first = only_swap(made.follower_lost(B.member_id))
    assert made.follower_lost(C.member_id) == []
    second = only_swap(win(made, first))
    assert (first.record.in_sync, second.record.in_sync) == ((A, C), (A,))


def test_an_acknowledgement_of_a_connection_that_ended_is_ignored() -> None:
    made = primary_with(B)
    made.appended(0)
    made.follower_lost(B.member_id)
    assert made.acknowledged(B.member_id, 0) == []
    assert made.confirmed == NOTHING


# The end of a primary


@pytest.mark.parametrize("found", [Entry(9, None), entry(9, 2, B)])
def test_a_primary_that_is_replaced_while_the_answer_to_its_swap_is_under_way_ends(found: Entry) -> None:
    made = primary_with(B)
    swap = only_swap(made.follower_lost(B.member_id))
    assert made.directory_read(found) == []
    assert made.directory_read(Entry(swap.revision + 1, swap.record)) == []
    assert win(made, swap) == [BeDeposed(found.record)]


def test_a_takeover_that_another_server_has_replaced_already_is_not_begun() -> None:
    made = in_sync_standby()
    swap = only_swap(made.stream_lost())
    assert made.directory_read(entry(9, 5, C)) == []
    assert win(made, swap) == [Follow(5, C)]


@pytest.mark.parametrize(
    "learn",
    [
        lambda made, found: made.directory_read(found),
        lambda made, found: (made.follower_lost(B.member_id), made.swap_ended(Swap(won=False, entry=found)))[1],
    ],
    ids=["by a watch", "by its own swap"],
)
def test_a_primary_that_was_replaced_confirms_nothing(learn: Callable[[Replica, Entry], list[Effect]]) -> None:
    made = primary_with(B)
    made.appended(0)
    made.acknowledged(B.member_id, 0)
    found = entry(9, 2, B)
    assert learn(made, found) == [BeDeposed(found.record)]
    assert made.role is Role.DEPOSED
    assert made.confirmed == NOTHING
    assert made.directory_read(entry(10, 3, A)) == []
    assert made.swap_ended(None) == []
    assert made.follower_connected(B, resumes=True) == []


def test_a_hand_over_waits_until_the_successor_has_everything() -> None:
    made = primary_with(B, C)
    made.appended(3)
    made.acknowledged(B.member_id, 2)
    assert made.hand_over(B.member_id) == []
    swap = only_swap(made.acknowledged(B.member_id, 3))
    assert (swap.record.term, swap.record.primary, swap.record.in_sync) == (2, B.member_id, (B, C))
    assert made.confirmed == NOTHING, "the other member is awaited still"
    assert win(made, swap) == [BeDeposed(swap.record)]


def test_nothing_is_handed_over_to_a_server_that_is_not_in_sync() -> None:
    made = primary_with(B)
    assert made.hand_over(C.member_id) == []


def test_the_text_of_a_replica_is_its_role_and_term() -> None:
    assert repr(primary_with()) == "<Replica a: primary, term 1>"


def test_a_record_whose_primary_is_not_in_sync_is_refused() -> None:
    record = entry(5, 3, A).record
    assert record
    with pytest.raises(ValueError, match="not in sync"):
        replica(B).directory_read(Entry(5, replace(record, in_sync=(C,))))
