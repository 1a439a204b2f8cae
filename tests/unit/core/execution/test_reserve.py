"""Slots in reserve: rule 6 of slot_allocator.py, rule 7 of apply.py, and what a session owes to others."""

from collections.abc import Callable
from typing import Any, Final

import pytest

from kvpool.core.blocks.quota import Quota
from kvpool.core.errors import InvalidArgumentError, KvpoolError, WrongStateError
from kvpool.core.ids import RequestNumber
from kvpool.core.sessions.session import MAX_RESERVE_TOKENS, Session
from kvpool.core.specs.kinds import FullAttentionSpec, MambaSpec, SlidingWindowSpec
from kvpool.core.steps.columns import Operation, Outcome, StepResult
from support.core import World, block_hashes
from support.integrity import check_integrity
from support.journal import Recorder, assert_alike, replay
from support.state import restored

ADMIT, ALLOCATE, APPEND, FREE = Operation.ADMIT, Operation.ALLOCATE, Operation.APPEND, Operation.FREE
RESERVE: Final = Operation.RESERVE
STATES: Final = (FullAttentionSpec(4), MambaSpec(4, only_step_ends=True))
WINDOWED: Final = (FullAttentionSpec(4), SlidingWindowSpec(4, sliding_window=5))
"""Groups for which a request of 8 tokens has left a block behind the window."""


@pytest.fixture(autouse=True)
def _books_balance(monkeypatch: pytest.MonkeyPatch) -> None:
    run = World.run

    def checked(world: World, *args: Any, **columns: Any) -> StepResult:
        result = run(world, *args, **columns)
        check_integrity(world.pool, world.sessions())
        return result

    monkeypatch.setattr(World, "run", checked)


def reserve(world: World, session: Session, number: int, num_slots: int, **columns: Any) -> StepResult:
    """Reports tokens of a request, and asks for slots after the computed tokens."""
    columns = {"request_numbers": [number], "num_lookahead_tokens": [num_slots], **columns}
    return world.run(session, RESERVE, **columns)


def tables(session: Session, number: int = 1) -> list[list[int]]:
    return [list(table.block_ids) for table in session.by_number[RequestNumber(number)].tables]


def holding(num_blocks: int = 20, reserve_tokens: int = 8, **options: Any) -> tuple[World, Session]:
    """A session whose request 1 has computed 5 tokens, and holds slots for 16: 4 blocks of each group."""
    world = World(num_blocks, **options)
    session = world.open(reserve_tokens=reserve_tokens)
    world.admit(session, 1, "a", 5)
    return world, session


def report(world: World, session: Session, **columns: Any) -> StepResult:
    """Reports that request 1 has computed 8 tokens, and filled its second block."""
    filled = {"num_taken_tokens": [3], "num_appended_tokens": [3], "block_hashes": block_hashes("ab", 2)[32:]}
    return reserve(world, session, 1, 8, **filled, **columns)


@pytest.mark.parametrize(
    ("num_tokens", "columns", "num_blocks"),
    [(5, {}, 4), (8, {}, 4), (5, {"num_lookahead_tokens": [4]}, 5), (9, {"num_new_tokens": [2]}, 3), (250, {}, 64)],
)
def test_an_admission_takes_blocks_for_further_slots(num_tokens: int, columns: Any, num_blocks: int) -> None:
    """Up to max_model_len, 256."""
    world = World(100, enable_caching=False)
    session = world.open(reserve_tokens=8)
    admitted = world.admit(session, 1, "", num_tokens, **columns)
    assert (admitted.num_new_blocks, admitted.credit_tokens) == ([num_blocks], [num_blocks * 4])


def test_a_hit_counts_towards_the_slots() -> None:
    world, session = holding()
    admitted = world.admit(session, 2, "a", 5)
    assert (admitted.num_hit_tokens, admitted.num_new_blocks, admitted.credit_tokens) == ([4], [3], [16])
    assert world.allocate(session, 1, 11).num_new_blocks == [2]  # slots for 16 + 8 tokens


