"""What steps do: outcomes, budgets, and the section "what sharing adds" of the design."""

from kvpool.core.specs.pool_config import ReuseOrder
from kvpool.core.steps.columns import Operation, Outcome
from support.core import World, block_hashes

ADD, LOOKUP, ADMIT, ALLOCATE = Operation.ADD, Operation.LOOKUP, Operation.ADMIT, Operation.ALLOCATE


def test_after_the_first_refusal_nothing_more_takes_blocks_but_frees_go_on() -> None:
    world = World(num_blocks=7)  # six to give
    session = world.open()
    for number, content in ((1, "abc"), (2, "def")):
        world.admit(session, number, content, 11)
    result = world.run(session, ALLOCATE, ALLOCATE, Operation.FREE, request_numbers=[1, 2, 1], num_new_tokens=[4, 1, 0])
    assert result.outcomes == [Outcome.NO_BLOCKS, Outcome.SKIPPED, Outcome.OK]
    assert result.free_blocks == 3


def test_admissions_share_the_steps_budget_in_order() -> None:
    world = World()
    session = world.open()
    result = world.run(
        session, ADD, ADD, ADD, ADMIT, ADMIT, ADMIT,
        request_numbers=[1, 2, 3, 1, 2, 3], num_appended_tokens=[7, 7, 7, 0, 0, 0],
        block_hashes=block_hashes("a", 1) + block_hashes("b", 1) + block_hashes("c", 1),
        request_ids=["x", "y", "z"], admission_budget_tokens=10,
    )  # fmt: skip
    assert result.num_new_tokens == [0, 0, 0, 7, 3, 0]
    assert result.outcomes == [0, 0, 0, 0, 0, Outcome.SKIPPED]


def test_a_hit_is_not_charged_to_the_budget() -> None:
    world = World()
    session = world.open()
    world.admit(session, 1, "abc", 13)
    result = world.run(
        session, ADD, ADMIT, request_numbers=[2, 2], num_appended_tokens=[13, 0],
        block_hashes=block_hashes("abc", 3), request_ids=["x"], admission_budget_tokens=1,
    )  # fmt: skip
    assert (result.num_hit_tokens, result.num_new_tokens) == ([0, 12], [0, 1])
    assert result.block_ids == [1, 2, 3, 5]


def test_delayed_blocks_are_cached_when_told() -> None:
    world = World()
    session = world.open()
    world.run(
        session, ADD, ADMIT, request_numbers=[1, 1], num_appended_tokens=[13, 0],
        block_hashes=block_hashes("abc", 3), request_ids=["x"], delay_cache_blocks=[False, True],
    )  # fmt: skip
    assert world.admit(session, 2, "abc", 13).num_hit_tokens == []
    world.free(session, 2)
    world.run(session, Operation.EVICT, num_block_ids=[3], block_ids=[5, 6, 7])
    world.run(session, Operation.CACHE, request_numbers=[1], num_new_tokens=[8])
    assert world.admit(session, 3, "abc", 13).num_hit_tokens == [0, 8]


def test_rejected_tokens_make_room_again() -> None:
    world = World()
    session = world.open()
    world.admit(session, 1, "a", 6)
    world.run(session, ALLOCATE, request_numbers=[1], num_new_tokens=[5])
    result = world.run(session, ALLOCATE, request_numbers=[1], num_new_tokens=[3], num_rejected_tokens=[4])
    assert result.block_ids == []
    assert session.requests[next(iter(session.requests))].num_computed_tokens == 10


def test_reset_waits_until_nothing_is_held() -> None:
    world = World()
    session = world.open()
    world.admit(session, 1, "abc", 13)
    assert world.run(session, Operation.RESET).outcomes == [Outcome.IN_USE]
    world.free(session, 1)
    assert world.run(session, Operation.RESET).outcomes == []
    assert len(world.pool.blocks.prefix_map) == 0


def test_common_prefix_counts_the_sessions_own_requests_only() -> None:
    world = World()
    one, other = world.open(), world.open()
    world.admit(one, 1, "abc", 13)
    world.run(one, executed=1)
    world.admit(other, 1, "abc", 13)
    world.admit(other, 2, "abX", 13)
    assert world.run(other, Operation.COMMON_PREFIX, request_numbers=[1]).num_prefix_blocks == [2]
    assert world.run(one, Operation.COMMON_PREFIX, request_numbers=[1]).num_prefix_blocks == [4]


def test_uncached_blocks_are_used_again_before_cached_ones() -> None:
    world = World(num_blocks=6)
    session = world.open()
    world.admit(session, 1, "ab", 10)
    world.free(session, 1)
    assert list(world.pool.blocks.free_list) == [3, 4, 5, 2, 1]


def test_lru_puts_all_freed_blocks_last() -> None:
    world = World(num_blocks=6, reuse_order=ReuseOrder.LRU)
    session = world.open()
    world.admit(session, 1, "ab", 10)
    world.free(session, 1)
    assert list(world.pool.blocks.free_list) == [4, 5, 3, 2, 1]


