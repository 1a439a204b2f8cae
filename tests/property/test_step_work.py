"""A step of any kind, in any state, takes operations in proportion to its message and its counted work.

What is counted are the lines of the core that a step executes, iterations of comprehensions included: they are the same
on every machine. `pytest -s` prints the table. A state has `MANY` of what a step must not pass through one by one.
"""

import gc
import hashlib
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

import pytest

from kvpool.core import execution
from kvpool.core.blocks.quota import Quota
from kvpool.core.execution import apply
from kvpool.core.ids import BlockId
from kvpool.core.sessions.session import Session
from kvpool.core.specs.kinds import FullAttentionSpec, MambaSpec
from kvpool.core.steps.columns import Operation, Step, StepResult
from kvpool.server.journal.snapshot import snapshot_frames
from support.core import World, block_hashes
from support.integrity import check_integrity

MANY: Final = 2000
ROWS: Final = 40
FIXED_LINES: Final = 1500
LINES_PER_ROW: Final = 600
LINES_PER_WORK: Final = 20
"""A step executes at most this many lines: fixed, per row, and per hash, block id and unit of work that it counts."""
_CORE: Final = execution.__path__[0].removesuffix("execution")

Built = tuple[World, Session, dict[str, Any]]


def columns(operation: Operation, count: int = ROWS, *, declares: bool = False, **more: Any) -> dict[str, Any]:
    """Rows of one operation: on the requests from 1 on, or on new ones after all others."""
    first = 10 * MANY if declares else 1
    ids = [f"new-{i}" for i in range(count)] if declares else []
    rows = {"operations": [operation] * count, "request_numbers": [*range(first, first + count)], "request_ids": ids}
    return {**rows, "declares": [declares] * count, **more}


def run(world: World, session: Session, operations: list[Operation], **more: Any) -> None:
    world.run(session, *operations, **more)


def each(value: int, count: int = ROWS) -> list[int]:
    return [value] * count


def joined(count: int, start: bytes = b"") -> bytes:
    """Different hashes that begin with the same bytes."""
    return b"".join((start + hashlib.sha256(b"%d" % i).digest())[:32] for i in range(count))


def add(world: World, session: Session, count: int, operation: Operation, num_tokens: int, **more: Any) -> None:
    """Declares the requests from 1 on."""
    ids = [f"r{i}" for i in range(count)]
    rows = columns(operation, count, num_appended_tokens=each(num_tokens, count), **more)
    run(world, session, **{**rows, "request_ids": ids, "declares": each(1, count)})


def held_chunks(*, is_alone: bool) -> Built:
    world = World(MANY + 2 * ROWS)
    one, other = world.open(), None if is_alone else world.open()
    add(world, one, MANY, Operation.ADMIT, 1)
    run(world, one, **columns(Operation.FREE, MANY), launched_sequence=1)
    other = other or world.open()
    world.admit(other, 1, "", 1)  # passes each chunk once, which the frees pay for
    return world, other, columns(Operation.ADMIT, declares=True, num_appended_tokens=each(1))


def waiting_blocks() -> Built:
    world = World(2 * MANY)
    session, _ = world.open(quota=Quota(0, MANY)), world.open()
    add(world, session, MANY, Operation.ADMIT, 1)
    run(world, session, **columns(Operation.FREE, MANY), launched_sequence=1)
    return world, session, columns(Operation.ADMIT, declares=True, num_appended_tokens=each(1))


def sampled_hashes(operation: Operation) -> Built:
    world = World(block_size=1)
    session = world.open()
    add(world, session, ROWS, Operation.APPEND, 255, block_hashes=joined(255 * ROWS, b"\0\0"))
    return world, session, columns(operation)


def states(num_waiting: int = 0, num_copies: int = 1, num_readers: int = 0) -> World:
    """A pool with copies of a state after four tokens, and requests that wait, or end their prompts from it."""
    specs = [FullAttentionSpec(4), MambaSpec(4, only_step_ends=True)]
    return World(4 * (num_waiting + num_copies + num_readers + ROWS), specs=specs)


def hits() -> dict[str, Any]:
    """Admissions that hit the state after the first block, and end their prompts from a later one."""
    own = joined(ROWS)
    hashes = b"".join(block_hashes("a", 1) + own[32 * i : 32 * i + 32] for i in range(ROWS))
    return columns(Operation.ADMIT, declares=True, num_appended_tokens=each(10), block_hashes=hashes)


