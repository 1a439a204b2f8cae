"""Limits: refused steps and sessions leave the state unchanged."""

import pytest

from kvpool.cli.serve_options import LIMITS_HELP
from kvpool.core.blocks.quota import Quota
from kvpool.core.errors import ExhaustedError
from kvpool.core.steps.columns import Operation, Step
from kvpool.server.config import ServerConfig
from kvpool.server.limits.config import MAX_COMMON_PREFIXES, MAX_EVICTED_BLOCKS, MAX_HIT_BLOCKS, Limits
from support.core import World
from support.paths import DOCS


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_step_operations", 0),
        ("max_step_operations", 65_537),
        ("max_sessions", 0),
        ("max_pool_sessions", 0),
        ("max_token_sessions", 0),
        ("max_token_pools", 0),
        ("max_token_calls", 0),
        ("max_total_requests", 0),
        ("max_token_requests", 0),
        ("max_session_requests", 0),
        ("max_total_tokens", 0),
        ("max_token_tokens", 0),
        ("max_session_tokens", 0),
        ("max_session_blocks", -1),
        ("max_session_blocks", 2**31),
        ("max_watches", 0),
        ("max_waiting_steps", 0),
        ("max_waiting_bytes", 0),
        ("max_calls", 0),
        ("max_connections", -1),
        ("stall_seconds", 0.0),
        ("stall_seconds", 3601.0),
    ],
)
def test_out_of_range(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{field}: {value} is not in"):
        Limits(**{field: value})  # type: ignore[arg-type]


def test_the_largest_message_can_wait() -> None:
    with pytest.raises(ValueError, match="max_waiting_bytes: must be at least max_message_bytes, 16777216"):
        ServerConfig(limits=Limits(max_waiting_bytes=2**24 - 1))
    ServerConfig(limits=Limits(max_waiting_bytes=2**24))


def test_every_limit_has_help() -> None:
    assert LIMITS_HELP.keys() == set(Limits.__slots__)


def test_every_limit_is_on_its_page() -> None:
    page = (DOCS / "reference/limits.md").read_text(encoding="utf-8")
    assert [name for name in Limits.__slots__ if f"`--{name.replace('_', '-')}`" not in page] == []


@pytest.mark.parametrize(("num_sessions", "num_pool_sessions", "field"), [(4, 0, ""), (3, 2, "pool_name")])
def test_one_session_too_many(num_sessions: int, num_pool_sessions: int, field: str) -> None:
    limits = Limits(max_sessions=4, max_pool_sessions=2)
    limits.check_sessions(3, 1)
    with pytest.raises(ExhaustedError, match="the maximum") as caught:
        limits.check_sessions(num_sessions, num_pool_sessions)
    assert (caught.value.reason, caught.value.field) == ("TOO_MANY_SESSIONS", field)
    assert caught.value.retry_seconds


def test_blocks_of_a_session() -> None:
    assert Limits().quota(3, 0) == Quota(3, 0)
    limits = Limits(max_session_blocks=10)
    assert [limits.quota(0, 0), limits.quota(2, 5), limits.quota(10, 10)] == [Quota(0, 10), Quota(2, 5), Quota(10, 10)]
    for requested, field in (((11, 0), "min_blocks"), ((0, 11), "max_blocks")):
        with pytest.raises(ExhaustedError, match="the server's maximum per session is 10") as caught:
            limits.quota(*requested)
        assert (caught.value.reason, caught.value.field) == ("TOO_MANY_BLOCKS", field)


def test_requests_of_a_session_without_those_that_the_step_frees() -> None:
    world = World(num_blocks=20)
    session = world.open()
    world.admit(session, 1, "a", 4)
    limits = Limits(max_session_requests=2)
    one = Step(2, operations=[Operation.APPEND], request_numbers=[2], declares=[True], request_ids=["b"])
    limits.check_step(world.pool, session, one)
    two = Step(2, operations=[Operation.APPEND] * 2, request_numbers=[2, 3], declares=[True] * 2)
    two.request_ids = ["b", "c"]
    with pytest.raises(ExhaustedError) as caught:
        limits.check_step(world.pool, session, two)
    assert (caught.value.reason, caught.value.field) == ("TOO_MANY_REQUESTS", "request_ids")
    two.operations.append(Operation.FREE)
    two.request_numbers.append(1)
    two.declares.append(False)
    limits.check_step(world.pool, session, two)


def test_tokens_of_a_session() -> None:
    world = World(num_blocks=20)
    session = world.open()
    world.admit(session, 1, "abc", 12)
    limits = Limits(max_session_tokens=20)
    grow = Step(2, operations=[Operation.APPEND], request_numbers=[1], num_appended_tokens=[8])
    limits.check_step(world.pool, session, grow)
    grow.num_appended_tokens = [9]
    with pytest.raises(ExhaustedError, match="more than 20 tokens") as caught:
        limits.check_step(world.pool, session, grow)
    assert (caught.value.reason, caught.value.field) == ("TOO_MANY_TOKENS", "num_appended_tokens")
    grow.num_appended_tokens = [world.pool.config.max_model_len + 1]  # malformed, which the core refuses
    limits.check_step(world.pool, session, grow)
    world.free(session, 1)
    assert session.num_tokens == 0


def test_common_prefixes_of_a_step() -> None:
    world = World(num_blocks=20)
    session = world.open()
    step = Step(1, operations=[Operation.COMMON_PREFIX] * MAX_COMMON_PREFIXES)
    Limits().check_step(world.pool, session, step)
    step.operations.append(Operation.COMMON_PREFIX)
    with pytest.raises(ExhaustedError, match="more than 64 operations") as caught:
        Limits().check_step(world.pool, session, step)
    assert caught.value.reason == "STEP_TOO_LARGE"


@pytest.mark.parametrize(
    ("operation", "most"), [(Operation.EVICT, MAX_EVICTED_BLOCKS), (Operation.ALLOCATE, MAX_HIT_BLOCKS)]
)
def test_block_ids_of_a_step(operation: Operation, most: int) -> None:
    world = World(num_blocks=20)
    session = world.open()
    step = Step(1, operations=[operation], num_block_ids=[most], block_ids=[1] * most)
    Limits().check_step(world.pool, session, step)
    before = world.snapshot()
    step.block_ids.append(1)
    with pytest.raises(ExhaustedError, match=f"{most + 1} block ids; the maximum for this step is {most}") as caught:
        Limits().check_step(world.pool, session, step)
    assert (caught.value.reason, caught.value.field) == ("STEP_TOO_LARGE", "block_ids")
    assert world.snapshot() == before


def test_a_retried_step_is_answered_regardless_of_the_current_limits() -> None:
    world = World(num_blocks=20)
    session = world.open()
    world.admit(session, 1, "abc", 12)
    step = Step(1, operations=[Operation.APPEND] * 5)
    Limits(max_step_operations=4).check_step(world.pool, session, step)
    step.sequence = 2
    with pytest.raises(ExhaustedError, match="5 operations; the maximum is 4") as caught:
        Limits(max_step_operations=4).check_step(world.pool, session, step)
    assert (caught.value.reason, caught.value.field) == ("STEP_TOO_LARGE", "operations")


def test_tokens_of_freed_requests_do_not_count() -> None:
    world = World()
    session = world.open()
    world.admit(session, 1, "abc", 12)
    limits = Limits(max_session_tokens=12)
    more = Step(
        2,
        operations=[Operation.FREE, Operation.APPEND],
        request_numbers=[1, 2],
        declares=[False, True],
        num_appended_tokens=[0, 12],
        request_ids=["b"],
    )
    limits.check_step(world.pool, session, more)
    more.operations[0] = Operation.PREEMPT
    with pytest.raises(ExhaustedError, match="tokens"):
        limits.check_step(world.pool, session, more)
