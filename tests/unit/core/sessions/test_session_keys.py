"""Calls that can be repeated: opening with a key, and closing. Leases and their bounds."""

from typing import Any

import pytest

from kvpool.core.errors import UnavailableError
from kvpool.core.sessions.session import LeaseBounds, Session
from support.core import World
from support.refusals import refused


def opened(world: World, key: str, lease_seconds: float = 10.0, client_name: str = "c", **options: Any) -> Session:
    asked = (lease_seconds,)
    return world.open(lease_seconds, client_name=client_name, open_key=key, requested=asked, **options)


def test_the_same_key_finds_the_session_it_opened(world: World) -> None:
    session = opened(world, "k")
    assert opened(world, "k", now_seconds=7.0) is session
    assert (session.last_seen_seconds, world.pool.activity.sessions_opened, world.pool.activity.retries) == (7.0, 1, 1)
    assert opened(world, "other") is not session
    assert opened(world, "") is not opened(world, "")


@pytest.mark.parametrize(
    "change", [{"pool": "n"}, {"client_name": "d"}, {"lease_seconds": 11.0}, {"reserve_tokens": 8}]
)
def test_a_key_used_with_different_arguments_is_refused(world: World, change: dict[str, Any]) -> None:
    session = opened(world, "k")
    with world.refuses(field="open_key", reason="OPEN_KEY_REUSED"):
        opened(world, "k", now_seconds=1.0, **change)
    assert session.last_seen_seconds == 0.0


def test_a_key_can_be_reused_after_its_session_ended(world: World) -> None:
    closed = opened(world, "k")
    world.allocator.close_session(closed.session_id, 0.0)
    overdue = opened(world, "k", client_name="d")
    assert overdue is not closed
    again = opened(world, "k", now_seconds=10.0)  # although the session was not ended yet
    assert again is not overdue
    world.allocator.expire(10.0)
    assert opened(world, "k", now_seconds=10.0) is again


def test_a_drained_pool_still_finds_a_session_that_is_open(world: World) -> None:
    session = opened(world, "k")
    world.allocator.pools.drained.add(None)
    assert opened(world, "k") is session
    with world.refuses(UnavailableError, reason="DRAINED"):
        opened(world, "l")


@pytest.mark.parametrize("key", ["k" * 65, "ü" * 33, "\ud800" * 22])
def test_keys_have_a_maximum_length(world: World, key: str) -> None:
    session = opened(world, "k" * 64)
    with world.refuses(field="open_key"):
        opened(world, key)
    assert world.sessions() == [session]


@pytest.mark.parametrize(
    ("bounds", "field"),
    [
        ((0.05, 10.0, 1.0), "min_lease_seconds"),
        ((float("nan"), 10.0, 1.0), "min_lease_seconds"),
        ((2.0, 1.0, 2.0), "max_lease_seconds"),
        ((2.0, 86401.0, 2.0), "max_lease_seconds"),
        ((2.0, 3.0, 1.0), "default_lease_seconds"),
        ((2.0, 3.0, 4.0), "default_lease_seconds"),
    ],
)
def test_bounds_of_leases_are_checked_by_name(bounds: tuple[float, float, float], field: str) -> None:
    with pytest.raises(ValueError, match=f"^{field}: "):
        LeaseBounds(*bounds)


@pytest.mark.parametrize("asked_seconds", [0.5, 3601.0, float("nan"), -1.0])
def test_leases_out_of_bounds_are_refused(asked_seconds: float) -> None:
    with refused(field="lease_seconds"):
        LeaseBounds().choose(asked_seconds)
    assert LeaseBounds(2.0, 5.0, 3.0).choose(0.0) == 3.0