def waiting_requests() -> Built:
    world = states(num_waiting=MANY)
    session = world.open()
    add(world, session, MANY, Operation.APPEND, 6, block_hashes=block_hashes("a", 1) * MANY)
    run(world, session, **columns(Operation.ADMIT, 1, num_new_tokens=[4]))
    return world, session, hits()


def copies_of_states() -> Built:
    world = states(num_copies=MANY)
    session = world.open()
    hashes = block_hashes("a", 1) * MANY
    add(world, session, MANY, Operation.ALLOCATE, 6, num_new_tokens=each(4, MANY), block_hashes=hashes)
    return world, session, hits()


def readers_of_a_state(rows: dict[str, Any]) -> Built:
    world = states(num_readers=MANY)
    session = world.open()
    add(world, session, MANY, Operation.APPEND, 6, block_hashes=block_hashes("a", 1) * MANY)
    run(world, session, **columns(Operation.ADMIT, 1, num_new_tokens=[4]))
    for number in range(2, MANY):  # in a step each, because a hit waits for a reader of the same step
        run(world, session, [Operation.ADMIT], request_numbers=[number])
    return world, session, rows


def hidden_copies() -> Built:
    world = World(3 * MANY)
    one, other = world.open(), world.open()
    add(world, one, MANY, Operation.ALLOCATE, 5, num_new_tokens=each(5, MANY), block_hashes=block_hashes("a", 1) * MANY)
    hashes = block_hashes("a", 1) * ROWS
    return world, other, columns(Operation.LOOKUP, declares=True, num_appended_tokens=each(5), block_hashes=hashes)


def pending_steps() -> Built:
    world = World(3 * MANY)
    session = world.open()
    add(world, session, MANY, Operation.APPEND, 5, block_hashes=joined(MANY))
    for number in range(1, MANY):
        run(world, session, [Operation.ADMIT], request_numbers=[number])
    caching = columns(Operation.CACHE, num_new_tokens=each(5))
    return world, session, {**caching, "executed_sequence": ROWS + 1, "launched_sequence": ROWS + 1}


def scopes() -> Built:
    world = World(2 * MANY)
    for i in range(MANY):
        world.admit(world.open(namespace=b"%d" % i), 1, "a", 5)
    session = world.open()
    hashes = joined(ROWS)
    return world, session, columns(Operation.LOOKUP, declares=True, num_appended_tokens=each(5), block_hashes=hashes)


def copies_to_make() -> Built:
    specs = [FullAttentionSpec(4), MambaSpec(16, only_step_ends=True)]
    world = World(10 * MANY, specs=specs, prefix_match_unit=4, partial_hits=True)
    session = world.open()
    add(world, session, MANY, Operation.ADMIT, 14, num_new_tokens=each(12, MANY), block_hashes=joined(3 * MANY))
    run(world, session, **columns(Operation.ALLOCATE, MANY, num_new_tokens=each(2, MANY)), launched_sequence=1)
    assert len(session.copies) == MANY
    return world, session, columns(Operation.APPEND, 1, launched_sequence=1)


def common_prefix() -> Built:
    world = World(2 * MANY)
    session = world.open()
    add(world, session, MANY, Operation.ADMIT, 5, block_hashes=block_hashes("a", 1) * MANY)
    return world, session, columns(Operation.COMMON_PREFIX)


KINDS: Final[dict[str, Callable[[], Built]]] = {
    "admissions behind chunks that another session holds": lambda: held_chunks(is_alone=False),
    "admissions behind chunks that were held before another session opened": lambda: held_chunks(is_alone=True),
    "admissions at a maximum, beside blocks that wait": waiting_blocks,
    "look-ups of hashes that begin alike": lambda: sampled_hashes(Operation.LOOKUP_COUNTED_AT_ONCE),
    "preemptions of requests without blocks": lambda: sampled_hashes(Operation.PREEMPT),
    "hits of states beside waiting requests": waiting_requests,
    "hits of states with many copies": copies_of_states,
    "hits of states beside requests that read them": lambda: readers_of_a_state(hits()),
    "frees of requests that read one state": lambda: readers_of_a_state(columns(Operation.FREE)),
    "look-ups of hashes with hidden copies": hidden_copies,
    "cachings beside many pending steps": pending_steps,
    "look-ups that miss beside many scopes": scopes,
    "appends beside copies to be made": copies_to_make,
    "common prefixes of many requests": common_prefix,
}


