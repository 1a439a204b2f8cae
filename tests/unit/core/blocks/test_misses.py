"""Why look-ups end early: the group, the reason and the tokens, counted once for each admission."""

import random
from typing import Any

import pytest

from kvpool.core.blocks.evicted_hashes import GENERATIONS, MIN_REMEMBERED, EvictedHashes
from kvpool.core.blocks.kv_cache_manager import KVCacheManager
from kvpool.core.blocks.prefix_map import PrefixMap
from kvpool.core.blocks.prefix_search import MAX_TRIES
from kvpool.core.ids import BlockHash, BlockId, MapId, SessionNumber, StepNumber
from kvpool.core.sessions.session import Session
from kvpool.core.specs.kinds import FullAttentionSpec, MambaSpec, SlidingWindowSpec
from kvpool.core.statistics import MissReason
from kvpool.core.steps.columns import Operation, Outcome
from support.core import BLOCK_SIZE, World, block_hashes, config, opened
from support.journal import Traffic, assert_alike
from support.state import DrivenState, restored

FULL, WINDOW, STATES = (
    FullAttentionSpec(4),
    SlidingWindowSpec(4, sliding_window=5),
    MambaSpec(16, ((1,),), ("bfloat16",)),
)
Misses = dict[tuple[int, MissReason], tuple[int, int]]


def misses(world: World) -> Misses:
    """Look-ups and missed tokens by group and reason."""
    return {
        (group, reason): (counters.misses[reason], counters.missed_tokens[reason])
        for group, counters in enumerate(world.pool.blocks.group_counters)
        for reason in counters.misses
    }


def new_misses(world: World, session: Session, content: str, number: int = 50, num_tokens: int = 0) -> Misses:
    """Misses of a look-up that is counted at once, and so changes nothing else. The request is freed."""
    before, num_tokens = misses(world), num_tokens or BLOCK_SIZE * len(content) + 1
    world.declare(session, Operation.LOOKUP_COUNTED_AT_ONCE, number, content, num_tokens)
    world.free(session, number)
    return {key: count for key, count in misses(world).items() if count != before.get(key)}


def cached(world: World, session: Session, content: str, number: int = 1) -> None:
    """Caches a prompt: admitted, executed and freed."""
    world.admit(session, number, content, BLOCK_SIZE * len(content) + 1)
    world.run(session, Operation.FREE, executed=session.sequence, request_numbers=[number])


def test_a_prompt_that_was_never_cached_is_unseen(world: World, session: Session) -> None:
    assert new_misses(world, session, "abc") == {(0, MissReason.UNSEEN): (1, 12)}


def test_a_hit_up_to_the_last_token_is_no_miss(world: World, session: Session) -> None:
    cached(world, session, "abc")
    assert new_misses(world, session, "abc") == {}
    assert new_misses(world, session, "abc", num_tokens=12) == {}  # the last token is computed, so 8 tokens are all
    assert new_misses(world, session, "", num_tokens=3) == {}  # no whole block


def test_the_part_after_the_hit_counts(world: World, session: Session) -> None:
    cached(world, session, "abc")
    assert misses(world) == {(0, MissReason.UNSEEN): (1, 12)}
    assert new_misses(world, session, "abxyz") == {(0, MissReason.UNSEEN): (2, 24)}