@pytest.mark.parametrize("spare", ["", "num_reserved_blocks", "num_watermark_blocks"])
@pytest.mark.parametrize(("num_left", "num_taken"), [(7, 4), (6, 2)])
def test_a_reserve_leaves_blocks_for_the_running_requests(spare: str, num_left: int, num_taken: int) -> None:
    """All of it is taken, or none: a block for each of the 2 running requests and one more stay, and the spare ones."""
    columns = {spare: [3]} if spare else {}
    world = World(1 + 2 + num_left + 3 * bool(spare), enable_caching=False)
    session, other = world.open(reserve_tokens=8), world.open()
    world.admit(other, 1, "", 4)
    world.admit(other, 2, "", 4)
    assert world.admit(session, 1, "", 5, **columns).num_new_blocks == [num_taken]


def test_filled_blocks_are_reported_and_found_once_their_step_was_executed() -> None:
    world, session = holding()
    other = world.open()
    world.executed(session)
    reported = report(world, session, num_credit_allocations=3)
    assert (reported.num_new_blocks, reported.credit_tokens) == ([], [16])
    assert (world.num_found(session, "ab"), world.num_found(other, "ab")) == (8, 4)
    world.executed(session, 2)
    assert world.num_found(other, "ab") == 8


@pytest.mark.parametrize(("operation", "num_kept"), [(FREE, 8), (Operation.PREEMPT, 4)])
def test_a_free_keeps_a_block_that_a_later_step_than_the_launched_reported(operation: Operation, num_kept: int) -> None:
    """The token that filled it has run, and one more. A preemption can come before the token has run."""
    world, session = holding()
    other = world.open()
    world.executed(session)
    report(world, session, launched_sequence=1)
    world.run(session, operation, request_numbers=[1], num_taken_tokens=[1], launched_sequence=1)
    assert (world.num_found(session, "ab"), world.num_found(other, "ab")) == (num_kept, 4)
    world.executed(session)
    assert world.num_found(other, "ab") == num_kept


@pytest.mark.parametrize("specs", [(), WINDOWED])
def test_allocations_within_the_reserve_cache_and_free_at_once(specs: tuple[Any, ...]) -> None:
    world, session = holding(specs=specs)
    world.allocate(session, 1, 7, num_appended_tokens=[7], block_hashes=block_hashes("abc", 3)[32:])
    world.allocate(session, 1, 1)
    assert world.num_found(session, "abc") == 12
    assert [table.count(0) for table in tables(session)] == [0, 2][: len(specs) or 1]


def test_reports_fill_up_and_give_back() -> None:
    world, session = holding(enable_caching=False)
    before = list(world.pool.blocks.free_list)
    filled = reserve(world, session, 1, 14)
    assert (filled.num_new_blocks, filled.block_ids, filled.credit_tokens) == ([1], before[:1], [20])
    assert reserve(world, session, 1, 2).credit_tokens == [8]
    assert list(world.pool.blocks.free_list)[:3] == [5, 4, 3]  # last first, as when a request is freed
    assert reserve(world, session, 1, 0, num_taken_tokens=[3]).credit_tokens == [8]
    assert tables(session) == [[1, 2]]


def test_blocks_behind_windows_are_freed_by_reports() -> None:
    world, session = holding(40, specs=WINDOWED, enable_caching=False)
    num_free = world.pool.blocks.num_free_blocks
    assert reserve(world, session, 1, 8, num_taken_tokens=[7], num_in_flight_tokens=[9]).credit_tokens == [20]
    assert tables(session)[1][0]
    assert world.pool.blocks.num_free_blocks == num_free - 2
    for in_flight, num_freed in ((3, 1), (0, 2)):
        reserve(world, session, 1, 8, num_in_flight_tokens=[in_flight])
        assert tables(session)[1].count(0) == num_freed
    assert world.pool.blocks.num_free_blocks == num_free


def test_rejected_tokens_of_cached_blocks_can_be_given_back() -> None:
    world, session = holding()
    report(world, session)
    assert reserve(world, session, 1, 0, num_rejected_tokens=[6]).credit_tokens == [4]
    assert world.allocate(session, 1, 5).outcomes == []