def count_lines(call: Callable[[], object]) -> int:
    """Number of lines of the core that a call executes."""
    lines = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal lines
        if event == "line":
            lines += 1
        return trace if frame.f_code.co_filename.startswith(_CORE) else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return lines


@pytest.mark.parametrize("operation", ["the moment of a snapshot", "a description of a pool"])
def test_lines_do_not_follow_from_the_number_of_requests(operation: str) -> None:
    def lines(num_requests: int) -> int:
        world = World(MANY)
        session = world.open()
        add(world, session, num_requests, Operation.ADMIT, 1)
        calls: dict[str, Callable[[], object]] = {
            "the moment of a snapshot": world.allocator.snapshot().__enter__,
            "a description of a pool": world.info,
        }
        return count_lines(calls[operation])

    assert 10 < lines(ROWS) == lines(MANY // 2)


def test_the_moment_of_a_snapshot_makes_few_objects_that_garbage_collections_visit() -> None:
    world, *_ = held_chunks(is_alone=False)
    gc.disable()
    try:
        before = gc.get_count()[0]
        with world.allocator.snapshot() as snapshot:
            assert gc.get_count()[0] - before < MANY / 4
            assert len(next(snapshot_frames(snapshot))) < 4 * MANY, "the first frame is encoded at once"
    finally:
        gc.enable()


@pytest.mark.parametrize("are_executed", [True, False])
def test_a_snapshot_passes_through_no_copies_in_host_memory_at_once(are_executed: bool) -> None:  # noqa: FBT001 - a parameter
    world = World(2 * MANY, num_host_blocks=2 * MANY)
    session, host = world.open(), world.pool.blocks.host
    add(world, session, MANY, Operation.ADMIT, 4, block_hashes=joined(MANY))
    run(world, session, **columns(Operation.FREE, MANY), executed=1, launched_sequence=2)
    for first, count in [(2 * MANY, 16), *((2 * MANY + i, 2) for i in range(16, 28, 2))]:  # they take blocks never used
        rows = columns(Operation.ADMIT, count, declares=True, num_appended_tokens=each(256, count))
        numbers = range(first, first + count)
        rows |= {"request_numbers": numbers, "request_ids": [f"r{i}" for i in numbers]}
        rows["block_hashes"] = joined(64 * count, b"%d" % first)
        rows["executed" if are_executed else "launched_sequence"] = session.sequence
        run(world, session, **rows)
    assert host
    if are_executed:
        world.executed(session)
    num_copies = sum(map(host.has_copy, world.pool.blocks.prefix_map.hashed_among(map(BlockId, range(2 * MANY)))))
    assert num_copies > MANY / 2
    assert bool(host.uses) != are_executed
    moment = world.allocator.snapshot()
    assert count_lines(moment.__enter__) < num_copies / 2
    moment.__exit__(None, None, None)
    with world.allocator.snapshot() as snapshot:
        assert len(next(snapshot_frames(snapshot))) < 4 * MANY, "the first frame is encoded at once"


@pytest.mark.parametrize("kind", KINDS)
def test_lines_follow_from_the_message_and_the_counted_work(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    world, session, rows = KINDS[kind]()
    work = 0

    class Counted(apply._Application):
        def run(self, *args: Any) -> Any:
            nonlocal work
            result = super().run(*args)
            work = self._work
            return result

    monkeypatch.setattr(apply, "_Application", Counted)
    step = Step(session.sequence + 1, **rows)
    results: list[StepResult] = []
    lines = count_lines(lambda: results.append(world.apply(session, step)))
    work += len(step.block_hashes) // 32 + len(step.block_ids)
    print(f"{len(step.operations):4} rows, {work:6} work, {lines:7} lines: {kind}")  # noqa: T201
    assert not any(results[0].outcomes), "each operation has its whole cost"
    check_integrity(world.pool, world.sessions())
    assert lines <= FIXED_LINES + LINES_PER_ROW * len(step.operations) + LINES_PER_WORK * work
