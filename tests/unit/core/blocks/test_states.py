"""States kept at the ends of steps only, rules 6 to 9 and 11 of state_manager.py. Golden files have vLLM's answers."""

from dataclasses import replace
from typing import Any

import pytest

from kvpool.core.blocks.kv_cache_manager import KVCacheManager
from kvpool.core.ids import StepNumber
from kvpool.core.specs.kinds import FullAttentionSpec, MambaSpec
from kvpool.core.specs.pool_config import HashScheme
from kvpool.core.steps.columns import Operation, Outcome
from support.core import World, admit, block_hashes, config, opened, request_of

FULL = FullAttentionSpec(4)
STATES = MambaSpec(4, only_step_ends=True)
EXPORTED = replace(STATES, num_prefill_checkpoint_blocks=1, prefill_checkpoint_alignment=1)


def run(spec: MambaSpec, ends: list[int], num_tokens: int = 30, retention_tokens: int | None = 0) -> list[list[int]]:
    """Computes a request in steps that end at these tokens. Returns its table after each."""
    pool = KVCacheManager(config(specs=[spec], retention_tokens=retention_tokens))
    request = request_of(pool, "a", num_tokens)
    request.num_prompt_tokens = num_tokens
    tables: list[list[int]] = []
    for step, end in enumerate(ends, 1):
        assert pool.allocate_slots(request, end - request.num_computed_tokens, sequence=StepNumber(step))
        tables.append(list(request.tables[0].block_ids))
    return tables


@pytest.mark.parametrize(
    ("ends", "tables"),
    [
        ([10], [[0, 0, 1]]),
        ([4, 8], [[1], [1, 2]]),
        ([8, 9, 10, 12, 13], [[0, 1], [0, 1, 2], [0, 0, 2], [0, 0, 2], [0, 0, 2, 1]]),
        ([6, 18, 19, 28], [[0, 1], [0, 1, 0, 0, 2], [0, 0, 0, 0, 2], [0, 0, 0, 0, 2, 0, 1]]),
    ],
)
def test_a_step_writes_one_state_and_the_one_before_is_freed_a_step_later(
    ends: list[int], tables: list[list[int]]
) -> None:
    assert run(STATES, ends) == tables


@pytest.mark.parametrize(
    ("spec", "retention_tokens", "ends", "tables"),
    [
        (EXPORTED, 0, [30], [[0, 0, 0, 0, 0, 0, 1, 2]]),
        (EXPORTED, 0, [20, 30], [[0, 0, 0, 0, 1], [0, 0, 0, 0, 1, 0, 2, 3]]),  # the first ends no prompt
        (EXPORTED, None, [18, 30], [[0, 0, 0, 1, 2], [0, 0, 0, 0, 2, 0, 0, 3]]),  # the second does not begin at a block
        (replace(EXPORTED, prefill_checkpoint_alignment=8), 0, [30], [[0, 0, 0, 0, 0, 0, 0, 1]]),
        (replace(EXPORTED, prefill_checkpoint_alignment=8), 0, [4, 30], [[1], [1, 0, 0, 0, 0, 0, 2, 3]]),
    ],
)
def test_a_step_that_ends_a_prompt_also_writes_the_state_where_the_prompt_is_resumed(
    spec: MambaSpec, retention_tokens: int | None, ends: list[int], tables: list[list[int]]
) -> None:
    assert run(spec, ends, retention_tokens=retention_tokens) == tables


@pytest.mark.parametrize(("launched", "outcome"), [(1, Outcome.NO_BLOCKS), (2, Outcome.OK), (0, Outcome.OK)])
def test_a_hit_waits_until_the_step_that_fills_its_state_is_launched(launched: int, outcome: Outcome) -> None:
    """Without reports each step counts as launched when the next one arrives."""
    world, session = opened(specs=[FULL, STATES], retention_tokens=None)
    world.run(session, Operation.EVICT)
    world.admit(session, 1, "a", 8)
    found = world.declare(session, Operation.LOOKUP, 2, "a", 12, launched_sequence=launched)
    assert found.num_hit_tokens == [8]
    free_blocks = world.pool.blocks.num_free_blocks
    result = world.allocate(session, 2, 4, num_block_ids=found.num_prefix_blocks, block_ids=found.block_ids)
    assert result.outcomes == [outcome] * bool(outcome)
    assert (world.pool.blocks.num_free_blocks == free_blocks) is bool(outcome)


@pytest.mark.parametrize("launched", [0, 2])
def test_requests_of_one_step_do_not_hit_its_states(launched: int) -> None:
    """Also if the step names itself as launched, because work on credit is in flight."""
    world, session = opened(specs=[FULL, STATES], retention_tokens=None)
    world.run(session, Operation.EVICT)
    both = [Operation.ADMIT] * 2
    result = world.declare_all(session, both, "aa", 12, num_new_tokens=[8, 0], launched_sequence=launched)
    assert result.outcomes == [Outcome.OK, Outcome.NO_BLOCKS]


@pytest.mark.parametrize("shares", [False, True])
def test_a_hit_waits_for_a_step_that_ends_a_prompt_from_its_state(*, shares: bool) -> None:
    """As in vLLM 0.32, which takes the state for one that this step fills. 0.33 does not."""
    world, session = opened(specs=[FULL, STATES], retention_tokens=None, shares_read_states=shares)
    world.declare(session, Operation.ALLOCATE, 1, "a", 10, num_new_tokens=[8])
    world.allocate(session, 1, 2)
    assert world.admit(session, 2, "a", 12, launched_sequence=1).outcomes == [Outcome.NO_BLOCKS] * (not shares)
    if not shares:
        assert world.run(session, Operation.ADMIT, request_numbers=[2], launched_sequence=2).outcomes == []


