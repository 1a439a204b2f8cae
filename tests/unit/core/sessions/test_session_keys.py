"""Calls that can be repeated: opening with a key, and closing. Leases and their bounds."""

from collections.abc import Callable

import pytest

from kvpool.core.errors import InvalidArgumentError, KvpoolError
from kvpool.core.ids import SessionId
from kvpool.core.sessions.session import LeaseBounds, Session
from support.core import World


class Keyed(World):
    """A world whose sessions are opened with keys."""

    drawn = 0

    def open_with(
        self, key: str, *, pool: str = "m", client: str = "c", lease_seconds: float = 10.0, now_seconds: float = 0.0
    ) -> Session:
        self.drawn += 1
        return self.allocator.open_session(
            pool,
            client,
            lease_seconds,
            session_id=SessionId(f"id{self.drawn}"),
            now_seconds=now_seconds,
            open_key=key,
            requested=(lease_seconds,),
        )[1]


@pytest.fixture
def world() -> Keyed:
    return Keyed()


def refusal(call: Callable[[], object]) -> tuple[type[KvpoolError], str, str]:
    with pytest.raises(KvpoolError) as caught:
        call()
    return type(caught.value), caught.value.field, caught.value.reason


def test_the_same_key_finds_the_session_it_opened(world: Keyed) -> None:
    session = world.open_with("k")
    assert world.open_with("k", now_seconds=7.0) is session
    assert (session.last_seen_seconds, world.pool.activity.sessions_opened, world.pool.activity.retries) == (7.0, 1, 1)
    assert world.open_with("other") is not session
    assert world.open_with("") is not world.open_with("")


@pytest.mark.parametrize("change", [{"pool": "n"}, {"client": "d"}, {"lease_seconds": 11.0}])
def test_a_key_used_with_different_arguments_is_refused(world: Keyed, change: dict[str, object]) -> None:
    session = world.open_with("k")
    before = world.snapshot(), session.last_seen_seconds
    assert refusal(lambda: world.open_with("k", now_seconds=1.0, **change)) == (  # type: ignore[arg-type]
        InvalidArgumentError, "open_key", "OPEN_KEY_REUSED",
    )  # fmt: skip
    assert (world.snapshot(), session.last_seen_seconds) == before


def test_a_key_can_be_reused_after_its_session_ended(world: Keyed) -> None:
    closed = world.open_with("k")
    world.allocator.close_session(closed.session_id, 0.0)
    overdue = world.open_with("k", client="d")
    assert overdue is not closed
    again = world.open_with("k", now_seconds=10.0)  # although the session was not ended yet
    assert again is not overdue
    world.allocator.expire(10.0)
    assert world.open_with("k", now_seconds=10.0) is again


def test_a_drained_pool_still_finds_a_session_that_is_open(world: Keyed) -> None:
    session = world.open_with("k")
    world.allocator.pools.drain_state.drain(None)
    assert world.open_with("k") is session
    assert refusal(lambda: world.open_with("l"))[2] == "DRAINED"


@pytest.mark.parametrize("key", ["k" * 65, "ü" * 33, "\ud800" * 22])
def test_keys_have_a_maximum_length(world: Keyed, key: str) -> None:
    session = world.open_with("k" * 64)
    assert refusal(lambda: world.open_with(key))[:2] == (InvalidArgumentError, "open_key")
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
    assert refusal(lambda: LeaseBounds().choose(asked_seconds))[:2] == (InvalidArgumentError, "lease_seconds")
    assert LeaseBounds(2.0, 5.0, 3.0).choose(0.0) == 3.0
