"""Rule numbers are those of core/pools/memory_identity.py."""

from dataclasses import replace
from typing import Any

import pytest

from kvpool.core.blocks.quota import Quota
from kvpool.core.errors import ExhaustedError, InvalidArgumentError, KvpoolError, UnavailableError, WrongStateError
from kvpool.core.events import AllBlocksCleared
from kvpool.core.ids import PoolName
from kvpool.core.ranks.messages import RankGroup as Ranks
from kvpool.core.ranks.messages import RankGroupOptions
from kvpool.core.sessions.session import Session
from support.core import World, config, request_of

QUARANTINE_SECONDS = 5.0


@pytest.fixture
def world() -> World:
    return World(enable_events=True)


def fill(world: World, session: Session, number: int = 1, content: str = "abc") -> None:
    """Caches three blocks that other sessions can hit."""
    world.admit(session, number, content, 13, token_ids=list(range(13)))
    world.executed(session)


def filled(world: World, memory_id: str) -> None:
    """Leaves three cached blocks of an ended session."""
    session = world.open(memory_id=memory_id)
    fill(world, session)
    world.allocator.close_session(session.session_id, world.now_seconds)
    world.pool.blocks.take_events()


def hit_tokens(world: World) -> int:
    return world.pool.find_longest_cache_hit(request_of(world.pool, "abc", 13)).num_tokens


def refusal(world: World, memory_id: str, quota: Quota = Quota()) -> KvpoolError:  # noqa: B008 - frozen
    """Returns the error of a refused session; the refusal must change nothing."""
    before = world.snapshot(), world.allocator.sessions.last_number, len(world.allocator.sessions)
    with pytest.raises(KvpoolError) as caught:
        world.open(memory_id=memory_id, quota=quota)
    assert (world.snapshot(), world.allocator.sessions.last_number, len(world.allocator.sessions)) == before
    assert world.pool.blocks.take_events() == []
    return caught.value


def check_other_memory(error: KvpoolError, *phrases: str) -> None:
    assert isinstance(error, UnavailableError)
    assert (error.reason, error.field, error.retry_seconds) == ("OTHER_MEMORY", "memory_id", 1.0)
    assert all(each in error.message for each in phrases), error.message


def check_new_epoch(world: World, epoch: int, memory_id: str) -> None:
    assert (world.pool.epoch, world.pool.memory_id, hit_tokens(world)) == (epoch, memory_id, 0)
    assert world.info().memory_id == memory_id
    assert world.pool.blocks.take_events() == [AllBlocksCleared()]


def test_rule_1_the_first_named_memory_becomes_the_pools(world: World) -> None:
    session = world.open(memory_id="a")
    assert (world.pool.memory_id, world.pool.epoch, world.sessions()) == ("a", 1, [session])
    assert world.pool.blocks.take_events() == []


def test_rule_1_a_session_without_a_memory_makes_it_unknown(world: World) -> None:
    """The memory may be another one, so sessions that name the earlier one must not hit the cached blocks."""
    named = world.open(memory_id="a")
    fill(world, named)
    unnamed = world.open()
    assert (world.pool.memory_id, world.pool.epoch, hit_tokens(world)) == ("", 1, 12)
    world.pool.blocks.take_events()
    check_other_memory(refusal(world, "a"), "a memory without a name", "2 open sessions")
    for session in (named, unnamed):
        world.allocator.close_session(session.session_id, 0.0)
    world.open(memory_id="a")
    check_new_epoch(world, 2, "a")


def test_rule_2_sessions_in_the_same_memory_share_cached_blocks(world: World) -> None:
    filled(world, "a")
    one, other = world.open(memory_id="a"), world.open(memory_id="a")
    assert (world.pool.epoch, world.sessions(), hit_tokens(world)) == (1, [one, other], 12)
    assert world.pool.blocks.take_events() == []


def test_rule_2_another_memory_waits_for_open_sessions_and_their_quarantine(world: World) -> None:
    fill(world, world.open(memory_id="a"))
    world.open(memory_id="a")
    world.pool.blocks.take_events()
    check_other_memory(refusal(world, "b"), "'a'", "2 open sessions", "0 in quarantine")
    world.now_seconds = 10.0
    world.allocator.expire(world.now_seconds, quarantine_seconds=QUARANTINE_SECONDS)
    world.pool.blocks.take_events()
    check_other_memory(refusal(world, "b"), "'a'", "0 open sessions", "1 in quarantine")
    assert hit_tokens(world) == 12
    world.allocator.end_due_quarantines(15.0)
    world.open(memory_id="b")
    check_new_epoch(world, 2, "b")


def test_rule_2_the_same_memory_is_never_refused(world: World) -> None:
    fill(world, world.open(memory_id="a"))
    world.allocator.expire(10.0, quarantine_seconds=QUARANTINE_SECONDS)
    world.open(memory_id="a")
    assert (world.pool.epoch, len(world.pool.quarantine), hit_tokens(world)) == (1, 1, 12)


def test_rule_2_a_new_epoch_keeps_the_configuration_and_the_counters(world: World) -> None:
    filled(world, "a")
    before, config = world.info(), world.pool.config
    session = world.open(memory_id="b")
    after = world.info()
    assert (world.pool.config, config.hash_scheme.none_hash) == (config, b"n" * 32)
    assert (after.free_blocks, after.cached_blocks) == (19, 0)
    assert (after.activity.allocations, after.activity.sessions_opened) == (before.activity.allocations, 2)
    assert after.activity.epoch_ends == 0
    assert after.groups[0].allocated_blocks == before.groups[0].allocated_blocks
    assert session.session_number == 2


