"""The limit on the work of one step, during which other sessions wait."""

from typing import Any

import pytest

from kvpool.core.blocks import prefix_search
from kvpool.core.blocks.kv_cache_manager import KVCacheManager
from kvpool.core.blocks.prefix_search import TRY_PROBES
from kvpool.core.ids import BlockHash, RequestId, RequestNumber, SessionNumber
from kvpool.core.sessions.request import Request
from kvpool.core.sessions.session import Session
from kvpool.core.specs.base import KVCacheSpec
from kvpool.core.specs.kinds import FullAttentionSpec, MambaSpec, SlidingWindowSpec
from kvpool.core.steps.columns import MAX_STEP_WORK, Operation, Outcome
from support.core import World, admit, block_hashes, config, request_of


def declared(world: World, num_tokens: int, num_hashes: int, num_requests: int = 1) -> Session:
    """A session with requests from number 1 on, with the given numbers of tokens and hashes each, without blocks."""
    session = world.open()
    hashes = block_hashes("", num_hashes) * num_requests
    world.declare_all(session, [Operation.APPEND] * num_requests, "", num_tokens, block_hashes=hashes)
    return session


@pytest.mark.parametrize(
    "spec",
    [FullAttentionSpec(1), SlidingWindowSpec(1, sliding_window=250), MambaSpec(1)],
)
def test_a_lookup_that_misses_counts_every_probe(spec: KVCacheSpec) -> None:
    class Hashes(list[BlockHash]):
        touched = 0

        def __getitem__(self, at: Any) -> Any:
            Hashes.touched += len(range(*at.indices(len(self)))) if isinstance(at, slice) else 1
            return super().__getitem__(at)

    pool = KVCacheManager(config(specs=[spec]))
    request = Request(RequestId("r"), RequestNumber(1), SessionNumber(1), pool.new_tables(), 2**10)
    request.hashes = Hashes([BlockHash(b"x" * 32)] * 2**10)
    computed = pool.find_longest_cache_hit(request)
    tries = (computed.num_probes - TRY_PROBES) // TRY_PROBES
    assert (computed.num_tokens, computed.block_ids) == (0, ([],))
    assert Hashes.touched <= tries + 1  # one hash to explain the miss


def test_lookups_that_miss_are_skipped_after_the_work_limit() -> None:
    world = World(specs=[MambaSpec(1)])
    cost = TRY_PROBES * 250  # one try per block of the first 249, and one for the group
    tried = -(-MAX_STEP_WORK // cost)
    session = declared(world, 250, 250, num_requests=tried + 2)
    assert world.pool.find_longest_cache_hit(session.by_number[RequestNumber(1)]).num_probes == cost
    numbers = [*range(1, tried + 3)]
    result = world.run(session, *[Operation.LOOKUP_UNCOUNTED] * len(numbers), request_numbers=numbers)
    assert result.outcomes == [Outcome.OK] * tried + [Outcome.SKIPPED] * 2


def test_a_step_of_many_short_lookups_and_admissions_is_completed() -> None:
    world = World(specs=[FullAttentionSpec(1)] * 4, num_blocks=4 * 4096 + 1)
    hashes = b"".join(i.to_bytes(32, "big") for i in range(2 * 4096))
    columns: dict[str, Any] = {"num_new_tokens": [1] * 4096, "block_hashes": hashes}
    assert world.declare_all(world.open(), [Operation.ADMIT] * 4096, "", 2, **columns).outcomes == []


def test_a_long_lookup_of_a_narrow_window_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = KVCacheManager(config(300, specs=[MambaSpec(1)]))
    request = admit(pool, "", 250)
    pool.blocks.evict_blocks(request.tables[0].block_ids[100:])
    assert pool.find_longest_cache_hit(request_of(pool, "", 250)).num_tokens == 100
    monkeypatch.setattr(prefix_search, "MAX_TRIES", 149)
    assert pool.find_longest_cache_hit(request_of(pool, "", 250)).num_tokens == 0
    monkeypatch.setattr(prefix_search, "MAX_TRIES", 150)
    assert pool.find_longest_cache_hit(request_of(pool, "", 250)).num_tokens == 100


def test_hashes_joined_for_a_lookup_count_once() -> None:
    world = World(specs=[FullAttentionSpec(4), FullAttentionSpec(8)])
    session = declared(world, 80, 20)
    request = session.by_number[RequestNumber(1)]
    first = world.pool.find_longest_cache_hit(request).num_probes
    assert first - world.pool.find_longest_cache_hit(request).num_probes == 20