def test_after_a_refusal_a_report_takes_no_blocks() -> None:
    world = World(8, enable_caching=False)
    session = world.open(reserve_tokens=4)
    world.admit(session, 1, "", 4)
    world.admit(session, 2, "", 4)
    refused = world.run(
        session, ALLOCATE, RESERVE, request_numbers=[1, 2], num_new_tokens=[18, 0], num_lookahead_tokens=[0, 8]
    )
    assert (refused.outcomes, refused.num_new_blocks) == ([Outcome.NO_BLOCKS, 0], [])
    assert refused.credit_tokens == [8, 8]


@pytest.mark.parametrize("launched", [0, 1])
@pytest.mark.parametrize("executes", [False, True])
def test_a_free_caches_what_was_filled_if_it_certainly_runs(*, executes: bool, launched: int) -> None:
    world, session = holding()
    if executes:
        world.executed(session)
    world.run(
        session, FREE, request_numbers=[1], num_taken_tokens=[3], num_appended_tokens=[3],
        block_hashes=block_hashes("ab", 2)[32:], launched_sequence=launched,
    )  # fmt: skip
    num_tokens = 8 if launched or not executes else 4
    assert world.num_found(session, "ab") == num_tokens
    other = world.open()
    assert world.num_found(other, "ab") == (4 if executes else 0)
    world.executed(session, 2)
    assert world.num_found(other, "ab") == (num_tokens if launched or executes else 0)  # else no step was reported


def test_a_preemption_frees_the_reserve() -> None:
    world, session = holding(enable_caching=False)
    world.run(session, Operation.PREEMPT, request_numbers=[1], num_taken_tokens=[3])
    assert world.pool.blocks.num_free_blocks == 19


def test_a_refused_session_wants_the_reserves_of_others_once() -> None:
    world = World(10, enable_caching=False)
    session, idle, plain = world.open(reserve_tokens=8), world.open(reserve_tokens=8), world.open()
    world.admit(session, 1, "", 5)
    asks = {"num_new_tokens": [0], "num_watermark_blocks": [0]}
    assert world.admit(plain, 1, "", 40, **asks).outcomes == [Outcome.NEVER_FITS]
    assert not reserve(world, session, 1, 8).reserve_wanted  # a reserve would not help
    assert world.admit(plain, 2, "", 24, **asks).outcomes == [Outcome.NO_BLOCKS]
    assert [world.run(each).reserve_wanted for each in (session, plain, idle, session)] == [True, False, True, False]
    assert reserve(world, session, 1, 0).free_blocks == 7
    assert world.run(plain, ADMIT, request_numbers=[2]).outcomes == []
    assert world.run(session).reserve_wanted is False


def test_a_reserve_stays_within_quotas() -> None:
    """It takes no block of another session's minimum, and does not refuse what the session may have."""
    world = World(15, enable_caching=False)
    world.open(quota=Quota(min_blocks=10))
    session = world.open(reserve_tokens=8, quota=Quota(max_blocks=4))
    assert world.admit(session, 1, "", 4).num_new_blocks == [3]  # of 4, one is left for the next block
    assert world.admit(session, 2, "", 4).num_new_blocks == [1]
    refused = world.run(session, ADMIT, request_numbers=[3], num_appended_tokens=[4], request_ids=["x"])
    assert refused.outcomes == [Outcome.OVER_QUOTA]
    assert reserve(world, session, 2, 12).num_new_blocks == []
    reserve(world, session, 1, 0)
    assert world.allocate(session, 2, 3).num_new_blocks == [1]
    unlimited = world.open(reserve_tokens=8)
    assert world.admit(unlimited, 1, "", 4).num_new_blocks == [1]  # all that are left
    assert world.allocate(unlimited, 1, 1).outcomes == [Outcome.NO_BLOCKS]


def test_states_in_reserve_begin_with_the_step_that_ends_a_prompt() -> None:
    """The next step of the prompt would pass by an earlier one, which is lacking then."""
    world = World(19, specs=STATES, enable_caching=False)
    session = world.open(reserve_tokens=4)
    world.admit(session, 1, "", 64, num_new_tokens=[36])
    assert tables(session)[1] == [0] * 8 + [10]
    assert world.allocate(session, 1, 28).outcomes == []