def test_rule_2_epochs_go_up_with_each_memory_also_back_to_the_first(world: World) -> None:
    for epoch, memory_id in enumerate(("a", "b", "a"), start=1):
        filled(world, memory_id)
        assert (world.pool.epoch, world.pool.memory_id) == (epoch, memory_id)
    world.allocator.remove_pool("m")
    assert world.allocator.pools.past_epoch == 3


def test_rule_3_blocks_cached_in_an_unknown_memory_are_dropped(world: World) -> None:
    filled(world, "")
    world.open(memory_id="a")
    check_new_epoch(world, 2, "a")


def test_rule_3_a_named_memory_waits_for_sessions_without_one(world: World) -> None:
    world.open()
    check_other_memory(refusal(world, "a"), "a memory without a name", "1 open sessions")


def test_rule_3_a_session_without_a_memory_is_served_as_before(world: World) -> None:
    filled(world, "a")
    world.open()
    world.open()
    assert (world.pool.epoch, hit_tokens(world), len(world.sessions())) == (1, 12, 2)


def test_rule_4_sessions_of_rank_pools_cannot_name_a_memory(world: World) -> None:
    world.allocator.keep_rank_group(world.pool.config.name, Ranks(1, RankGroupOptions(256)))
    error = refusal(world, "a")
    assert isinstance(error, InvalidArgumentError)
    assert error.field == "memory_id"
    world.open()


@pytest.mark.parametrize("memory_id", ["m" * 129, "ü" * 65, "\ud800" * 43])
def test_the_length_of_a_memory_name_is_limited(world: World, memory_id: str) -> None:
    error = refusal(world, memory_id)
    assert (type(error), error.field) == (InvalidArgumentError, "memory_id")
    world.open(memory_id="m" * 128)


@pytest.mark.parametrize("quota", [Quota(20), Quota(5, 4), Quota(-1)])
def test_a_quota_that_is_refused_begins_no_epoch(world: World, quota: Quota) -> None:
    filled(world, "a")
    assert isinstance(refusal(world, "b", quota), InvalidArgumentError)
    assert hit_tokens(world) == 12
    world.open(memory_id="b", quota=Quota(19, 19))
    check_new_epoch(world, 2, "b")
    assert isinstance(refusal(world, "b", Quota(1)), ExhaustedError)


def test_a_drained_pool_begins_no_epoch(world: World) -> None:
    filled(world, "a")
    world.allocator.drain(None)
    assert refusal(world, "b").reason == "DRAINED"


def test_a_key_that_named_another_memory_is_refused(world: World) -> None:
    session = world.open(open_key="k", memory_id="a")
    assert world.open(open_key="k", memory_id="a") is session
    for memory_id in ("b", ""):
        with world.refuses(field="open_key", reason="OPEN_KEY_REUSED"):
            world.open(open_key="k", memory_id=memory_id)


def test_other_pools_are_unchanged(world: World) -> None:
    other = world.allocator.create_pool(replace(config(), name=PoolName("n")), b"n" * 32, 7)[0]
    filled(world, "a")
    world.open(memory_id="b")
    assert (other.epoch, other.memory_id, world.pool.epoch) == (7, "", 2)


def create_again(world: World, memory_id: str, **changes: Any) -> bool:
    """Declares the pool again, with changes of its configuration."""
    changed = replace(world.pool.config, **changes)
    return world.allocator.create_pool(changed, b"other", owner="another", memory_id=memory_id)[1]


@pytest.mark.parametrize("changes", [{"num_blocks": 7}, {"num_blocks": 90}, {"max_model_len": 50}])
def test_rule_5_a_pool_of_another_configuration_is_replaced_in_another_memory(
    world: World, changes: dict[str, object]
) -> None:
    filled(world, "a")
    assert create_again(world, "b", **changes)
    assert all(getattr(world.pool.config, name) == value for name, value in changes.items())
    assert world.pool.owner == "another"
    check_new_epoch(world, 2, "b")
    fill(world, world.open(memory_id="b"))
    assert (world.pool.epoch, hit_tokens(world)) == (2, 12)


@pytest.mark.parametrize(("before", "after"), [("a", "a"), ("a", ""), ("", "b")])
def test_rule_5_no_pool_is_replaced_in_its_own_or_an_unknown_memory(world: World, before: str, after: str) -> None:
    filled(world, before)
    with world.refuses(WrongStateError, field="config.num_blocks", reason="POOL_DIFFERS", match="kvpool remove-pool"):
        create_again(world, after, num_blocks=7)


def test_rule_5_a_pool_in_use_is_not_replaced(world: World) -> None:
    fill(world, world.open(memory_id="a"))
    with world.refuses(UnavailableError) as caught:
        create_again(world, "b", num_blocks=7)
    check_other_memory(caught.value, "'a'", "1 open sessions", "a pool each")


def test_rule_5_a_new_pool_is_in_the_memory_of_who_declared_it(world: World) -> None:
    """An engine may die before it opens a session."""
    new = replace(world.pool.config, name=PoolName("new"))
    pool, _ = world.allocator.create_pool(new, b"hash", memory_id="a")
    assert pool.memory_id == "a"
    assert world.allocator.create_pool(replace(new, num_blocks=7), b"hash", memory_id="b")[1]
    assert (pool.config.num_blocks, pool.memory_id) == (7, "b")


def test_rule_5_the_same_configuration_finds_the_pool(world: World) -> None:
    filled(world, "a")
    state = world.snapshot()
    assert not create_again(world, "b")
    assert world.snapshot() == state
