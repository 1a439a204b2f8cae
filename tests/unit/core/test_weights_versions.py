"""Rules 4 and 5 of prefix_map: a session finds only blocks that were computed with its weights version."""

import pytest

from kvpool.core import commands
from kvpool.core.blocks import prefix_map
from kvpool.core.blocks.prefix_map import MAX_UNUSED_VERSIONS
from kvpool.core.errors import AbortedError, InvalidArgumentError, NotFoundError, WrongStateError
from kvpool.core.events import BlockRemoved, BlockStored
from kvpool.core.ids import RequestNumber
from kvpool.core.sessions.session import Session
from kvpool.core.specs.kinds import FullAttentionSpec, SlidingWindowSpec
from kvpool.core.specs.pool_config import ReuseOrder
from kvpool.core.steps.columns import Operation, Outcome, StepResult
from support.core import World
from support.state import restored

BLOCK = 4


def lookup(world: World, session: Session, content: str = "abc") -> int:
    """Length of the hit of a new request in blocks, which is freed."""
    return world.num_found(session, content, executed=session.sequence) // BLOCK


def admit(world: World, session: Session, number: int, content: str = "abc") -> StepResult:
    """Admits a request with one token after its full blocks, and reports the step as executed."""
    result = world.admit(session, number, content, BLOCK * len(content) + 1)
    world.executed(session)
    return result


def decode(world: World, session: Session, number: int, content: str, num_tokens: int) -> StepResult:
    """Appends tokens to a running request, up to the end of `content`, and allocates their slots."""
    result = world.decode(session, number, content, num_tokens)
    world.executed(session)
    return result


@pytest.mark.parametrize(
    "specs", [(FullAttentionSpec(4),), (FullAttentionSpec(4), SlidingWindowSpec(4, sliding_window=5))]
)
def test_a_new_version_makes_earlier_prefixes_unreachable(specs: tuple[FullAttentionSpec, ...]) -> None:
    world = World(num_blocks=40, specs=specs)
    first, second = world.open(weights_version="1"), world.open(weights_version="1")
    admit(world, first, 1)
    world.free(first, 1)
    assert (lookup(world, first), lookup(world, second)) == (3, 3)
    assert world.allocator.set_weights_version(first, "2")
    assert (lookup(world, first), lookup(world, second)) == (0, 3)
    admit(world, first, 2, "abcd")
    assert (lookup(world, first), lookup(world, second, "abcd")) == (3, 3)  # "abcd": only "abc", of version 1
    world.allocator.set_weights_version(second, "2")
    assert lookup(world, second, "abcd") == 4


def test_versions_and_namespaces_are_separate() -> None:
    """No namespace with a version equals another one, however the two values are split."""
    world = World(num_blocks=40)
    scopes = [(b"", ""), (b"", "ab"), (b"a", "b"), (b"ab", ""), (b"a", ""), (b"", "a"), (b"\x00", ""), (b"", "\x00")]
    sessions = [world.open(namespace=namespace, weights_version=version) for namespace, version in scopes]
    for session in sessions:
        assert lookup(world, session) == 0
        admit(world, session, 1)
        world.free(session, 1)
    assert len({session.first_map for session in sessions}) == len(scopes)
    assert [lookup(world, session) for session in sessions] == [3] * len(scopes)


@pytest.mark.parametrize("order", ReuseOrder)
def test_a_running_request_keeps_its_blocks_and_caches_no_more(order: ReuseOrder) -> None:
    """Later blocks continue from contents of earlier weights: they belong to no version."""
    world = World(reuse_order=order)
    session, other = world.open(weights_version="1"), world.open(weights_version="1")
    admit(world, session, 1)
    request = session.by_number[RequestNumber(1)]
    held = list(request.tables[0].block_ids)
    world.allocator.set_weights_version(session, "2")
    assert (request.tables[0].block_ids, request.num_computed_tokens) == (held, 13)
    result = decode(world, session, 1, "abcde", 8)
    assert (result.outcomes, result.num_new_blocks) == ([], [2])
    assert request.tables[0].block_ids[: len(held)] == held
    assert (lookup(world, other, "abcde"), lookup(world, session, "abcde")) == (3, 0)
    world.free(session, 1)
    assert (lookup(world, other, "abcde"), len(world.pool.blocks.prefix_map)) == (3, 3)


