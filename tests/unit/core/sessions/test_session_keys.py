"""Rule 4 of session: calls that can be repeated, and one driving process at a time."""

from collections.abc import Callable
from functools import partial

import pytest

from kvpool.core.blocks.quota import Quota
from kvpool.core.errors import AbortedError, InvalidArgumentError, KvpoolError, NotFoundError
from kvpool.core.ids import SessionId
from kvpool.core.sessions.session import REMEMBERED_KEYS, LeaseBounds, Session
from support.core import World
from support.integrity import check_integrity


class Keyed(World):
    """A world whose sessions are opened with keys."""

    drawn = 0

    def open_with(
        self, key: str, *, pool: str = "m", client: str = "c", lease_seconds: float = 10.0, now_seconds: float = 0.0
    ) -> Session:
        self.drawn += 1
        return self.allocator.open_session(
            pool,
            client,
            lease_seconds,
            session_id=SessionId(f"id{self.drawn}"),
            now_seconds=now_seconds,
            open_key=key,
            requested=(lease_seconds,),
        )[1]

    def resume(self, session_id: str, key: str = "", sequence: int = 0, now_seconds: float = 0.0) -> Session:
        return self.allocator.resume_session(session_id, sequence, resume_key=key, now_seconds=now_seconds)[1]


@pytest.fixture
def world() -> Keyed:
    return Keyed()


def refusal(call: Callable[[], object]) -> tuple[type[KvpoolError], str, str]:
    with pytest.raises(KvpoolError) as caught:
        call()
    return type(caught.value), caught.value.field, caught.value.reason


def test_the_same_key_finds_the_session_it_opened(world: Keyed) -> None:
    session = world.open_with("k")
    assert world.open_with("k", now_seconds=7.0) is session
    assert (session.last_seen_seconds, world.pool.activity.sessions_opened, world.pool.activity.retries) == (7.0, 1, 1)
    assert world.open_with("other") is not session
    assert world.open_with("") is not world.open_with("")


@pytest.mark.parametrize("change", [{"pool": "n"}, {"client": "d"}, {"lease_seconds": 11.0}])
def test_a_key_used_with_different_arguments_is_refused(world: Keyed, change: dict[str, object]) -> None:
    session = world.open_with("k")
    before = world.snapshot(), session.last_seen_seconds
    assert refusal(lambda: world.open_with("k", now_seconds=1.0, **change)) == (  # type: ignore[arg-type]
        InvalidArgumentError, "open_key", "OPEN_KEY_REUSED",
    )  # fmt: skip
    assert (world.snapshot(), session.last_seen_seconds) == before


def test_a_key_can_be_reused_after_its_session_ended(world: Keyed) -> None:
    closed = world.open_with("k")
    world.allocator.close_session(closed.session_id, 0.0)
    overdue = world.open_with("k", client="d")
    assert overdue is not closed
    again = world.open_with("k", now_seconds=10.0)  # although the session was not ended yet
    assert again is not overdue
    world.allocator.expire(10.0)
    assert world.open_with("k", now_seconds=10.0) is again


def test_a_drained_pool_still_finds_a_session_that_is_open(world: Keyed) -> None:
    session = world.open_with("k")
    world.allocator.pools.drain_state.drain(None)
    assert world.open_with("k") is session
    assert refusal(lambda: world.open_with("l"))[2] == "DRAINED"


@pytest.mark.parametrize("key", ["k" * 65, "ü" * 33, "\ud800" * 22])
def test_keys_have_a_maximum_length(world: Keyed, key: str) -> None:
    session = world.open_with("k" * 64)
    assert refusal(lambda: world.open_with(key))[:2] == (InvalidArgumentError, "open_key")
    assert refusal(lambda: world.resume(session.session_id, key))[:2] == (InvalidArgumentError, "resume_key")
    assert world.sessions() == [session]
    assert session.current_id == session.session_id


def test_resuming_assigns_a_new_id_and_fences_earlier_ids(world: Keyed) -> None:
    session = world.open_with("k")
    world.admit(session, 1, "abc", 13)
    assert world.resume("id1", "a", sequence=1, now_seconds=9.0) is session
    first = session.current_id
    assert (first != "id1", session.last_seen_seconds) == (True, 9.0)
    held = [request.tables for request in session.requests.values()]
    assert world.resume("id1", "b") is session  # by any of its ids
    second = session.current_id
    assert [request.tables for request in session.requests.values()] == held
    before = world.snapshot()
    for stale in ("id1", first):
        for call in (world.allocator.sessions.find, world.allocator.close_session):
            assert refusal(partial(call, stale, 1.0)) == (AbortedError, "session_id", "SESSION_RESUMED")
    assert (world.snapshot(), session.last_seen_seconds) == (before, 0.0)
    assert world.allocator.sessions.find(second, 1.0) == (world.pool, session)
    assert refusal(lambda: world.open_with("k")) == (AbortedError, "session_id", "SESSION_RESUMED")


def test_resuming_assigns_the_next_number_and_keeps_the_rest(world: Keyed) -> None:
    session, other = world.open_with("k"), world.open_with("l")
    world.admit(session, 1, "abc", 13)
    world.resume("id1", "a")
    assert (session.numbers, world.allocator.sessions.last_number) == ((1, 3), 3)
    assert (
        [each.session_number for each in world.sessions()]
        == [2, 3]
        == [s.session_number for _, s in world.allocator.sessions]
    )
    assert {request.session_number for request in session.requests.values()} == {3}
    assert world.allocator.find_session("m", 3)[1] is session
    assert refusal(lambda: world.allocator.find_session("m", 1))[2] == "SESSION_NOT_FOUND"
    check_integrity(world.pool, world.sessions())
    world.resume("id1", "a")
    assert (session.numbers, world.allocator.sessions.last_number) == ((1, 3), 3), "a repeat"
    for sequence, key in ((2, "b"), (0, "k" * 65)):
        refusal(partial(world.resume, "id1", key, sequence))
    assert (session.session_number, world.open_with("m").session_number, other.session_number) == (3, 4, 2)