@pytest.mark.parametrize("max_blocks", [0, 50])
def test_gaps_between_states_are_not_given_back(max_blocks: int) -> None:
    """Here rejected tokens reach back over a gap."""
    world = World(60, specs=STATES, enable_caching=False)
    session = world.open(reserve_tokens=4, quota=Quota(max_blocks=max_blocks))
    world.admit(session, 1, "", 40, num_new_tokens=[5])
    world.allocate(session, 1, 20)
    reserve(world, session, 1, 0, num_rejected_tokens=[15])
    assert tables(session)[1][3:] == []


def test_pools_where_states_of_drafts_move_have_no_reserves() -> None:
    moving = MambaSpec(4, only_step_ends=True, num_speculative_blocks=1)
    assert World(specs=(FullAttentionSpec(4), moving)).open(reserve_tokens=8).reserve_tokens == 0


def cached_states(world: World, session: Session) -> list[int]:
    """Numbers of leading tokens of request 1 after which a state is cached."""
    cached = {block_hash for group_id, block_hash, _ in world.pool.blocks.prefix_map.entries() if group_id == 1}
    hashes = session.by_number[RequestNumber(1)].hashes
    return [4 * end for end, block_hash in enumerate(hashes, 1) if block_hash in cached]


def test_decodes_on_credit_keep_the_states_of_full_blocks() -> None:
    """The state after token 8 is in the block that is left for the next one, and stays cached when it is freed."""
    world, session = holding(specs=STATES)
    assert tables(session) == [[1, 2, 3, 4], [0, 5, 6, 7]]
    assert report(world, session).credit_tokens == [16]
    taken = {"num_taken_tokens": [2], "num_appended_tokens": [2]}
    reserve(world, session, 1, 6, **taken)
    assert tables(session) == [[1, 2, 3, 4], [0, 0, 6, 7]]
    assert cached_states(world, session) == [8]


def test_a_report_behind_a_full_block_caches_its_state_before_it_is_freed() -> None:
    world, session = holding(specs=STATES)
    filled = {"num_taken_tokens": [5], "num_appended_tokens": [5], "block_hashes": block_hashes("abc", 2)[32:]}
    reserve(world, session, 1, 6, **filled)
    assert (tables(session)[1], cached_states(world, session)) == ([0, 0, 6, 7], [8])


