"""A large session frees its blocks in parts before it closes."""

import pytest

from kvpool.core.blocks.quota import Quota
from kvpool.core.commands import CloseSession, FreePart
from kvpool.core.errors import AbortedError
from kvpool.core.execution import end_session
from kvpool.core.sessions.session import Session
from support.core import World
from support.integrity import check_integrity
from support.journal import assert_alike
from support.state import restored


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(end_session, "MAX_PART_BLOCKS", 4)


def loaded(quota: Quota, *, reports: bool) -> tuple[World, Session]:
    """A session with five requests, two of which share blocks, beside another one."""
    world = World(60)
    world.admit(world.open(), 1, "ax", 8)
    session = world.open(quota=quota)
    for number, content in enumerate(("abcde", "abcfg", "hijkl", "mn", "opqrst"), 1):
        world.admit(session, number, content, 4 * len(content), executed=max(number - 2, 0) if reports else 0)
    if not reports:
        world.free(session, 3)
    return world, session


@pytest.mark.parametrize("reports", [False, True])
@pytest.mark.parametrize("quota", [Quota(), Quota(5, 40)])
def test_parts_end_in_the_state_of_a_session_closed_at_once(quota: Quota, reports: bool) -> None:  # noqa: FBT001
    at_once, session = loaded(quota, reports=reports)
    closed = at_once.allocator.execute(CloseSession(session.session_id), 5.0)
    in_parts, session = loaded(quota, reports=reports)
    num_parts = num_freed = 0
    while end_session.is_large(in_parts.pool, session):
        num_held = in_parts.pool.blocks.num_free_blocks
        num_freed += in_parts.allocator.execute(FreePart(session.session_id), 5.0)
        assert in_parts.pool.blocks.num_free_blocks - num_held <= 6, "the request that exceeds the part is the last"
        num_parts += 1
        check_integrity(in_parts.pool, in_parts.sessions())
        assert_alike(in_parts.allocator, restored(in_parts.allocator))
    assert num_parts > 4
    again = in_parts.allocator.execute(CloseSession(session.session_id, num_freed), 5.0)
    assert again.num_freed_requests == closed.num_freed_requests
    assert (
        in_parts.allocator.execute(CloseSession(session.session_id), 5.0).num_freed_requests
        == closed.num_freed_requests
    )
    assert in_parts.snapshot() == at_once.snapshot()


def test_a_part_renews_the_lease_and_needs_an_open_session() -> None:
    world, session = loaded(Quota(), reports=True)
    world.allocator.execute(FreePart(session.session_id), 9.0)
    assert session.last_seen_seconds == 9.0
    world.allocator.execute(CloseSession(session.session_id), 9.0)
    with pytest.raises(AbortedError):
        world.allocator.execute(FreePart(session.session_id), 9.0)
