"""Rules 1 and 2 of allocator: finding pools and sessions, different declarations, ended sessions."""

from dataclasses import replace
from typing import Any

import pytest

from kvpool.core.errors import AbortedError, InvalidArgumentError, NotFoundError, WrongStateError
from kvpool.core.ids import PoolName, SessionId
from kvpool.core.sessions.session import Session
from kvpool.core.sessions.session_ends import REMEMBERED_ENDS
from kvpool.core.specs.pool_config import HashScheme
from support.core import World, config
from support.refusals import refused
from support.state import DrivenState

DRAWN = b"n" * 32


@pytest.mark.parametrize(("mine", "found"), [(b"", DRAWN), (b"mine", b"mine")])
def test_a_pool_without_a_none_hash_gets_the_drawn_one(mine: bytes, found: bytes) -> None:
    declared = config(hash_scheme=HashScheme(none_hash=mine))
    pool, is_new = DrivenState().create_pool(declared, DRAWN)
    assert (is_new, pool.config.hash_scheme.none_hash) == (True, found)


def test_declaring_a_pool_again_finds_it_regardless_of_the_drawn_hash() -> None:
    allocator = DrivenState()
    pool, _ = allocator.create_pool(config(), DRAWN)
    assert allocator.create_pool(config(), b"m" * 32) == (pool, False)
    assert allocator.pools.get("m") is pool
    assert list(allocator.pools) == [pool]


def test_a_pool_keeps_its_first_owner() -> None:
    allocator = DrivenState()
    declared, _ = allocator.create_pool(config(), DRAWN, owner="first")
    allocator.create_pool(config(), DRAWN, owner="second")
    formed = allocator.open_epoch(replace(config(), name=PoolName("ranked")), DRAWN, 5, owner="first")
    allocator.open_epoch(formed.config, DRAWN, 6, owner="second")
    assert (declared.owner, formed.owner) == ("first", "first")


def test_a_pool_that_differs_is_refused_by_field() -> None:
    allocator = DrivenState()
    pool, _ = allocator.create_pool(config(), DRAWN)
    with refused(WrongStateError, field="config.use_eagle", reason="POOL_DIFFERS"):
        allocator.create_pool(config(use_eagle=True), DRAWN)
    assert not pool.config.use_eagle


def test_a_malformed_pool_leaves_its_name_free() -> None:
    allocator = DrivenState()
    with pytest.raises(InvalidArgumentError):
        allocator.create_pool(config(num_blocks=1), DRAWN)
    assert list(allocator.pools) == []
    assert allocator.create_pool(config(), DRAWN)[1]


@pytest.mark.parametrize("options", [{"client_name": "ü" * 129}, {"pool": "x"}])
def test_a_refused_open_leaves_no_session(options: dict[str, Any], world: World) -> None:
    (name,) = options
    with world.refuses((InvalidArgumentError, NotFoundError), field={"pool": "pool_name"}.get(name, name)):
        world.open(**options)
    assert world.sessions() == []


def test_closing_a_session_again_returns_the_same_count(world: World, session: Session) -> None:
    world.admit(session, 1, "abc", 13)
    world.admit(session, 2, "xyz", 13)
    assert world.allocator.sessions.ends.num_freed_by_close(session.session_id) is None
    assert world.allocator.close_session(session.session_id, 0.0) == (world.pool, 2)
    assert world.pool.blocks.usage == 0.0
    for call in (world.allocator.sessions.find, world.allocator.close_session):
        with world.refuses(AbortedError, reason="SESSION_CLOSED"):
            call(session.session_id, 0.0)
    assert world.allocator.sessions.ends.num_freed_by_close(session.session_id) == 2


def test_closing_after_the_lease_reports_the_expiry(world: World, session: Session) -> None:
    world.admit(session, 1, "abc", 13)
    with refused(AbortedError, field="session_id", reason="LEASE_EXPIRED"):
        world.allocator.close_session(session.session_id, 10.0)
    assert [count for _, _, count in world.allocator.expire(10.0)] == [1]
    assert world.pool.blocks.usage == 0.0


def test_a_lease_starts_at_the_last_message_of_the_stream(world: World) -> None:
    session = world.open(lease_seconds=5.0)
    session.open_streams = 2
    world.allocator.touch_session(session.session_id, 100.0)
    session.open_streams = 0
    assert world.allocator.next_expiry_seconds() == 105.0


def test_only_due_sessions_expire_and_others_keep_their_blocks(world: World) -> None:
    due, other = world.open(lease_seconds=5.0), world.open(lease_seconds=6.0)
    for session in (due, other):
        world.admit(session, 1, "abc", 13)
    assert world.allocator.expire(5.0) == [(world.pool, due, 1)]
    assert world.sessions() == [other]
    assert world.pool.blocks.num_free_blocks == 15


def test_expiries_are_remembered_for_a_bounded_number_of_sessions(world: World) -> None:
    sessions = [world.open() for _ in range(REMEMBERED_ENDS + 1)]
    world.allocator.expire(10.0)
    with pytest.raises(NotFoundError):
        world.allocator.sessions.find(sessions[0].session_id, 10.0)
    with pytest.raises(AbortedError):
        world.allocator.sessions.find(sessions[1].session_id, 10.0)


def test_a_description_counts_blocks_and_sessions() -> None:
    world = World(num_blocks=5)
    one, other = world.open(), world.open()
    world.admit(one, 1, "abc", 13)
    world.free(one, 1)
    world.admit(one, 2, "xy", 9)
    world.admit(other, 1, "w", 2)
    info = world.info(event_sequence=3)
    assert (info.free_blocks, info.usage, info.cached_blocks, info.evicted_blocks) == (0, 1.0, 2, 3)
    assert (info.sessions, info.requests, info.prefix_cache.requests) == (2, 2, 3)
    assert (info.epoch, info.event_sequence, info.config.num_blocks) == (1, 3, world.pool.config.num_blocks)


def test_salted_schemes_depend_only_on_the_salt_and_keep_the_length() -> None:
    scheme = HashScheme("xxhash_cbor", none_hash=b"n" * 16)
    seeds = {salt: scheme.salted(salt).none_hash for salt in (b"", b"a", b"b")}
    assert seeds[b""] == scheme.none_hash
    assert len(set(seeds.values())) == 3
    assert {len(seed) for seed in seeds.values()} == {16}
    assert scheme.salted(b"a") == scheme.salted(b"a")


def test_a_key_of_one_owner_does_not_find_another_owners_session(world: World) -> None:
    opened = [world.open(open_key="key", owner=owner).session_id for owner in ("a", "b", "a")]
    assert opened == ["s1", "s2", "s1"]
    assert [session.owner for session in world.sessions()] == ["a", "b"]
    assert world.allocator.sessions.get("s3") is None


def test_finding_a_session_does_not_extend_the_lease_or_show_secrets(world: World) -> None:
    secrets: dict[str, Any] = {"open_key": "secret-key", "salt": b"secret-salt"}
    session = world.open(5.0, session_id=SessionId("secret-id"), **secrets)
    assert world.allocator.sessions.get("secret-id") == (world.pool, session)
    assert session.expires_seconds == 5.0
    assert "secret" not in repr(session)
    assert repr(DRAWN) not in repr(world.pool.config)