def test_unexecuted_blocks_stay_private_and_are_published_under_the_new_number(world: Keyed) -> None:
    session, other = world.open_with("k"), world.open_with("l")
    world.admit(session, 1, "abc", 13)
    world.resume("id1")
    assert not any(world.admit(other, 1, "abc", 13).num_hit_tokens)
    assert world.admit(session, 2, "abc", 13).num_hit_tokens[-1] == 12
    world.allocator.mark_executed(world.pool, session, 1)
    world.free(other, 1)
    result = world.admit(other, 2, "abc", 13)
    assert (result.num_hit_tokens[-1], result.num_shared_hit_tokens[-1]) == (12, 12)
    check_integrity(world.pool, world.sessions())


@pytest.mark.parametrize("quota", [Quota(2, 0), Quota(0, 5)])
def test_resuming_keeps_the_quota(world: Keyed, quota: Quota) -> None:
    session = world.open(quota=quota)
    world.admit(session, 1, "abc", 13)
    assert session.holding
    counts = dict(session.holding.counts)
    world.resume("s1")
    assert (session.holding.counts, session.holding.min_blocks, session.holding.max_blocks) == (
        counts, quota.min_blocks, quota.max_blocks,
    )  # fmt: skip
    check_integrity(world.pool, world.sessions())


def test_a_resumed_session_that_is_evicted_is_quarantined_under_its_new_number(world: Keyed) -> None:
    session = world.open_with("k")
    world.admit(session, 1, "abc", 13)
    world.resume("id1")
    world.allocator.evict_session("m", session.session_number, 0.0, quarantine_seconds=5.0)
    assert world.pool.quarantine.numbers == (2,)
    assert world.pool.blocks.prefix_map.pending.steps == {}
    check_integrity(world.pool, world.sessions())


def test_a_resume_key_takes_over_once_and_not_from_a_later_process(world: Keyed) -> None:
    session = world.open_with("k")
    world.resume("id1", "a")
    first = session.current_id
    assert (world.resume("id1", "a").current_id, world.pool.activity.retries) == (first, 1)
    world.resume("id1", "b")
    second = session.current_id
    assert refusal(lambda: world.resume(first, "a"))[2] == "SESSION_RESUMED"
    assert session.current_id == second
    for i in range(REMEMBERED_KEYS):
        world.resume("id1", f"c{i}")
    assert world.resume("id1", "a").current_id not in (first, second)


def test_resuming_with_a_future_step_number_is_refused(world: Keyed) -> None:
    session = world.open_with("k")
    world.admit(session, 1, "abc", 13)
    before = world.snapshot()
    for sequence in (-1, 2):
        refused = refusal(partial(world.resume, "id1", "a", sequence))
        assert refused == (InvalidArgumentError, "sequence", "INVALID_VALUE")
    assert (world.snapshot(), session.current_id) == (before, "id1")


def test_ended_sessions_are_not_resumed(world: Keyed) -> None:
    closed, overdue = world.open_with("k"), world.open_with("l")
    world.resume(closed.session_id)
    world.allocator.close_session(closed.current_id, 0.0)
    assert refusal(lambda: world.resume("id1"))[2] == "SESSION_CLOSED"
    assert refusal(lambda: world.resume(overdue.session_id, now_seconds=10.0))[2] == "LEASE_EXPIRED"
    assert refusal(lambda: world.resume("id9"))[0] is NotFoundError


def test_only_the_process_that_closed_a_session_gets_its_count_again(world: Keyed) -> None:
    session = world.open_with("k")
    world.admit(session, 1, "abc", 13)
    world.resume("id1")
    assert world.allocator.close_session(session.current_id, 0.0)[1] == 1
    ended = world.allocator.sessions.ends
    assert (ended.num_freed_by_close(session.current_id), ended.num_freed_by_close("id1")) == (1, None)
    check_integrity(world.pool, world.sessions())


@pytest.mark.parametrize(
    ("bounds", "field"),
    [
        ((0.05, 10.0, 1.0), "min_lease_seconds"),
        ((float("nan"), 10.0, 1.0), "min_lease_seconds"),
        ((2.0, 1.0, 2.0), "max_lease_seconds"),
        ((2.0, 86401.0, 2.0), "max_lease_seconds"),
        ((2.0, 3.0, 1.0), "default_lease_seconds"),
        ((2.0, 3.0, 4.0), "default_lease_seconds"),
    ],
)
def test_bounds_of_leases_are_checked_by_name(bounds: tuple[float, float, float], field: str) -> None:
    with pytest.raises(ValueError, match=f"^{field}: "):
        LeaseBounds(*bounds)


@pytest.mark.parametrize("asked_seconds", [0.5, 3601.0, float("nan"), -1.0])
def test_leases_out_of_bounds_are_refused(asked_seconds: float) -> None:
    assert refusal(lambda: LeaseBounds().choose(asked_seconds))[:2] == (InvalidArgumentError, "lease_seconds")
    assert LeaseBounds(2.0, 5.0, 3.0).choose(0.0) == 3.0