def test_a_hit_evicted_before_it_is_allocated_is_answered_as_changed() -> None:
    world = World(num_blocks=6)  # five to give
    one, other = world.open(), world.open()
    world.admit(one, 1, "abc", 12)
    world.run(one, executed=1)
    world.free(one, 1)
    looked = world.run(
        other, ADD, LOOKUP, request_numbers=[1, 1], num_appended_tokens=[13, 0],
        block_hashes=block_hashes("abc", 3), request_ids=["x"],
    )  # fmt: skip
    assert looked.block_ids == [1, 2, 3]
    world.admit(one, 2, "xyz", 12)  # takes two free blocks and evicts the hit's last
    before = list(world.pool.blocks.free_list)
    changed = world.run(
        other, ALLOCATE, request_numbers=[1], num_new_tokens=[1], num_block_ids=[3], block_ids=[1, 2, 3]
    )
    assert (changed.outcomes, changed.num_hit_tokens, changed.block_ids) == ([Outcome.HIT_CHANGED], [8], [1, 2])
    assert list(world.pool.blocks.free_list) == before
    assert not other.by_number[next(iter(other.by_number))].holds_blocks


def test_a_promised_block_that_holds_something_else_now_is_never_used() -> None:
    world = World(num_blocks=5)
    one, other = world.open(), world.open()
    world.admit(one, 1, "a", 4)
    world.free(one, 1)
    world.run(one, executed=2)
    world.run(
        other, ADD, LOOKUP, request_numbers=[1, 1], num_appended_tokens=[5, 0],
        block_hashes=block_hashes("a", 1), request_ids=["x"],
    )  # fmt: skip
    world.admit(one, 2, "wxyz", 16)
    world.run(one, executed=4)
    assert world.pool.blocks.prefix_map.block_hash(next(iter(one.by_number.values())).tables[0].block_ids[-1])
    changed = world.run(other, ALLOCATE, request_numbers=[1], num_new_tokens=[1], num_block_ids=[1], block_ids=[1])
    assert (changed.outcomes, changed.block_ids) == ([Outcome.HIT_CHANGED], [])


def test_blocks_are_their_writers_until_their_step_has_run() -> None:
    world = World()
    one, other = world.open(), world.open()
    world.admit(one, 1, "abc", 13)  # change 1
    world.run(one, ALLOCATE, request_numbers=[1], num_new_tokens=[3], num_appended_tokens=[3],
              block_hashes=block_hashes("abcd", 4)[-32:])  # change 2  # fmt: skip
    assert world.admit(one, 2, "abcd", 17).num_hit_tokens == [0, 16]
    assert world.admit(other, 1, "abcd", 17).num_hit_tokens == []
    world.run(one, executed=1)
    world.free(other, 1)
    assert world.admit(other, 2, "abcd", 17).num_hit_tokens == [0, 16]  # its own copies, all of them
    world.run(other, Operation.PREEMPT, request_numbers=[2])
    third = world.open()
    assert world.admit(third, 1, "abcd", 17).num_hit_tokens == [0, 12]
    world.run(one, executed=2)
    assert world.admit(third, 2, "abcd", 17).num_hit_tokens == [0, 16]


def test_a_session_that_ends_withdraws_what_it_never_said_to_be_executed() -> None:
    world = World()
    one, other = world.open(), world.open()
    world.admit(one, 1, "abc", 13)
    world.admit(one, 2, "xyz", 13, executed=1)
    world.allocator.close_session(one.session_id, 0.0)
    assert len(world.pool.blocks.prefix_map) == 3
    assert world.admit(other, 1, "abc", 13).num_hit_tokens == [0, 12]
    assert world.admit(other, 2, "xyz", 13).num_hit_tokens == []


def test_execution_news_do_not_publish_what_took_an_evicted_blocks_place() -> None:
    world = World()
    one, other = world.open(), world.open()
    world.admit(one, 1, "a", 4)  # block 1, change 1
    world.run(one, Operation.EVICT, num_block_ids=[1], block_ids=[1])
    world.free(one, 1)
    world.admit(one, 2, "b", 4)  # block 1 again, change 4
    world.run(one, executed=3)
    assert world.admit(other, 1, "b", 5).num_hit_tokens == []


def test_a_promised_block_filled_anew_by_another_is_its_writers_until_executed() -> None:
    world = World(num_blocks=3)
    one, other = world.open(), world.open()
    world.admit(one, 1, "a", 4)  # block 1
    world.run(one, executed=1)
    world.run(
        other, ADD, LOOKUP, request_numbers=[1, 1], num_appended_tokens=[5, 0],
        block_hashes=block_hashes("a", 1), request_ids=["x"],
    )  # fmt: skip
    world.run(one, Operation.EVICT, num_block_ids=[1], block_ids=[1])
    world.free(one, 1)
    world.admit(one, 2, "a", 4)  # block 1 again, with the same contents, not computed yet
    changed = world.run(other, ALLOCATE, request_numbers=[1], num_new_tokens=[1], num_block_ids=[1], block_ids=[1])
    assert (changed.outcomes, changed.block_ids) == ([Outcome.HIT_CHANGED], [])
