"""Steps of a replica that random schedules do not take: what an operator decides, and what is refused."""

from collections.abc import Sequence
from itertools import count

import pytest

from kvpool.server.cluster.directory import Entry, Member, MemberId, ShardRecord, Swap
from kvpool.server.cluster.replica import (
    NOTHING,
    BecomePrimary,
    BeDeposed,
    Follow,
    Replica,
    Role,
    SendSwap,
    WentBackError,
)


def member(name: str) -> Member:
    return Member(MemberId(name), (f"{name}:1",), f"{name}:2")


def record(term: int, primary: str, *in_sync: str) -> ShardRecord:
    return ShardRecord(term, MemberId(primary), tuple(map(member, in_sync)), "before")


def replica(name: str = "a", *, has_state: bool = True, known_term: int = 0, **settings: int) -> Replica:
    ids = count()
    return Replica(
        member(name), has_state=has_state, known_term=known_term, new_id=lambda: f"id-{next(ids)}", **settings
    )


def win(made: Replica, effects: Sequence[object], revision: int) -> list[object]:
    """Sends the one swap, and wins it."""
    (swap,) = effects
    assert isinstance(swap, SendSwap)
    return list(made.swap_ended(Swap(won=True, entry=Entry(revision, swap.record))))


def primary() -> Replica:
    made = replica()
    win(made, made.directory_read(Entry(0, None)), 1)
    return made


def test_the_first_server_of_a_shard_becomes_its_primary() -> None:
    made = replica(has_state=False)
    assert win(made, made.directory_read(Entry(0, None)), 1) == [BecomePrimary(1, is_state_lost=False)]
    assert made.role is Role.PRIMARY


def test_an_older_directory_is_refused_and_nothing_changes() -> None:
    made = replica(known_term=5)
    for entry in (Entry(9, record(3, "b", "a", "b")), Entry(0, None)):
        with pytest.raises(WentBackError, match="--claim-term 6"):
            made.directory_read(entry)
        assert (made.role, made.entry, made.known_term) == (Role.STARTING, Entry(0, None), 5)


@pytest.mark.parametrize("entry", [Entry(0, None), Entry(9, record(3, "b", "a", "b")), Entry(9, record(5, "b", "b"))])
def test_a_claimed_term_begins_whatever_the_directory_holds(entry: Entry) -> None:
    made = replica(known_term=5, claimed_term=6)
    effects = made.directory_read(entry)
    (swap,) = effects
    assert isinstance(swap, SendSwap)
    assert (swap.revision, swap.record.term, swap.record.in_sync) == (entry.revision, 6, (member("a"),))
    assert win(made, effects, 10) == [BecomePrimary(6, is_state_lost=False)]


def test_a_claimed_term_without_state_loses_the_sessions() -> None:
    made = replica("c", has_state=False, claimed_term=4)
    effects = made.directory_read(Entry(9, record(3, "b", "a", "b")))
    assert win(made, effects, 10) == [BecomePrimary(4, is_state_lost=True)]


def test_a_claimed_term_that_was_begun_has_no_effect() -> None:
    made = replica(known_term=6, claimed_term=6)
    assert made.directory_read(Entry(9, record(6, "b", "a", "b"))) == [Follow(6, member("b"))]
    other = replica("c", claimed_term=6)
    assert other.directory_read(Entry(9, record(7, "b", "b"))) == [Follow(7, member("b"))]


def test_a_primary_that_is_alone_confirms_at_once_and_one_with_too_few_servers_never() -> None:
    made = primary()
    made.appended(7)
    assert made.confirmed == 7
    strict = replica(min_in_sync=2)
    win(strict, strict.directory_read(Entry(0, None)), 1)
    strict.appended(7)
    assert strict.confirmed < 0


def test_a_swap_with_an_unknown_outcome_is_sent_again_until_it_is_known() -> None:
    made = replica()
    effects = made.directory_read(Entry(0, None))
    assert made.swap_ended(None) == effects
    (swap,) = effects
    assert isinstance(swap, SendSwap)
    lost_to_itself = Swap(won=False, entry=Entry(1, swap.record))
    assert made.swap_ended(lost_to_itself) == [BecomePrimary(1, is_state_lost=False)]


def test_a_primary_is_deposed_by_a_record_of_a_later_term() -> None:
    made = primary()
    later = record(2, "b", "b")
    assert made.directory_read(Entry(5, later)) == [BeDeposed(later)]
    assert (made.role, made.confirmed) == (Role.DEPOSED, -1)
    assert made.directory_read(Entry(6, record(3, "a", "a"))) == []


def test_a_hand_over_waits_until_the_standby_has_everything() -> None:
    made = primary()
    made.follower_connected(member("b"), resumes=False)
    made.appended(0)
    win(made, made.acknowledged(MemberId("b"), 0), 2)
    made.appended(1)
    assert made.hand_over(MemberId("b")) == []
    (swap,) = made.acknowledged(MemberId("b"), 1)
    assert isinstance(swap, SendSwap)
    assert (swap.record.term, swap.record.primary, swap.record.in_sync) == (2, "b", (member("b"),))
    (deposed,) = win(made, [swap], 3)
    assert isinstance(deposed, BeDeposed)


# A shard that was removed


def primary_of_term_3() -> Replica:
    made = replica(known_term=2)
    win(made, made.directory_read(Entry(3, record(2, "a", "a"))), 4)
    made.appended(0)
    assert (made.known_term, made.confirmed) == (3, 0)
    return made


@pytest.mark.parametrize("is_swap_pending", [False, True])
@pytest.mark.parametrize("found", [Entry(9, None), Entry(9, record(1, "b", "b")), Entry(9, record(2, "a", "a"))])
def test_a_primary_whose_record_is_gone_is_deposed(found: Entry, *, is_swap_pending: bool) -> None:
    """Also if servers have begun the shard again, at term 1."""
    made = primary_of_term_3()
    if is_swap_pending:
        assert made.follower_connected(member("b"), resumes=True) == []
        (swap,) = made.acknowledged(MemberId("b"), 0)
        assert isinstance(swap, SendSwap)
        effects = made.swap_ended(Swap(won=False, entry=found))
    else:
        effects = made.directory_read(found)
    assert effects == [BeDeposed(found.record)]
    assert (made.role, made.confirmed, made.known_term) == (Role.DEPOSED, NOTHING, 3)
    assert made.directory_read(Entry(10, None)) == []


def test_a_read_from_before_the_record_deposes_no_primary() -> None:
    made = replica()
    win(made, made.directory_read(Entry(7, None)), 8)
    assert made.directory_read(Entry(7, None)) == []
    assert made.role is Role.PRIMARY


def test_a_standby_of_a_shard_that_was_removed_never_takes_over() -> None:
    made = replica("b")
    made.directory_read(Entry(3, record(2, "a", "a", "b")))
    with pytest.raises(WentBackError, match="no record of the shard"):
        made.directory_read(Entry(9, None))
    (swap,) = made.stream_lost()
    for _ in range(2):
        with pytest.raises(WentBackError, match="no record of the shard"):
            made.swap_ended(Swap(won=False, entry=Entry(0, None)))
        assert made.swap_ended(None) == [swap]
    assert made.role is Role.CANDIDATE


def test_a_shard_begins_at_revision_0_after_another_one_of_its_name_was_removed() -> None:
    (swap,) = replica().directory_read(Entry(7, None))
    assert isinstance(swap, SendSwap)
    assert (swap.revision, swap.record.term) == (0, 1)
