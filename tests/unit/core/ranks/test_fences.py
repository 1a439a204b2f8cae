"""Rule numbers are those of core/ranks/fences.py."""

import pytest

from kvpool.core.errors import AbortedError, InvalidArgumentError
from kvpool.core.ids import SessionNumber
from kvpool.core.ranks.effects import EpochPassed, MessageSent, PoolOpened, SessionsFenced
from kvpool.core.ranks.messages import MAX_NAMED_SESSIONS, FenceSet, HeldTensors, LinkId, RankState
from support.ranks import Gathering, registration

ONE, TWO, THREE = SessionNumber(1), SessionNumber(2), SessionNumber(3)


def fence(world: Gathering, *awaiting: SessionNumber, live: tuple[SessionNumber, ...] = (THREE,)) -> list[MessageSent]:
    """Fences, with session 3 opened last; returns what was sent."""
    effects = world.members.fence(THREE, live, awaiting)
    world.do(effects)
    return [effect for effect in effects if isinstance(effect, MessageSent)]


def answer(world: Gathering, link: LinkId, sequence: int, *pending: SessionNumber) -> tuple[SessionNumber, ...]:
    """Answers a fence; returns the sessions that are released."""
    effects = world.members.fenced(link, sequence, pending)
    world.do(effects)
    return tuple(n for effect in effects if isinstance(effect, SessionsFenced) for n in effect.numbers)


@pytest.mark.parametrize("fences", [True, False])
def test_a_pool_opens_with_ranks_that_fence_if_all_do(world: Gathering, *, fences: bool) -> None:
    links = [world.register(registration(0, fences=True)), world.register(registration(1, fences=fences))]
    world.allocate_all(*links)
    (opened,) = world.pool
    assert isinstance(opened, PoolOpened)
    assert opened.ranks_fence is fences
    assert [sent.link for sent in fence(world)] == (links if fences else links[:1])


def test_a_fence_lists_the_open_sessions(world: Gathering) -> None:
    links = world.form(fences=True)
    assert fence(world, ONE, TWO) == [MessageSent(link, FenceSet(1, 1, THREE, (THREE,))) for link in links]


def test_no_fence_is_sent_before_the_pool_is_open(world: Gathering) -> None:
    world.register(registration(0, fences=True))
    assert fence(world) == []


def test_rule_2_and_3_a_session_is_released_when_all_ranks_have_answered_its_fence(
    world: Gathering,
) -> None:
    first, second = world.form(fences=True)
    fence(world, ONE)
    fence(world, ONE, TWO)
    assert answer(world, first, 1) == ()
    assert answer(world, second, 1) == (ONE,)
    assert answer(world, first, 2) == ()
    assert answer(world, first, 2) == (), "a repeated answer changes nothing"
    assert answer(world, second, 2) == (TWO,)


def test_rule_1_an_answer_covers_all_earlier_fences(world: Gathering) -> None:
    first, second = world.form(fences=True)
    for _ in range(3):
        fence(world, ONE, TWO)
    assert answer(world, first, 3) == ()
    assert answer(world, first, 1) == (), "an old answer changes nothing"
    assert answer(world, second, 2) == (ONE, TWO)


def test_rule_3_a_pending_session_delays_no_other(world: Gathering) -> None:
    first, second = world.form(fences=True)
    fence(world, ONE)
    fence(world, ONE, TWO)
    assert answer(world, first, 2) == ()
    assert answer(world, second, 2, ONE) == (TWO,)
    assert answer(world, first, 2, TWO) == (), "it is released already"
    assert answer(world, second, 2) == (ONE,)


def test_rule_3_a_session_waits_for_its_own_steps_and_no_others(world: Gathering) -> None:
    first, second = world.form(fences=True)
    world.do(world.members.fence(THREE, (), (TWO, THREE)))
    assert answer(world, first, 1) == ()
    assert answer(world, second, 1, TWO, THREE) == ()
    assert answer(world, second, 1, TWO) == (THREE,)
    assert answer(world, second, 1) == (TWO,)


def test_rule_3_a_rank_that_returns_with_its_tensors_has_the_same_pending_sessions(world: Gathering) -> None:
    first, second = world.form(fences=True)
    fence(world, ONE)
    assert answer(world, second, 1, ONE) == ()
    world.break_link(second)
    second = world.register(registration(1, fences=True, held=HeldTensors(1, 100)))
    assert answer(world, first, 1) == ()
    assert answer(world, second, 1) == (ONE,)


def test_too_many_pending_sessions_are_refused(world: Gathering) -> None:
    first, _ = world.form(fences=True)
    fence(world, ONE)
    with world.refuses(field="fenced.pending_session_numbers"):
        answer(world, first, 1, *map(SessionNumber, range(MAX_NAMED_SESSIONS + 1)))


@pytest.mark.parametrize("sequence", [0, 2, 2**63])
def test_an_answer_to_a_fence_that_was_never_sent_is_refused(world: Gathering, sequence: int) -> None:
    first, second = world.form(fences=True)
    fence(world, ONE)
    answer(world, second, 1)
    with world.refuses(field="fenced.fence_sequence"):
        answer(world, first, sequence)
    assert answer(world, first, 1) == (ONE,), "the refused answer did not count"


def test_a_rank_that_does_not_fence_cannot_answer(world: Gathering) -> None:
    first, second = (world.register(registration(rank, fences=rank == 0)) for rank in range(2))
    world.allocate_all(first, second)
    fence(world, ONE)
    assert answer(world, first, 1) == ()
    with pytest.raises(InvalidArgumentError):
        answer(world, second, 1)


@pytest.mark.parametrize("how", ["lost", "silent"])
def test_rule_3_an_absent_rank_delays_the_release_until_it_returns(world: Gathering, how: str) -> None:
    first, second = world.form(fences=True)
    if how == "lost":
        world.break_link(second)
    else:
        world.wait(4.0)
        world.beat(first)
        world.wait(2.0)
    assert world.members.registry.rank_infos()[1].state is RankState[how.upper()]
    assert [sent.link for sent in fence(world, ONE)] == [first]
    assert answer(world, first, 1) == ()
    if how == "lost":
        second = world.register(registration(1, fences=True, held=HeldTensors(1, 100)))
    else:
        world.beat(second)
    assert world.is_serving
    assert [sent.link for sent in fence(world, ONE)] == [first, second]
    assert answer(world, second, 2) == (ONE,), "the answer of the first rank still counts"


def test_the_answers_of_a_rank_are_kept_on_its_next_stream(world: Gathering) -> None:
    first, second = world.form(fences=True)
    fence(world, ONE)
    answer(world, second, 1)
    world.break_link(second)
    world.register(registration(1, fences=True, held=HeldTensors(1, 100)))
    assert answer(world, first, 1) == (ONE,)


def test_a_rank_that_returns_without_fences_is_a_new_rank(world: Gathering) -> None:
    _, second = world.form(fences=True)
    world.break_link(second)
    world.register(registration(1, fences=False, held=HeldTensors(1, 100)))
    assert [type(effect) for effect in world.pool][-1] is EpochPassed


def test_the_end_of_an_epoch_waits_for_no_rank(world: Gathering) -> None:
    first, second = world.form(fences=True)
    fence(world, ONE)
    world.do(world.members.leave(second))
    with pytest.raises(AbortedError):
        answer(world, second, 1)
    assert answer(world, first, 1) == ()
    assert fence(world, ONE) == [], "no fence is sent between epochs"
