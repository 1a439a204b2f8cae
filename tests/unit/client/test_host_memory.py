"""Pools with blocks in host memory: what the client accepts as an answer, and what a request then holds."""

from dataclasses import replace
from itertools import chain
from typing import Any, Final

import pytest

from kvpool.client import Answer, FullAttentionSpec, KVCacheGroup, PoolConfig, Request, ServerError, SlidingWindowSpec
from kvpool.client.protocol import SessionProtocol
from kvpool.core.blocks.prefix_search import ComputedBlocks
from kvpool.core.ids import BlockHash, BlockId, GroupId, PoolName, RequestId, RequestNumber, StepNumber
from kvpool.core.sessions.request import BlockCopy
from kvpool.core.specs.base import KVCacheSpec
from kvpool.core.specs.kinds import MambaSpec
from kvpool.core.steps.allocation_options import AllocationOptions
from kvpool.core.steps.columns import Outcome, StepResult

FULL: Final = FullAttentionSpec(4)
WINDOW: Final = SlidingWindowSpec(4, sliding_window=6)
HOST: Final = 10
"""The first of ten blocks of host memory, after ten of the first tier."""
CHANGED: Final = Outcome.HIT_CHANGED


def pool(*specs: KVCacheSpec, **values: Any) -> PoolConfig:
    groups = tuple(KVCacheGroup(spec, (f"layer.{i}",)) for i, spec in enumerate(specs or (FULL,)))
    return PoolConfig(PoolName("m"), HOST, 64, groups, allow_too_few_blocks=True, **{"num_host_blocks": 10, **values})


class Engine:
    """A session without a service, with a request of 12 tokens. Results are those of the test."""

    def __init__(self, config: PoolConfig) -> None:
        self.protocol = SessionProtocol(config)
        num_hashes = 12 // config.hash_block_size
        self.request = Request(
            RequestId("r"),
            RequestNumber(1),
            list(range(12)),
            len(config.groups),
            known_hashes=[BlockHash(bytes(32))] * num_hashes,
        )

    def answer(self, operation: str, *arguments: Any, result: dict[str, Any], **options: Any) -> Answer:
        """Makes a step of one operation on the request, or on the pool, and answers it."""
        builder = self.protocol.new_step(0, 0, 0)
        named = () if operation == "evict_blocks" else (self.request,)
        answer: Answer = getattr(builder, operation)(*named, *arguments, **options)
        step = self.protocol.encode(builder)
        self.protocol.apply_result(StepResult(StepNumber(step.sequence), **result))
        return answer

    def hit(self, *block_ids: list[int], num_tokens: int) -> ComputedBlocks:
        """Looks the request up; finds these blocks, per group."""
        answer = self.answer("get_computed_blocks", result=_found(*block_ids, num_tokens=num_tokens))
        assert answer.hit_blocks == [*block_ids]
        computed = answer.computed
        assert computed
        return computed


def _found(*block_ids: list[int], num_tokens: int = 0) -> dict[str, Any]:
    counts = [len(ids) for ids in block_ids]
    hit_tokens = [num_tokens] if num_tokens else []
    return {"block_ids": list(chain(*block_ids)), "num_prefix_blocks": counts, "num_hit_tokens": hit_tokens}


def _allocated(*block_ids: list[int], new: list[list[int]], **columns: Any) -> dict[str, Any]:
    result = _found(*block_ids)
    ids = [*result["block_ids"], *chain(*new)]
    return {**result, "block_ids": ids, "num_new_blocks": [len(each) for each in new], **columns}


def test_a_request_has_the_blocks_to_which_its_promised_hit_is_copied() -> None:
    engine = Engine(pool())
    computed = engine.hit([3, HOST + 1], num_tokens=8)
    copies = [0, HOST + 1, 5, 0, 7, HOST]
    result = _allocated([3, 5], new=[[6]], copied_block_ids=copies)
    answer = engine.answer("allocate_slots", 4, computed=computed, result=result)
    assert engine.request.block_ids == [[3, 5, 6]]
    assert (answer.new_blocks, engine.request.num_computed_tokens) == ([[6]], 12)
    assert engine.protocol.copies == [
        BlockCopy(GroupId(0), BlockId(HOST + 1), BlockId(5), StepNumber(2)),
        BlockCopy(GroupId(0), BlockId(7), BlockId(HOST), StepNumber(2)),
    ]


def test_a_hit_in_the_first_tier_is_not_answered_again() -> None:
    for config in (pool(), pool(num_host_blocks=0)):
        engine = Engine(config)
        computed = engine.hit([3, 4], num_tokens=8)
        engine.answer("allocate_slots", 4, computed=computed, result=_allocated([], new=[[6]]))
        assert engine.request.block_ids == [[3, 4, 6]]


