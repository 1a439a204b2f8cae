"""Messages that describe the core."""

from kvpool.core.ids import BlockId
from kvpool.core.specs.kinds import FullAttentionSpec, SlidingWindowSpec
from kvpool.core.steps.columns import Operation
from kvpool.core.views.inspection import block_holders
from kvpool.core.views.misses import explain_prompt
from kvpool.v1 import admin_pb2
from kvpool.wire import picture
from support.core import World, block_hashes


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


def test_a_block_of_host_memory_is_described_with_the_session_that_copies_it() -> None:
    world = World(18, num_host_blocks=32)
    session = world.open()
    world.admit(session, 1, "abcd", 16)
    world.run(session, Operation.FREE, request_numbers=[1], executed=1)
    world.admit(session, 2, "efgh", 16, executed=2)
    for state, ref_cnt, pending in (("USED", 1, True), ("CACHED", 0, False)):
        info = picture.block_info(world.pool, BlockId(18))
        assert admin_pb2.BlockState.Name(info.state) == f"BLOCK_STATE_{state}"
        assert (info.in_host_memory, info.ref_cnt, info.pending, info.session_number) == (True, ref_cnt, pending, 1)
        assert info.block_hash == picture.block_info(world.pool, BlockId(4)).block_hash
        world.executed(session)
    assert not picture.block_info(world.pool, BlockId(17)).in_host_memory


def test_the_end_of_a_prompt_says_what_is_in_host_memory_and_which_session_copies_what_is_missing() -> None:
    world = World(18, num_host_blocks=32)
    session, other = world.open(), world.open()
    world.admit(session, 1, "abcd", 16)
    world.run(session, Operation.FREE, request_numbers=[1], executed=1)
    world.admit(session, 2, "efgh", 16, executed=2)  # copies the blocks of the first
    world.admit(session, 3, "ijklmnopqr", 40)  # takes block 4
    ends = []
    for _ in range(2):
        end = explain_prompt(world.pool, other, 17, block_hashes("abcd", 4))
        ends.append(picture.prompt_end_info(end))
        world.executed(session)
    assert [(end.hit_tokens, end.host_tokens) for end in ends] == [(12, 0), (16, 4)]
    assert ends[0].groups[0].filling_session_number == session.session_number