def test_a_hit_waits_for_no_step_that_was_executed() -> None:
    """Also if the session has reported none of the latest steps as launched."""
    world, session = opened(specs=[FULL, STATES], retention_tokens=None)
    world.declare(session, Operation.ALLOCATE, 1, "a", 10, num_new_tokens=[8])
    world.allocate(session, 1, 2, launched_sequence=1)
    assert world.admit(session, 2, "a", 12, executed=2, launched_sequence=3).outcomes == []


def test_external_tokens_are_refused() -> None:
    world, session = opened(specs=[FULL, STATES])
    with world.refuses(field="num_external_tokens[0]", match="states at the ends of steps"):
        world.declare(session, Operation.ALLOCATE, 1, "a", 12, num_new_tokens=[4], num_external_tokens=[4])


def test_a_hit_of_a_request_whose_session_the_pool_does_not_know_waits_for_published_states_only() -> None:
    pool = KVCacheManager(config(specs=[FULL, STATES], retention_tokens=None))
    first = admit(pool, "abcd", 12)
    pool.blocks.prefix_map.pending.publish(first.session_number, StepNumber(1))
    admission = pool.admit(request_of(pool, "abcd", 14), 14, sequence=StepNumber(2))
    assert admission
    assert admission.computed.num_tokens == 12


@pytest.mark.parametrize("delays", [False, True])
@pytest.mark.parametrize(
    ("ends", "found"),
    [([5, 10], 0), ([3, 8, 11], 8), ([5, 7, 8, 11], 8), ([8, 9, 14], 8), ([2, 3, 4, 7], 4), ([6, 12], 12), ([14], 0)],
)
def test_a_block_that_a_step_begins_within_and_passes_is_not_cached(
    ends: list[int], found: int, *, delays: bool
) -> None:
    pool = KVCacheManager(config(specs=[STATES], retention_tokens=None))
    request = request_of(pool, "abcd", 14)
    for step, end in enumerate(ends, 1):
        new, sequence = end - request.num_computed_tokens, StepNumber(step)
        assert pool.allocate_slots(request, new, delay_cache_blocks=delays, sequence=sequence) is not None
        if delays:
            pool.cache_blocks(request, end, sequence=sequence)
    assert pool.find_longest_cache_hit(request_of(pool, "abcd", 14)).num_tokens == found


@pytest.mark.parametrize("cached", [4, 8])
def test_a_request_does_not_go_back_to_before_a_cached_state(cached: int) -> None:
    """The next step would overwrite it. A state within a block is one that a hit can end with."""
    partial: Any = {"prefix_match_unit": 4, "partial_hits": True}
    world, session = opened(specs=[FULL, replace(STATES, block_size=8)], **partial)
    world.admit(session, 1, "ab", cached + 1, num_new_tokens=[cached])
    with world.refuses(match="before a cached state"):
        world.allocate(session, 1, 1, num_rejected_tokens=[cached - 3])


def test_a_state_that_the_next_step_has_overwritten_is_not_cached_later() -> None:
    pool = KVCacheManager(config(specs=[FULL, replace(STATES, block_size=8)], prefix_match_unit=4, partial_hits=True))
    request = request_of(pool, "a", 6)
    request.num_prompt_tokens = 6
    for new in (4, 2):
        assert pool.allocate_slots(request, new, delay_cache_blocks=True, sequence=StepNumber(1))
    pool.cache_blocks(request, 4, sequence=StepNumber(1))
    assert pool.find_longest_cache_hit(request_of(pool, "a", 6)).num_tokens == 0


@pytest.mark.parametrize(
    ("budget", "most", "taken"), [(7, 0, 4), (4, 0, 4), (3, 0, 3), (11, 6, 6), (11, 10, 10), (99, 0, 13)]
)
def test_a_budget_cuts_an_admission_where_its_state_is_found(budget: int, most: int, taken: int) -> None:
    """A number of tokens that the scheduler states stays."""
    world, session = opened(specs=[FULL, STATES], retention_tokens=None)
    admitted = world.admit(session, 1, "abc", 13, num_new_tokens=[most], admission_budget_tokens=budget)
    assert admitted.num_new_tokens == [taken]
    plain, session = opened(specs=[FULL])
    assert plain.admit(session, 1, "abc", 13, admission_budget_tokens=budget).num_new_tokens == [min(budget, 13)]


@pytest.mark.parametrize(
    "options", [{"enable_caching": False}, {"hash_scheme": HashScheme(num_lookahead_tokens=3)}], ids=["none", "late"]
)
def test_hashes_that_a_request_does_not_have_yet_are_not_needed(options: dict[str, Any]) -> None:
    world = World(60, specs=[FullAttentionSpec(4), MambaSpec(4, only_step_ends=True)], **options)
    session, num_hashes = world.open(), world.pool.config.num_hashes(5)
    hashes = block_hashes("abcdef", num_hashes) if world.pool.config.enable_caching else b""
    world.admit(session, 1, "abcdef", 5, num_new_tokens=[4], block_hashes=hashes)
    for n in range(5, 20):
        world.decode(session, 1, "abcdef", num_prompt_tokens=[n + 1])
