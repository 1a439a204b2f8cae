"""The estimate of hits at other sizes: alone, in a pool, and against the exact curve."""

import hashlib
import random
from itertools import pairwise

import pytest

from kvpool.client import ReuseOrder
from kvpool.core import hit_curve
from kvpool.core.execution import apply
from kvpool.core.hit_curve import MAX_SAMPLED, MULTIPLES, HitCurve
from kvpool.core.ids import BlockHash, MapId, RequestNumber
from kvpool.core.sessions.session import Session
from kvpool.core.specs.kinds import FullAttentionSpec, SlidingWindowSpec
from kvpool.core.specs.pool_config import HashScheme
from kvpool.core.steps.columns import Operation, Outcome
from kvpool.replay.sweep import sweep
from kvpool.replay.trace_formats import TraceRequest
from support.core import World, block_hashes, config
from support.state import DrivenState

ALL = 4096
"""A block size of which every hash is sampled."""
FIRST = MapId(0)


def hashes(*numbers: int) -> list[BlockHash]:
    return [BlockHash(hashlib.sha256(b"%d" % number).digest()) for number in numbers]


def curve_of(num_blocks: int, block_size: int) -> HitCurve:
    curve = HitCurve.for_pool(config(num_blocks + 1, block_size))
    assert curve
    return curve


def test_a_list_that_is_cut_into_parts_finds_what_lists_of_these_sizes_find() -> None:
    source, curve = random.Random(5), curve_of(20, ALL)  # noqa: S311 - a workload
    order: list[int] = []  # newest first
    found = dict.fromkeys(MULTIPLES, 0)
    for _ in range(2000):
        start = source.choice([0, 100, 200, 300]) + source.randrange(8) * 10
        prompt = list(range(start, start + source.randint(1, 9)))
        for multiple in MULTIPLES:
            kept = set(order[: int(20 * multiple)])
            found[multiple] += sum(number in kept for number in prompt)
        order = prompt + [number for number in order if number not in prompt]
        curve.record_lookup(FIRST, hashes(*prompt), None)
    assert curve.changed_tokens == {m: ALL * (found[m] - found[1.0]) for m in MULTIPLES if m != 1.0}
    assert [a < b for a, b in pairwise(found.values())] == [True] * 3


@pytest.mark.parametrize("size_bytes", [8, 32])
def test_samples_hashes_by_a_key(size_bytes: int) -> None:
    pool_config = config(1000, 16, hash_scheme=HashScheme("own", size_bytes))
    given = [each[:size_bytes] for each in hashes(*range(20_000))]
    found = []
    for key in (b"a", b"b", b"a"):
        curve = HitCurve.for_pool(pool_config, key)
        assert curve
        sampled = curve.sample(b"".join(given))
        assert 100 < len(sampled) < 220, "one of 128"
        assert [each for one in given if curve.marks[one[curve.at]] for each in curve.sample(one)] == sampled
        assert curve.sample(b"") == []
        found.append(set(sampled))
    assert found[0] == found[2]
    assert len(found[0] & found[1]) < 20, "another key, another sample"


def test_hashes_that_begin_alike_are_sampled_as_others_for_most_keys() -> None:
    alike = b"".join(bytes(2) + each[2:] for each in hashes(*range(2000)))
    curves = [HitCurve(config(1000, 16), b"%d" % key) for key in range(200)]
    assert sum(len(curve.sample(alike)) > 100 for curve in curves) < 40


def test_a_request_keeps_few_sampled_hashes_even_of_a_client_that_knows_them() -> None:
    world = World(9)
    assert world.pool.hit_curve
    known = world.pool.hit_curve.sample(b"".join(hashes(*range(10_000))))[:10]
    session = world.open()
    world.run(session, Operation.APPEND, request_numbers=[1], num_appended_tokens=[40], block_hashes=b"".join(known),
              request_ids=["r"])  # fmt: skip
    request = session.by_number[RequestNumber(1)]
    assert request.sampled == known[:8]
    world.run(session, Operation.APPEND, request_numbers=[1], num_appended_tokens=[40], block_hashes=b"".join(known))
    assert request.sampled == known[:8]


def test_steps_skip_the_same_operations_with_every_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """A standby and a server that recovers have another key, and must come to the same state."""
    monkeypatch.setattr(apply, "MAX_STEP_WORK", 200)
    worlds = [World(9, DrivenState(sample_key=bytes([i]) * 16)) for i in range(2)]
    curve = worlds[0].pool.hit_curve
    assert curve
    known = b"".join(curve.sample(b"".join(hashes(*range(20_000))))[:10])
    lookups = [Operation.LOOKUP] * 20
    results = [each.declare_all(each.open(), lookups, "", 40, block_hashes=known * 20) for each in worlds]
    assert results[0] == results[1]
    assert Outcome.SKIPPED in results[0].outcomes