def test_an_admission_names_the_blocks_to_which_its_hit_is_copied() -> None:
    engine = Engine(pool())
    result = _allocated([3, 5], new=[[6]], num_hit_tokens=[8], num_new_tokens=[4], copied_block_ids=[0, HOST, 5])
    engine.answer("admit", result=result)
    assert engine.request.block_ids == [[3, 5, 6]]


def test_external_tokens_move_a_window_past_the_blocks_that_are_answered_again() -> None:
    engine = Engine(pool(FULL, WINDOW))
    computed = engine.hit([HOST, 2], [HOST + 1, 4], num_tokens=8)
    result = _allocated([5, 2], [6, 4], new=[[7], [8]])
    options = AllocationOptions(num_external_tokens=3)
    engine.answer("allocate_slots", 0, computed=computed, options=options, result=result)
    assert engine.request.block_ids == [[5, 2, 7], [0, 4, 8]]
    assert engine.request.num_computed_tokens == 11


def test_a_copy_takes_the_place_of_a_block_within_which_a_hit_of_both_tiers_ends() -> None:
    specs = FullAttentionSpec(4), MambaSpec(4, only_step_ends=True)
    engine = Engine(pool(*specs, prefix_match_unit=2, partial_hits=True))
    computed = engine.hit([HOST, HOST + 1], [0, HOST + 2], num_tokens=6)
    result = _allocated([3, 4], [0, 5], new=[[6, 7], [8, 9]])
    engine.answer("allocate_slots", 6, computed=computed, result=result)
    assert engine.request.block_ids == [[3, 6, 7], [0, 8, 9]]


def test_a_changed_hit_can_have_blocks_of_host_memory() -> None:
    engine = Engine(pool())
    computed = engine.hit([3, HOST], num_tokens=8)
    result = {**_found([3, HOST + 2], num_tokens=8), "outcomes": [CHANGED]}
    answer = engine.answer("allocate_slots", 4, computed=computed, result=result)
    assert (answer.outcome, answer.hit_blocks) == (CHANGED, [[3, HOST + 2]])
    assert engine.request.block_ids == [[]]


MALFORMED: Final = {
    "a new block": (_allocated([3, 5], new=[[HOST]]), "block_ids"),
    "a hit that is not copied": (_allocated([3, HOST], new=[[6]]), "block_ids"),
    "a hit that is not answered again": (_allocated([], new=[[6]]), "num_prefix_blocks"),
    "a shorter hit": (_allocated([3], new=[[6]]), "num_prefix_blocks"),
    "no such block": ({**_found([3, 20], num_tokens=8), "outcomes": [CHANGED]}, "block_ids"),
    "a copy within host memory": (
        _allocated([3, 5], new=[[6]], copied_block_ids=[0, HOST, 5, 0, HOST, HOST + 1]),
        "copied_block_ids",
    ),
    "a copy of no block": (_allocated([3, 5], new=[[6]], copied_block_ids=[0, 20, 5]), "copied_block_ids"),
    "a copy of no group": (_allocated([3, 5], new=[[6]], copied_block_ids=[1, HOST, 5]), "copied_block_ids"),
    "half a copy": (_allocated([3, 5], new=[[6]], copied_block_ids=[0, HOST]), "copied_block_ids"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_a_malformed_answer_changes_nothing(case: str) -> None:
    engine = Engine(pool())
    computed = engine.hit([3, HOST], num_tokens=8)
    result, column = MALFORMED[case]
    with pytest.raises(ServerError, match="malformed") as caught:
        engine.answer("allocate_slots", 4, computed=computed, result=result)
    assert caught.value.field == column
    assert (engine.request.block_ids, engine.request.num_computed_tokens) == ([[]], 0)
    assert (engine.protocol.copies, engine.protocol.sequence) == ([], 1)
    engine.protocol.apply_result(StepResult(StepNumber(2), **_allocated([3, 5], new=[[6]])))
    assert engine.request.block_ids == [[3, 5, 6]]


def test_an_admission_with_a_block_of_host_memory_is_malformed() -> None:
    engine = Engine(pool())
    for result in (_allocated([HOST], new=[[3, 4]]), _allocated([3], new=[[4, HOST]])):
        with pytest.raises(ServerError, match="malformed"):
            engine.answer("admit", result={**result, "num_hit_tokens": [4], "num_new_tokens": [8]})
        engine.protocol.apply_result(StepResult(StepNumber(engine.protocol.sequence + 1), outcomes=[Outcome.NO_BLOCKS]))
    assert engine.request.block_ids == [[]]


def test_a_pool_without_host_memory_has_no_such_blocks() -> None:
    engine = Engine(replace(pool(), num_host_blocks=0))
    with pytest.raises(ServerError, match="malformed"):
        engine.hit([3, HOST], num_tokens=8)


def test_blocks_of_host_memory_are_evicted_beside_other_operations() -> None:
    engine = Engine(pool())
    engine.answer("evict_blocks", [HOST + 3, 4], result={})
    assert engine.protocol.sequence == 1
