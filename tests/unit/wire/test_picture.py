"""Messages that describe the core."""

from kvpool.core.ids import BlockId
from kvpool.core.specs.kinds import FullAttentionSpec, SlidingWindowSpec
from kvpool.core.steps.columns import Operation
from kvpool.core.views.inspection import block_holders
from kvpool.v1 import admin_pb2
from kvpool.wire import picture
from support.core import World


def test_a_session_is_described_with_the_blocks_of_each_group() -> None:
    world = World(100, specs=[FullAttentionSpec(4), SlidingWindowSpec(4, sliding_window=8)])
    world.now_seconds = 100.0
    session = world.open(lease_seconds=30.0)
    world.admit(session, 1, "abcdefgh", 32)
    world.run(
        session,
        Operation.ALLOCATE,
        Operation.APPEND,
        request_numbers=[1, 2],
        num_appended_tokens=[4, 9],
        num_new_tokens=[4, 0],
        block_hashes=b"i" * 32 + b"x" * 64,
        request_ids=["r2"],
        executed=1,
    )
    session.last_seen_seconds = 105.0
    info = picture.session_info(world.pool, session, 107.0)
    assert (info.session_number, info.pool_name, info.lease_seconds) == (1, "m", 30.0)
    assert (info.age_seconds, info.idle_seconds, info.streaming) == (7.0, 2.0, False)
    assert (info.sequence, info.executed_sequence) == (2, 1)
    assert (info.requests, info.running_requests, list(info.held_blocks)) == (2, 1, [9, 3])
    assert session.session_id not in str(info)
    first, second = (picture.request_info(world.pool, each) for each in session.requests.values())
    assert (first.request_id, first.num_tokens, first.num_computed_tokens, list(first.held_blocks)) == (
        "r1",
        36,
        36,
        [9, 3],
    )
    assert (second.request_id, second.num_tokens, second.num_computed_tokens, list(second.held_blocks)) == (
        "r2",
        9,
        0,
        [0, 0],
    )


def test_a_preempted_request_waits_and_counts_its_preemptions() -> None:
    world = World()
    session = world.open()
    world.admit(session, 1, "ab", 8)
    world.run(session, Operation.PREEMPT, request_numbers=[1])
    (request,) = (picture.request_info(world.pool, each) for each in session.requests.values())
    assert (request.num_preemptions, request.num_computed_tokens, list(request.held_blocks)) == (1, 0, [0])
    assert picture.session_info(world.pool, session, 0.0).running_requests == 0
    assert block_holders(world.sessions()) == []


def test_a_block_is_described_with_its_state_and_its_contents() -> None:
    world = World(20)
    session, other = world.open(), world.open()
    world.admit(session, 1, "abc", 12)
    world.admit(other, 1, "xy", 10, executed=0)
    world.run(session, Operation.FREE, request_numbers=[1], executed=1)
    infos = [picture.block_info(world.pool, BlockId(block_id)) for block_id in range(1, 20)]
    cached = [info for info in infos if info.state == admin_pb2.BLOCK_STATE_CACHED]
    assert [(b.session_number, b.pending, b.ref_cnt) for b in cached] == [(session.session_number, False, 0)] * 3
    pending = [info for info in infos if info.pending]
    assert [(b.session_number, b.ref_cnt, len(b.block_hash)) for b in pending] == [(other.session_number, 1, 32)] * 2
    assert {b.state for b in pending} == {admin_pb2.BLOCK_STATE_USED}
    assert not any(b.block_hash for b in infos if b.state == admin_pb2.BLOCK_STATE_FREE)