def test_a_running_request_caches_no_more_when_it_has_given_slots_back() -> None:
    world = World(specs=(SlidingWindowSpec(4, sliding_window=5),))  # whose last blocks suffice for a hit
    session = world.open(weights_version="1", reserve_tokens=8)
    admit(world, session, 1)
    world.allocator.set_weights_version(session, "2")
    num_free = world.pool.blocks.num_free_blocks
    world.run(session, Operation.RESERVE, request_numbers=[1], num_new_tokens=[0])
    assert world.pool.blocks.num_free_blocks > num_free
    decode(world, session, 1, "abcde", 8)
    assert lookup(world, session, "abcde") == 0


def test_a_preempted_request_begins_again_with_the_new_version(world: World) -> None:
    session, other = world.open(weights_version="1"), world.open(weights_version="1")
    admit(world, session, 1)
    world.allocator.set_weights_version(session, "2")
    world.run(session, Operation.PREEMPT, request_numbers=[1])
    result = world.run(session, Operation.ADMIT, request_numbers=[1])
    assert (result.num_hit_tokens, result.num_new_tokens) == ([], [13])
    world.executed(session)
    assert (lookup(world, session), lookup(world, other)) == (3, 3)
    world.allocator.set_weights_version(other, "2")
    assert lookup(world, other) == 3


def test_a_hit_that_was_found_before_is_not_allocated(world: World) -> None:
    session = world.open(weights_version="1")
    admit(world, session, 1)
    world.free(session, 1)
    found = world.declare(session, Operation.LOOKUP, 2, "abc", 13, executed=session.sequence)
    assert len(found.block_ids) == 3
    world.allocator.set_weights_version(session, "2")
    result = world.allocate(session, 2, 1, hit=[found.block_ids])
    assert (result.outcomes, result.num_hit_tokens) == ([Outcome.HIT_CHANGED], [])


def test_blocks_that_may_not_be_computed_are_forgotten(world: World) -> None:
    """A step that was not reported as executed may run with the new weights."""
    session, other = world.open(weights_version="1"), world.open(weights_version="1")
    world.admit(session, 1, "abc", 13)
    world.allocator.set_weights_version(session, "2")
    world.executed(session)
    assert lookup(world, other) == 0
    world.allocator.set_weights_version(session, "1")
    assert lookup(world, session) == 0


def test_an_earlier_version_is_found_again(world: World, session: Session) -> None:
    admit(world, session, 1)
    world.free(session, 1)
    for version, num_hit in (("1", 0), ("", 3), ("1", 0)):
        world.allocator.set_weights_version(session, version)
        assert lookup(world, session) == num_hit


def test_the_same_version_again_changes_nothing(world: World) -> None:
    session, other = world.open(weights_version="1"), world.open(weights_version="1")
    world.admit(session, 1, "abc", 13)
    before = world.snapshot()
    assert not world.allocator.set_weights_version(session, "1")
    assert world.snapshot() == before
    decode(world, session, 1, "abcd", 3)
    assert lookup(world, other, "abcd") == 4


def test_only_the_newest_unused_versions_are_kept() -> None:
    """Each version of a training run makes maps, also in a pool that is large enough to keep all its blocks."""
    world = World(num_blocks=200, enable_events=True)
    session, stays = world.open(weights_version="0"), world.open(weights_version="0")
    last = MAX_UNUSED_VERSIONS + 5
    for version in range(1, last + 1):
        world.admit(session, version, "ab", 9, token_ids=list(range(9)))
        world.executed(session)
        world.run(session, Operation.FREE, executed=session.sequence, request_numbers=[version])
        world.allocator.set_weights_version(session, str(version))
    assert len(world.pool.blocks.prefix_map) == 2 * (MAX_UNUSED_VERSIONS + 1)  # and those of version 0, in use
    events = world.pool.blocks.take_events()
    num_stored = sum(len(event.block_hashes) for event in events if isinstance(event, BlockStored))
    num_removed = sum(isinstance(event, BlockRemoved) for event in events)
    assert num_stored - num_removed == len(world.pool.blocks.prefix_map)
    assert stays.scope == (b"", "0")


