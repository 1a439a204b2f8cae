"""Numbers in names of rules are those of core/fences.py."""

import pytest

from kvpool.core.errors import AbortedError, InvalidArgumentError
from kvpool.core.ids import SessionNumber
from kvpool.core.ranks.messages import (
    EpochPassed,
    FenceSet,
    HeldTensors,
    LinkId,
    MessageSent,
    PoolOpened,
    RankState,
    SessionsFenced,
)
from support.ranks import Gathering, registration

ONE, TWO, THREE = SessionNumber(1), SessionNumber(2), SessionNumber(3)


@pytest.fixture
def world() -> Gathering:
    return Gathering()


def fence(world: Gathering, *awaiting: SessionNumber, live: tuple[SessionNumber, ...] = (THREE,)) -> list[MessageSent]:
    """Fences, with session 3 opened last; returns what was sent."""
    effects = world.members.fence(THREE, live, awaiting)
    world.do(effects)
    return [effect for effect in effects if isinstance(effect, MessageSent)]


def answer(world: Gathering, link: LinkId, sequence: int) -> tuple[SessionNumber, ...]:
    """An answer; returns the sessions that it lets go."""
    effects = world.members.fenced(link, sequence)
    world.do(effects)
    return tuple(n for effect in effects if isinstance(effect, SessionsFenced) for n in effect.numbers)


@pytest.mark.parametrize("fences", [True, False])
def test_a_pool_opens_with_ranks_that_fence_if_all_do(world: Gathering, *, fences: bool) -> None:
    links = [world.register(registration(0, fences=True)), world.register(registration(1, fences=fences))]
    for link in links:
        world.allocate(link)
    (opened,) = world.pool
    assert isinstance(opened, PoolOpened)
    assert opened.ranks_fence is fences
    assert [sent.link for sent in fence(world)] == (links if fences else links[:1])


def test_a_fence_says_which_sessions_live(world: Gathering) -> None:
    links = world.form(fences=True)
    assert fence(world, ONE, TWO) == [MessageSent(link, FenceSet(1, 1, THREE, (THREE,))) for link in links]


def test_nothing_is_fenced_before_the_pool_is_open(world: Gathering) -> None:
    world.register(registration(0, fences=True))
    assert fence(world) == []


def test_rule_2_and_3_a_session_is_let_go_when_all_ranks_have_answered_the_fence_that_named_it(
    world: Gathering,
) -> None:
    first, second = world.form(fences=True)
    fence(world, ONE)
    fence(world, ONE, TWO)
    assert answer(world, first, 1) == ()
    assert answer(world, second, 1) == (ONE,)
    assert answer(world, first, 2) == ()
    assert answer(world, first, 2) == (), "said again, it changes nothing"
    assert answer(world, second, 2) == (TWO,)


def test_rule_1_an_answer_answers_all_before_it(world: Gathering) -> None:
    first, second = world.form(fences=True)
    for _ in range(3):
        fence(world, ONE, TWO)
    assert answer(world, first, 3) == ()
    assert answer(world, first, 1) == (), "an old one takes nothing back"
    assert answer(world, second, 2) == (ONE, TWO)


@pytest.mark.parametrize("sequence", [0, 2, 2**63])
def test_an_answer_to_what_was_never_sent_is_refused(world: Gathering, sequence: int) -> None:
    first, second = world.form(fences=True)
    fence(world, ONE)
    answer(world, second, 1)
    before = world.snapshot()
    with pytest.raises(InvalidArgumentError) as caught:
        answer(world, first, sequence)
    assert (caught.value.field, world.snapshot()) == ("fenced.fence_sequence", before)
    assert answer(world, first, 1) == (ONE,), "it was not taken for an answer"


def test_a_rank_that_does_not_fence_cannot_answer(world: Gathering) -> None:
    first, second = (world.register(registration(rank, fences=rank == 0)) for rank in range(2))
    for link in (first, second):
        world.allocate(link)
    fence(world, ONE)
    assert answer(world, first, 1) == ()
    with pytest.raises(InvalidArgumentError):
        answer(world, second, 1)


@pytest.mark.parametrize("how", ["lost", "silent"])
def test_rule_3_a_rank_that_is_away_holds_a_session_up_until_it_is_back(world: Gathering, how: str) -> None:
    first, second = world.form(fences=True)
    if how == "lost":
        world.break_link(second)
    else:
        world.wait(4.0)
        world.beat(first)
        world.wait(2.0)
    assert world.members.rank_infos()[1].state is RankState[how.upper()]
    assert [sent.link for sent in fence(world, ONE)] == [first]
    assert answer(world, first, 1) == ()
    if how == "lost":
        second = world.register(registration(1, fences=True, held=HeldTensors(1, 100)))
    else:
        world.beat(second)
    assert world.is_serving
    assert [sent.link for sent in fence(world, ONE)] == [first, second]
    assert answer(world, second, 2) == (ONE,), "the first rank's answer holds still"


def test_what_a_rank_answered_on_one_stream_it_keeps_on_the_next(world: Gathering) -> None:
    first, second = world.form(fences=True)
    fence(world, ONE)
    answer(world, second, 1)
    world.break_link(second)
    world.register(registration(1, fences=True, held=HeldTensors(1, 100)))
    assert answer(world, first, 1) == (ONE,)


def test_a_rank_that_comes_back_and_fences_no_more_is_another(world: Gathering) -> None:
    _, second = world.form(fences=True)
    world.break_link(second)
    world.register(registration(1, fences=False, held=HeldTensors(1, 100)))
    assert [type(effect) for effect in world.pool][-1] is EpochPassed


def test_an_epoch_that_passes_waits_for_nobody(world: Gathering) -> None:
    first, second = world.form(fences=True)
    fence(world, ONE)
    world.do(world.members.leave(second))
    with pytest.raises(AbortedError):
        answer(world, second, 1)
    assert answer(world, first, 1) == ()
    assert fence(world, ONE) == [], "nobody is fenced between epochs"