def test_large_pools_sample_fewer_hashes() -> None:
    curve = curve_of(2**26, 16)
    assert len(curve.sample(b"".join(hashes(*range(60_000))))) < 20
    for i in range(3 * MAX_SAMPLED // 1000):
        curve.record_freed(FIRST, [BlockHash(b"%d" % n) for n in range(1000 * i, 1000 * i + 1000)])
    assert curve.record_freed(FIRST, [BlockHash(b"0")]) == [len(MULTIPLES)], "forgotten: memory is bounded"


def test_a_last_block_is_not_found_but_moves() -> None:
    curve = curve_of(2, ALL)
    first, second = hashes(1, 2)
    curve.record_lookup(FIRST, [first, second], second)
    curve.record_lookup(FIRST, [first, second], second)
    assert sum(curve.found_tokens) == 2 * ALL
    assert curve.record_freed(FIRST, [second]) == [1]


def test_scopes_do_not_find_each_others_hashes() -> None:
    curve = curve_of(2, ALL)
    curve.record_freed(FIRST, hashes(1))
    assert curve.record_freed(MapId(1), hashes(1)) == [len(MULTIPLES)]
    assert curve.record_freed(MapId(1), hashes(1)) == [0]


def test_estimates_are_within_two_points_of_the_exact_curve_on_average() -> None:
    source = random.Random(1)  # noqa: S311 - a workload
    histories: list[tuple[int, ...]] = [(0,)] * 300
    trace, next_id = [], 1
    for _ in range(5000):
        chat = int(source.triangular(0, 300, 0))
        if len(histories[chat]) > 12:
            histories[chat] = (0,)  # all chats begin with the same prompt
        count = source.randint(1, 3)
        histories[chat] += tuple(range(next_id, next_id + count))
        next_id += count
        trace.append(TraceRequest(512 * len(histories[chat]) - 1, 0, histories[chat]))
    num_blocks, exact = 1000, sweep(trace, 512, ReuseOrder.UNCACHED_FIRST)
    curves = [HitCurve(config(num_blocks, 512), b"%d" % key) for key in range(4)]
    for entry in trace:
        block_hash, joined = b"", b""
        for number in entry.hash_ids[:-1]:  # the last block is partial
            block_hash = hashlib.sha256(block_hash + b"%d" % number).digest()
            joined += block_hash
        for curve in curves:
            if sampled := curve.sample(joined):
                curve.record_lookup(FIRST, sampled, None)
    for multiple in curves[0].changed_tokens:
        change = exact.hit_rate_at(int(num_blocks * multiple)) - exact.hit_rate_at(num_blocks)
        assert abs(change) > 0.05
        estimates = [curve.changed_tokens[multiple] / exact.input_tokens for curve in curves]
        assert sum(estimates) / len(curves) == pytest.approx(change, abs=0.02)
        assert estimates == pytest.approx([change] * len(curves), abs=0.04)


def test_sizes_of_a_pool_with_host_memory_are_of_both_tiers() -> None:
    one, two = HitCurve(config(101, ALL)), HitCurve(config(41, ALL, num_host_blocks=60))
    for start in (*range(0, 200, 7), *range(0, 200, 11)):
        for curve in (one, two):
            curve.record_lookup(FIRST, hashes(*range(start, start + 20)), None)
    assert sum(one.found_tokens[1:4]) > 0
    assert one.found_tokens == two.found_tokens


def test_pools_for_which_there_is_no_estimate() -> None:
    assert not HitCurve.for_pool(config(9, 4, [SlidingWindowSpec(4, sliding_window=8)]))
    assert not HitCurve.for_pool(config(9, enable_caching=False))
    assert not HitCurve.for_pool(config(9, 4, [FullAttentionSpec(4), SlidingWindowSpec(4, sliding_window=8)]))


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    """A pool of 8 blocks, of which every hash is sampled."""
    monkeypatch.setattr(hit_curve, "TOKENS_PER_SAMPLE", 4)
    return World(9)


def found(world: World) -> list[int]:
    """Blocks found in each part of the list: within 4, 8, 16 and 32 blocks, and in none."""
    assert world.pool.hit_curve
    return [tokens // 4 for tokens in world.pool.hit_curve.found_tokens]


def test_admissions_count_and_frees_move_to_the_front(world: World, session: Session) -> None:
    world.admit(session, 1, "abcd", 16)
    assert found(world) == [0, 0, 0, 0, 3], "the last block never hits"
    world.admit(session, 2, "wxyz", 15)
    world.free(session, 1)
    world.free(session, 2)
    world.admit(session, 3, "abcd", 17)
    assert found(world) == [1, 3, 0, 0, 6], "w, x, y and a are in the first 4 places"


def test_blocks_of_outputs_are_found_once_they_are_freed(world: World, session: Session) -> None:
    world.admit(session, 1, "ab", 7)
    world.decode(session, 1, "ab")
    world.free(session, 1)
    world.admit(session, 2, "ab", 9)
    assert found(world) == [2, 0, 0, 0, 1]


def test_refused_and_preempted_requests_do_not_count(world: World, session: Session) -> None:
    world.admit(session, 1, "abcdefgh", 32)
    counted = found(world)
    world.admit(session, 2, "abcdefghij", 40)
    assert found(world) == counted
    world.run(session, Operation.PREEMPT, request_numbers=[1])
    world.run(session, Operation.ADMIT, request_numbers=[1], num_new_tokens=[32])
    assert found(world) == counted


def test_a_reset_forgets_hashes_and_an_epoch_keeps_counters(world: World, session: Session) -> None:
    for number in (1, 2):
        world.admit(session, number, "ab", 9)
        world.free(session, number)
    assert found(world) == [2, 0, 0, 0, 2]
    world.run(session, Operation.RESET)
    world.admit(session, 3, "ab", 9)
    assert found(world) == [2, 0, 0, 0, 4]
    world.pool.begin_epoch(world.pool.config, 7)
    assert found(world) == [2, 0, 0, 0, 4]
    assert world.pool.hit_curve
    assert world.pool.hit_curve.record_freed(FIRST, [BlockHash(block_hashes("a", 1))]) == [len(MULTIPLES)]