@pytest.mark.parametrize(("num_new", "states"), [(6, [0, 0, 6, 7, 10, 11]), (19, [0, 0, 6, 7, 0, 0, 0, 14, 15, 16])])
def test_a_step_of_many_tokens_leaves_no_state_in_the_reserve_that_it_passes(num_new: int, states: list[int]) -> None:
    """It begins after 10 tokens. Only the state at its end is written, and those that decodes wrote are cached."""
    world, session = holding(specs=STATES, num_blocks=40)
    reserve(world, session, 1, 11)
    columns: Any = {"num_taken_tokens": [5], "num_appended_tokens": [5 + num_new], "num_new_tokens": [num_new]}
    hashes = block_hashes("abcdefgh", (10 + num_new) // 4)[32:]
    result = world.run(session, Operation.ALLOCATE, request_numbers=[1], block_hashes=hashes, **columns)
    assert tables(session)[1] == states
    ends = [8] + ([16] if num_new == 6 else [])
    assert cached_states(world, session) == ends
    assert result.credit_tokens == [min(map(len, tables(session))) * 4]


# Each case: the field at fault, the kind of the error, the number of the request, the columns.
REFUSED: dict[str, tuple[str, type[KvpoolError], int, dict[str, Any]]] = {
    "new tokens": ("num_new_tokens[0]", InvalidArgumentError, 1, {"num_new_tokens": [1]}),
    "too many slots": ("num_lookahead_tokens[0]", InvalidArgumentError, 1, {"num_lookahead_tokens": [257]}),
    "negative slots": ("num_lookahead_tokens[0]", InvalidArgumentError, 1, {"num_lookahead_tokens": [-1]}),
    "too many taken": ("num_taken_tokens[0]", InvalidArgumentError, 1, {"num_taken_tokens": [12]}),
    "too many in flight": ("num_in_flight_tokens[0]", InvalidArgumentError, 1, {"num_in_flight_tokens": [257]}),
    "no blocks": ("request_numbers[0]", WrongStateError, 2, {}),
    "no declaration": ("declares[0]", InvalidArgumentError, 3, {"declares": [True], "request_ids": ["x"]}),
}


@pytest.mark.parametrize("case", REFUSED)
def test_reports_that_are_refused(case: str) -> None:
    field, kind, number, columns = REFUSED[case]
    world, session = holding()
    world.run(session, APPEND, request_numbers=[2], num_appended_tokens=[3], request_ids=["waiting"])
    with world.refuses(kind, field=field):
        world.run(session, RESERVE, request_numbers=[number], **columns)


def test_sessions_with_a_reserve_do_not_delay_caching() -> None:
    world, session = holding()
    with world.refuses(field="delay_cache_blocks[0]"):
        world.allocate(session, 1, 1, delay_cache_blocks=[True])


def test_sessions_without_a_reserve_report_none(world: World) -> None:
    session = world.open()
    world.admit(session, 1, "a", 5)
    with world.refuses(field="operations[0]"):
        world.run(session, RESERVE, request_numbers=[1])


@pytest.mark.parametrize("wrong", [-1, MAX_RESERVE_TOKENS + 1])
def test_a_reserve_out_of_range_is_refused(wrong: int, world: World) -> None:
    with world.refuses(field="reserve_tokens"):
        world.open(reserve_tokens=wrong)
    assert world.open(reserve_tokens=MAX_RESERVE_TOKENS).reserve_tokens == MAX_RESERVE_TOKENS


ENDS: dict[str, Callable[[World, Session], object]] = {
    "closed": lambda world, session: world.allocator.close_session(session.session_id, 0.0),
    "expired": lambda world, _: world.allocator.expire(20.0),
    "evicted, after quarantine": lambda world, session: (
        world.allocator.evict_session("m", session.session_number, 0.0, quarantine_seconds=3.0),
        world.allocator.end_due_quarantines(4.0),
    ),
}


@pytest.mark.parametrize("end", ENDS)
def test_the_reserve_ends_with_its_session(end: str) -> None:
    world, session = holding(enable_caching=False)
    ENDS[end](world, session)
    check_integrity(world.pool, [])
    assert world.pool.blocks.num_free_blocks == 19


def test_snapshots_and_records_keep_reserves() -> None:
    world = World(10, enable_caching=False)
    session, other = world.open(reserve_tokens=8), world.open(reserve_tokens=4)
    world.admit(session, 1, "", 5)
    world.admit(other, 1, "", 24)
    copy = restored(world.allocator)
    assert_alike(world.allocator, copy)
    kept = copy.sessions.find(session.session_id, 0.0)[1]
    assert (kept.reserve_tokens, kept.owes_reserve, kept.by_number[RequestNumber(1)].reserve_tokens) == (8, True, 8)
    records = Recorder(world.allocator).records
    world.open(reserve_tokens=2)
    reserve(world, session, 1, 0)
    replay(copy, records)
    assert_alike(world.allocator, copy)


def test_steps_count_by_what_their_schedulers_wait_for() -> None:
    world, session = holding(40)
    world.allocate(session, 1, 11)
    world.allocate(session, 1, 1)
    reserve(world, session, 1, 8)
    other = world.open()
    world.admit(other, 1, "b", 5)
    activity = world.pool.activity
    waits = activity.waits_admission, activity.waits_prefill, activity.waits_decode, activity.waits_exact
    assert (waits, activity.steps) == ((1, 1, 1, 1), 5)


def test_a_request_is_described_with_the_blocks_that_it_holds_in_reserve() -> None:
    world, session = holding(40, specs=WINDOWED)
    (request,) = session.requests.values()
    assert world.pool.num_reserve_blocks(request) == 2 * 2  # for 16 tokens, of which 5 are computed
    reserve(world, session, 1, 0)
    assert world.pool.num_reserve_blocks(request) == 0