@pytest.mark.parametrize("specs", [(FULL,), (FULL, WINDOW)])
def test_a_block_that_an_allocation_took_is_evicted(specs: Any) -> None:
    world, session = opened(20, specs=specs)
    cached(world, session, "abc")
    world.admit(session, 2, "123456789"[: 18 // len(specs)], 4 * (18 // len(specs)))
    world.run(session, Operation.FREE, executed=session.sequence, request_numbers=[2])
    world.admit(session, 3, "ABCDEFGHI"[: 18 // len(specs)], 4 * (18 // len(specs)))
    world.run(session, Operation.FREE, executed=session.sequence, request_numbers=[3])
    assert set(new_misses(world, session, "abc")) == {(0, MissReason.EVICTED)}


def test_a_block_of_two_tiers_is_evicted_when_it_has_left_both() -> None:
    world, session = opened(18, num_host_blocks=16)
    cached(world, session, "abcd")
    for number, content in enumerate(("efghi", "jklmn", "opqrs"), 2):  # they take the blocks of "abcd"
        cached(world, session, content, number)
    assert world.pool.blocks.num_evicted == 3
    assert new_misses(world, session, "abcd") == {}
    for number, content in enumerate(("tuvwx", "yzABC", "DEFGH"), 5):
        cached(world, session, content, number)
    assert new_misses(world, session, "abcd") == {(0, MissReason.EVICTED): (1, 16)}


def test_a_block_is_evicted_when_another_session_takes_it_before_its_copy_was_executed() -> None:
    world, session = opened(18, num_host_blocks=32)
    other = world.open()
    cached(world, session, "abcd")
    world.admit(session, 2, "efghi", 20, executed=session.sequence)
    world.admit(other, 1, "12345678", 32)  # takes the blocks that are empty
    assert new_misses(world, other, "abcd") == {}
    world.admit(other, 2, "AB", 8)
    assert new_misses(world, other, "abcd") == {(0, MissReason.EVICTED): (1, 8)}


def test_a_block_that_a_client_evicted_is_evicted(world: World, session: Session) -> None:
    cached(world, session, "abc")
    world.run(session, Operation.EVICT, num_block_ids=[1], block_ids=[2])
    assert new_misses(world, session, "abc") == {(0, MissReason.EVICTED): (1, 8)}


def test_a_copy_that_is_left_is_found(world: World) -> None:
    one, two = world.open(), world.open()
    world.admit(one, 1, "abc", 13)
    world.admit(two, 1, "abc", 13)  # cannot see the pending blocks of the other, so it makes copies
    world.run(one, Operation.EVICT, executed=1, num_block_ids=[3], block_ids=[1, 2, 3])
    world.executed(two, 1)
    assert new_misses(world, one, "abc") == {}


def test_a_block_that_was_never_executed_is_not_executed_then_unseen(world: World) -> None:
    session, other = world.open(), world.open()
    cached(world, session, "xyz")  # the session reports execution
    world.admit(session, 2, "abc", 13)
    assert new_misses(world, other, "abc") == {(0, MissReason.NOT_EXECUTED): (1, 12)}
    world.free(session, 2)  # its step may never run
    assert new_misses(world, other, "abc") == {(0, MissReason.UNSEEN): (3, 36)}


@pytest.mark.parametrize("loses", ["reset", "epoch"])
@pytest.mark.parametrize("scope", [(b"", ""), (b"n", "v2")])
def test_a_block_from_before_a_reset_or_an_epoch_was_reset(loses: str, scope: tuple[bytes, str], world: World) -> None:
    session = world.open(namespace=scope[0], weights_version=scope[1])
    cached(world, session, "abc")
    if loses == "reset":
        assert world.pool.reset_prefix_cache()
    else:
        world.allocator.open_epoch(world.pool.config, b"n" * 32, world.pool.epoch + 1, ranks_fence=False)
        session = world.open(namespace=scope[0], weights_version=scope[1])
    assert new_misses(world, session, "abc") == {(0, MissReason.RESET): (1, 12)}
    assert misses(world)[0, MissReason.UNSEEN] == (1, 12)  # counters continue


def test_a_block_of_another_scope_is_in_another_scope(world: World) -> None:
    cached(world, world.open(namespace=b"one"), "abc")
    assert new_misses(world, world.open(), "abc") == {(0, MissReason.OTHER_SCOPE): (1, 12)}
    versioned = world.open(namespace=b"one", weights_version="v2")
    assert new_misses(world, versioned, "abc") == {(0, MissReason.OTHER_SCOPE): (2, 24)}


def test_an_eviction_in_the_own_scope_comes_before_another_scope(world: World) -> None:
    own = world.open()
    cached(world, own, "abc")
    cached(world, world.open(namespace=b"one"), "abc")
    world.run(own, Operation.EVICT, num_block_ids=[3], block_ids=[1, 2, 3])
    assert (0, MissReason.EVICTED) in new_misses(world, own, "abc")


def test_a_scope_with_the_map_of_a_dropped_scope_does_not_inherit_its_evictions(world: World) -> None:
    first = world.open(namespace=b"one")
    cached(world, first, "abc")
    world.run(first, Operation.EVICT, num_block_ids=[3], block_ids=[1, 2, 3])
    world.allocator.close_session(first.session_id, world.now_seconds)
    second = world.open(namespace=b"two")
    assert second.first_map == first.first_map
    assert new_misses(world, second, "abc") == {(0, MissReason.UNSEEN): (2, 24)}


def test_a_window_that_is_kept_sparsely_is_not_kept() -> None:
    world, session = opened(40, specs=(FULL, WINDOW), retention_tokens=0)
    cached(world, session, "abcdefgh")
    assert new_misses(world, session, "abcdXYZW") == {(1, MissReason.NOT_KEPT): (1, 32)}


def test_a_prompt_shorter_than_the_largest_block_is_a_matter_of_alignment() -> None:
    world, session = opened(40, specs=(FULL, STATES))
    assert new_misses(world, session, "abc") == {(1, MissReason.ALIGNMENT): (1, 12)}
    cached(world, session, "abcdefgh")
    assert new_misses(world, session, "abcdefghij") == {(1, MissReason.ALIGNMENT): (2, 20)}


def test_the_group_that_shortened_the_hit_last_ended_it() -> None:
    world, session = opened(40, specs=(FULL, WINDOW))
    cached(world, session, "abcd")
    prefix_map = world.pool.blocks.prefix_map
    windows = [b for b in range(40) if prefix_map.block_hash(b) and prefix_map.group_id(b) == 1]  # type: ignore[arg-type]
    world.run(session, Operation.EVICT, num_block_ids=[len(windows), 0], block_ids=windows)
    assert new_misses(world, session, "abcd") == {(1, MissReason.EVICTED): (1, 16)}


def test_a_look_up_counts_once_when_its_request_gets_slots() -> None:
    world, session = opened(4)
    world.admit(session, 1, "xy", 9)
    world.admit(session, 2, "ab", 9)
    for _ in range(3):  # refused: too few blocks
        assert world.run(session, Operation.ADMIT, request_numbers=[2]).outcomes == [Outcome.NO_BLOCKS]
    assert misses(world) == {(0, MissReason.UNSEEN): (1, 8)}
    world.free(session, 1)
    world.run(session, Operation.ADMIT, request_numbers=[2])
    assert misses(world) == {(0, MissReason.UNSEEN): (2, 16)}


def test_a_look_up_of_its_own_step_counts_with_the_allocation(world: World, session: Session) -> None:
    columns: dict[str, Any] = {"num_appended_tokens": [9], "block_hashes": block_hashes("ab", 2), "request_ids": ["r"]}
    world.run(session, Operation.LOOKUP, request_numbers=[1], **columns)
    world.run(session, Operation.LOOKUP, request_numbers=[1])
    assert misses(world) == {}
    world.allocate(session, 1, 9)
    assert misses(world) == {(0, MissReason.UNSEEN): (1, 8)}
    world.run(session, Operation.FREE, request_numbers=[1])
    world.run(session, Operation.LOOKUP_UNCOUNTED, request_numbers=[1], **columns)
    world.allocate(session, 1, 9)
    assert misses(world) == {(0, MissReason.UNSEEN): (1, 8)}


def test_a_search_that_gives_up_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_TRIES > 1
    monkeypatch.setattr("kvpool.core.blocks.prefix_search.MAX_TRIES", 1)
    world, session = opened(40, specs=(WINDOW,))
    assert new_misses(world, session, "abcd") == {(0, MissReason.SEARCH_LIMIT): (1, 16)}


@pytest.mark.parametrize("seed", range(3))
def test_the_misses_are_the_look_ups_that_found_less_than_they_could(seed: int) -> None:
    """Counted independently: by the longest hit that each admission could have."""
    rng = random.Random(seed)  # noqa: S311 - a workload
    world, session = opened(30)
    expected_lookups = expected_tokens = 0
    for _ in range(200):
        content = "".join(rng.choice("ab") for _ in range(rng.randrange(1, 8)))
        num_tokens = BLOCK_SIZE * len(content) + rng.randrange(BLOCK_SIZE)
        result = world.admit(session, 1, content, num_tokens)
        longest = (num_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE
        hit = result.num_hit_tokens[0] if result.num_hit_tokens else 0
        expected_lookups += hit < longest
        expected_tokens += longest - hit
        world.run(session, Operation.FREE, executed=session.sequence, request_numbers=[1])
    (counters,) = world.pool.blocks.group_counters
    assert sum(counters.misses.values()) == expected_lookups > 20
    assert sum(counters.missed_tokens.values()) == expected_tokens
    assert set(counters.misses) == {MissReason.UNSEEN, MissReason.EVICTED}


def hashes(first: int, count: int) -> list[BlockHash]:
    return [BlockHash(i.to_bytes(8, "big")) for i in range(first, first + count)]


def test_the_last_evictions_are_remembered_and_older_ones_forgotten() -> None:
    evicted, one, other = EvictedHashes(10), MapId(1), MapId(2)
    for i in range(0, 10 * MIN_REMEMBERED, 64):
        evicted.for_new(64)[one].update(dict.fromkeys(hashes(i, 64)))
    newest = hashes(10 * MIN_REMEMBERED - evicted.num_remembered, evicted.num_remembered)
    assert {evicted.reason(one, each) for each in newest} == {MissReason.EVICTED}
    assert {evicted.reason(other, each) for each in newest} == {None}
    remembered = [each for each in hashes(0, 10 * MIN_REMEMBERED) if evicted.reason(one, each)]
    assert evicted.num_remembered <= len(remembered) <= MIN_REMEMBERED
    assert evicted.num_remembered == MIN_REMEMBERED // GENERATIONS * (GENERATIONS - 1)


def test_the_remembered_evictions_are_an_eighth_of_the_blocks_within_bounds() -> None:
    share = (GENERATIONS - 1) / GENERATIONS
    assert [EvictedHashes(2**i).num_remembered / share for i in (4, 19, 30)] == [2**10, 2**16, 2**16]


def test_a_reset_forgets_earlier_evictions() -> None:
    evicted, each = EvictedHashes(10), MapId(0)
    evicted.for_new(4)[each].update(dict.fromkeys(hashes(0, 4)))
    evicted.reset((block_hash, 0) for block_hash in hashes(2, 4))
    assert [evicted.reason(each, h) for h in hashes(0, 6)] == [None] * 2 + [MissReason.RESET] * 4
    evicted.for_new(1)[each].update(dict.fromkeys(hashes(5, 1)))
    assert evicted.reason(each, *hashes(5, 1)) is MissReason.EVICTED


@pytest.mark.parametrize("num_groups", [1, 2])
def test_one_call_that_evicts_much_does_not_exceed_the_memory(num_groups: int) -> None:
    count = 10 * MIN_REMEMBERED
    prefix_map = PrefixMap(count, num_groups, 10)
    block_ids = [BlockId(i) for i in range(count)]
    prefix_map.insert(MapId(0), block_ids, hashes(0, count), SessionNumber(1), StepNumber(1))
    prefix_map.pending.publish(SessionNumber(1), StepNumber(1))
    prefix_map.remove_all(block_ids)
    known = [each for each in hashes(0, count) if prefix_map.evicted.reason(MapId(0), each)]
    assert known == hashes(count - MIN_REMEMBERED, MIN_REMEMBERED)


def remembered(pool: KVCacheManager) -> list[tuple[int, int, list[BlockHash]]]:
    runs = pool.blocks.prefix_map.evicted.snapshot().runs.values
    return [(number, map_id, sorted(run)) for number, map_id, run in runs]


@pytest.mark.parametrize("seed", range(4))
def test_a_restored_pool_explains_as_before(seed: int) -> None:
    state = DrivenState()
    traffic = Traffic(state, config(30, enable_events=seed % 2 > 0), seed)
    for _ in range(400):
        traffic.change()
    (pool,) = state.pools
    assert any(counters.misses for counters in pool.blocks.group_counters)
    assert pool.blocks.num_evicted
    made = restored(state)
    assert_alike(state, made)
    (other,) = made.pools
    theirs, mine = (remembered(each) for each in (other, pool))
    assert mine == theirs
    assert mine
