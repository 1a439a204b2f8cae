"""One pass answers what a replay answers, at every size."""

import random

import pytest

from kvpool.client import ReuseOrder
from kvpool.replay.sweep import Curve, sweep
from kvpool.replay.trace_formats import TraceRequest
from support.replays import replayed

SIZES = 12


def prompt(*ids: int, length: int = 0, id_tokens: int = 1) -> TraceRequest:
    return TraceRequest(length or len(ids) * id_tokens, 0, ids, id_tokens)


def chats(seed: int, num_requests: int) -> list[TraceRequest]:
    """Turns of chats over shared system prompts, some of them sent again; a third of the prompts are whole blocks."""
    source = random.Random(seed)  # noqa: S311 - a workload
    systems = [tuple(range(1000 * i, 1000 * i + source.randint(1, 6))) for i in range(4)]
    histories = [source.choice(systems) for _ in range(40)]
    trace, next_id = [], 10_000
    for _ in range(num_requests):
        chat = source.randrange(len(histories))
        if source.random() < 0.7:
            count = source.randint(1, 5)
            histories[chat] += tuple(range(next_id, next_id + count))
            next_id += count
        if source.random() < 0.1:
            histories[chat] = source.choice(systems)
        cut = source.choice([0, 0, 1, source.randrange(512)])
        trace.append(TraceRequest(len(histories[chat]) * 512 - cut, 0, histories[chat]))
    return trace


def sizes_of(curve: Curve) -> list[int]:
    ratio = curve.max_blocks / curve.min_blocks
    return [round(curve.min_blocks * ratio ** (i / (SIZES - 1))) for i in range(SIZES)]


@pytest.mark.parametrize(
    ("order", "block_size"), [(ReuseOrder.LRU, 512), (ReuseOrder.UNCACHED_FIRST, 512), (ReuseOrder.LRU, 96)]
)
def test_the_sweep_equals_replays(order: ReuseOrder, block_size: int) -> None:
    trace = chats(block_size, 100)
    curve = sweep(trace, block_size, order)
    sizes = sizes_of(curve)
    assert len(set(sizes)) == SIZES
    found = {size: replayed(trace, size, block_size, order).hit_tokens for size in sizes}
    assert {size: curve.hit_tokens_at(size) for size in sizes} == found
    assert len(set(found.values())) > SIZES // 2, "sizes differ"


def test_a_block_hits_in_pools_as_large_as_the_blocks_since() -> None:
    curve = sweep([prompt(1, 2, 3, 4), prompt(5, 6), prompt(1, 2, 3, 4)], 1, ReuseOrder.LRU)
    assert (curve.requests, curve.input_tokens, curve.min_blocks, curve.max_blocks) == (3, 10, 5, 6)
    # Of 4 blocks and the null block, the second request took those of tokens 3 and 4. The last token never hits.
    assert [curve.hit_tokens_at(size) for size in (5, 6, 7, 1000)] == [2, 3, 3, 3]
    assert curve.hit_rate_at(5) == 0.2


def test_a_partial_block_takes_a_place_in_one_of_the_orders() -> None:
    trace = [prompt(1, 2, length=3, id_tokens=2), prompt(3, 4, length=3, id_tokens=2), prompt(1, 2, id_tokens=2)]
    assert sweep(trace, 2, ReuseOrder.LRU).max_blocks == 4
    assert sweep(trace, 2, ReuseOrder.UNCACHED_FIRST).max_blocks == 4  # the second one's is used before the look-up
    apart = [trace[0], prompt(3, id_tokens=2), trace[2]]
    assert [sweep(apart, 2, order).max_blocks for order in (ReuseOrder.LRU, ReuseOrder.UNCACHED_FIRST)] == [3, 3]


@pytest.mark.parametrize("order", ReuseOrder)
def test_copies_take_places_only_where_the_earlier_one_is_left(order: ReuseOrder) -> None:
    again = [
        prompt(1, 2),
        prompt(10, 11, 12),
        prompt(1, 2),
        prompt(20, 21),
        prompt(1, 2, 3),
        prompt(30),
        prompt(20, 21, 22),
    ]
    curve = sweep(again, 1, order)
    for size in range(curve.min_blocks, curve.max_blocks + 2):
        assert curve.hit_tokens_at(size) == replayed(again, size, 1, order).hit_tokens


def test_without_a_hit_the_curve_is_flat() -> None:
    curve = sweep([prompt(1), prompt(2, 3)], 1, ReuseOrder.LRU)
    assert (curve.min_blocks, curve.max_blocks) == (3, 3)
    assert [curve.hit_tokens_at(size) for size in (3, 100)] == [0, 0]
