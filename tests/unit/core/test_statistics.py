"""The hit rate covers recent look-ups only; admissions and look-ups of preempted requests are counted as documented."""

from kvpool.core.sessions.session import Session
from kvpool.core.statistics import RECENT_REQUESTS, RecentHitRate
from kvpool.core.steps.columns import Operation, Outcome
from support.core import World, opened


def test_the_rate_covers_the_last_thousand_look_ups() -> None:
    recent = RecentHitRate()
    assert recent.rate == 0.0
    for _ in range(RECENT_REQUESTS):
        recent.observe(10, 0)
    for _ in range(RECENT_REQUESTS // 2):
        recent.observe(10, 10)
    assert recent.rate == 0.5
    for _ in range(RECENT_REQUESTS // 2):
        recent.observe(10, 10)
    assert recent.rate == 1.0
    recent.reset()
    assert recent.rate == 0.0


def test_look_ups_of_preempted_requests_are_counted_separately(world: World, session: Session) -> None:
    world.admit(session, 1, "abc", 13)
    world.run(session, Operation.PREEMPT, request_numbers=[1])
    world.run(session, Operation.ADMIT, request_numbers=[1])
    stats = world.pool.stats
    assert (stats.requests, stats.queries_tokens, stats.hits_tokens) == (1, 13, 0)
    assert (stats.preempted_requests, stats.preempted_queries_tokens, stats.preempted_hits_tokens) == (1, 13, 12)
    assert world.pool.recent_hit_rate.rate == 0.0


def test_an_admission_counts_its_look_up_only_if_it_succeeds() -> None:
    world, session = opened(num_blocks=4)
    world.admit(session, 1, "abc", 9)
    assert world.admit(session, 2, "xyz", 9).outcomes == [Outcome.NO_BLOCKS]
    assert world.pool.stats.requests == 1


def test_hits_on_blocks_of_another_session_are_counted_separately(world: World, one: Session, other: Session) -> None:
    world.admit(one, 1, "abc", 13)
    world.run(one, executed=1)
    assert world.admit(one, 2, "abc", 13).num_shared_hit_tokens == []
    assert world.admit(other, 1, "abc", 13).num_shared_hit_tokens == [12]
    assert world.pool.stats.shared_hits_tokens == 12
