"""Fences as ranks see them on the wire, and the blocks of an ended session."""

from collections.abc import Iterator

import pytest

from kvpool.client import Client, Session, connect
from kvpool.client.admin import AdminClient
from kvpool.v1 import worker_pb2
from support.server import pool_config, running_server
from support.waiting import wait_until
from support.wire_ranks import WireRank, form, keep

PROMPT = list(range(100))
HELD_BLOCKS = 7


@pytest.fixture
def address() -> Iterator[str]:
    with running_server(quarantine_seconds=600.0) as address:
        yield address


@pytest.fixture
def client(address: str) -> Iterator[Client]:
    with connect(address) as client:
        yield client


def fill(client: Client) -> Session:
    session = client.open_session("m", lease_seconds=60.0)
    assert session.admit(session.request("r", PROMPT))
    return session


def evict(address: str, session: Session) -> None:
    with AdminClient(address) as admin:
        (number,) = (s.session_number for s in admin.sessions("m"))
        assert number == session.session_number
        admin.evict_session("m", number)


def quarantined(client: Client) -> tuple[int, int]:
    info = client.get_pool("m")
    return info.quarantined_sessions, info.quarantined_blocks


def next_fence(rank: WireRank, after: worker_pb2.Fence) -> worker_pb2.Fence:
    return rank.wait_for("fence", lambda m: m.fence.fence_sequence > after.fence_sequence).fence


def test_blocks_are_reused_when_every_rank_has_answered_the_fence(address: str, client: Client) -> None:
    ranks = form(address, 2, 2)
    first = [rank.wait_for("fence").fence for rank in ranks]
    assert [(f.fence_sequence, f.epoch, f.last_session_number, [*f.live_session_numbers]) for f in first] == [
        (1, 1, 0, []) for _ in ranks
    ]
    session = fill(client)
    evict(address, session)
    assert quarantined(client) == (1, HELD_BLOCKS)
    live = client.open_session("m")
    fences = [next_fence(rank, fence) for rank, fence in zip(ranks, first, strict=True)]
    assert [(f.last_session_number, [*f.live_session_numbers]) for f in fences] == [(session.session_number, [])] * 2
    keep(ranks[0], fences[0])
    ranks[0].beat(77).wait_for("status", lambda m: m.status.heartbeat_sequence == 77)
    assert quarantined(client) == (1, HELD_BLOCKS), "the other rank may still run a step of it"
    keep(ranks[1], fences[1])
    wait_until(lambda: quarantined(client) == (0, 0), "all ranks have answered")
    second = fill(client)
    live.close()
    fence = next_fence(ranks[0], fences[0])
    assert list(fence.live_session_numbers) == [second.session_number], "closed sessions are fenced, too"


def test_a_pool_without_ranks_frees_blocks_in_time() -> None:
    with running_server(quarantine_seconds=0.3) as address, connect(address) as client:
        usable = client.create_pool(pool_config()).free_blocks
        evict(address, fill(client))
        wait_until(lambda: client.get_pool("m").free_blocks == usable, "its time is up")