@pytest.mark.parametrize("num_host_blocks", [0, 100])
def test_the_surplus_of_versions_is_evicted_some_at_a_time(
    num_host_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_map, "MAX_SURPLUS", 3)
    monkeypatch.setattr(prefix_map, "MAX_UNUSED_VERSIONS", 0)
    world = World(num_blocks=40, num_host_blocks=num_host_blocks)
    session = world.open(weights_version="1")
    for number in range(1, 21):
        admit(world, session, number, chr(0x100 + number) * 4)
        world.free(session, number, executed=session.sequence)
    num_cached = [len(world.pool.blocks.prefix_map)]
    assert (num_cached[0] > 40) == (num_host_blocks > 0)
    world.allocator.set_weights_version(session, "2")
    while num_cached[-1] != len(world.pool.blocks.prefix_map):
        num_cached.append(len(world.pool.blocks.prefix_map))
        world.open(weights_version="2")
    assert num_cached == [*range(num_cached[0], 0, -3), 0]


def test_versions_are_listed(world: World) -> None:
    for version in ("b", "", "a", "b"):
        world.open(weights_version=version)
    assert world.info().weights_versions == ["", "a", "b"]


def test_a_restored_session_keeps_its_version(world: World) -> None:
    owner, other = world.open(weights_version="1"), world.open(weights_version="2")
    admit(world, owner, 1)
    admit(world, other, 1)
    world.allocator.set_weights_version(owner, "2")
    world.allocator = restored(world.allocator)
    world.pool = world.allocator.pools.get("m")
    owner, other = world.sessions()
    assert (owner.weights_version, other.weights_version) == ("2", "2")
    decode(world, owner, 1, "abcd", 3)
    assert (lookup(world, other, "abcd"), lookup(world, owner, "abcd")) == (3, 3)


def test_refusals_change_nothing(world: World) -> None:
    session, closed = world.open(weights_version="1"), world.open()
    admit(world, session, 1)
    world.allocator.close_session(closed.session_id, 0.0)
    for session_id, version, kind, words in (
        (session.session_id, "v" * 257, InvalidArgumentError, "weights_version: longer than 256 bytes"),
        (session.session_id, "ü" * 129, InvalidArgumentError, "weights_version"),
        ("absent", "2", NotFoundError, None),
        (closed.session_id, "2", AbortedError, None),
    ):
        with world.refuses(kind, match=words):
            world.allocator.execute(commands.SetWeightsVersion(session_id, version), 0.0)
        assert world.info().weights_versions == ["1"]
    with world.refuses(match="weights_version"):
        world.open(weights_version="v" * 257)
    world.allocator.set_weights_version(session, "v" * 256)


def test_a_late_copy_of_a_call_has_no_effect(world: World, session: Session) -> None:

    def set_version(version: str, key: str) -> bool:
        return world.allocator.execute(commands.SetWeightsVersion(session.session_id, version, key), 0.0)

    assert [set_version("1", "a"), set_version("1", "a"), set_version("2", "b")] == [True, False, True]
    with world.refuses(WrongStateError, field="set_key", reason="WEIGHTS_SET_LATER", match="later call"):
        set_version("1", "a")
    assert session.weights_version == "2"
    assert world.allocator.set_weights_version(session, "3")  # by an operator, without a key
    assert not set_version("2", "b")
    assert session.weights_version == "3"
    with pytest.raises(InvalidArgumentError, match="set_key"):
        set_version("4", "k" * 65)
    for i in range(20):
        set_version(str(i), f"key {i}")
    assert session.weights_keys == [f"key {i}" for i in range(4, 20)]


def test_a_key_that_is_used_again_compares_the_version(world: World) -> None:
    session = world.open(open_key="key", weights_version="1")
    world.allocator.set_weights_version(session, "2")
    assert world.open(open_key="key", weights_version="1") is session
    assert session.weights_version == "2"
    with pytest.raises(InvalidArgumentError, match="other arguments"):
        world.open(open_key="key", weights_version="2")
