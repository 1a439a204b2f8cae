"""What a person sees of the client: short tracebacks, and what objects say of themselves."""

import os
import socket
import traceback
from array import array
from collections.abc import Iterator
from dataclasses import replace

import pytest

from kvpool.client import AbortedError, BlockRemoved, BlockStored, Client, KvpoolError, Medium, PrefixIndex, connect
from kvpool.client.admin import AdminClient
from kvpool.client.transports.transport import EventBatch
from kvpool.core.ids import BlockHash, GroupId
from support.server import pool_config, running_server

MAX_FRAMES = 5
"""The caller's own, and four of the client."""


@pytest.fixture(name="address", params=["embedded:", "served"])
def fixture_address(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "embedded:":
        yield request.param
        return
    with running_server() as address:
        yield address


@pytest.fixture(name="client")
def fixture_client(address: str) -> Iterator[Client]:
    with connect(address) as client:
        client.create_pool(pool_config())
        yield client


def frames(caught: pytest.ExceptionInfo[KvpoolError]) -> int:
    """Counts the frames that Python prints, those of the errors before included."""
    printed = "".join(traceback.format_exception(caught.value))
    return printed.count('  File "')


def test_a_refusal_shows_few_frames(client: Client) -> None:
    with pytest.raises(KvpoolError) as caught:
        client.get_pool("missing")
    assert frames(caught) <= MAX_FRAMES
    with client.open_session("m") as session:
        request = session.request("r", range(5))
        for _ in range(2):  # an error that is kept grows no frames
            with pytest.raises(KvpoolError) as caught:
                session.allocate_slots(request, 10**6)
            assert frames(caught) <= MAX_FRAMES
        with pytest.raises(KvpoolError) as caught, session.step() as step:
            step.allocate_slots(request, 10**6)
        assert frames(caught) <= MAX_FRAMES


def test_a_bug_keeps_its_frames(client: Client) -> None:
    with client.open_session("m") as session, pytest.raises(TypeError) as caught:
        session.allocate_slots(session.request("r", range(5)), "five")  # type: ignore[arg-type]
    assert caught.traceback[-1].name != "run"


def test_an_unreachable_server_shows_few_frames() -> None:
    with connect("unix:/nowhere/s", deadline_seconds=0.2) as client, pytest.raises(KvpoolError) as caught:
        client.get_pool("m")
    assert frames(caught) <= MAX_FRAMES
    with AdminClient("unix:/nowhere/s", deadline_seconds=0.2) as admin, pytest.raises(KvpoolError) as caught:
        admin.overview()
    assert frames(caught) <= MAX_FRAMES


def test_objects_say_what_they_are_and_nothing_secret(client: Client, address: str) -> None:
    assert repr(client) == f"<Client of {address}>"
    session = client.open_session("m")
    assert session.session_id not in repr(session)
    assert repr(session) == "<Session 1 on pool 'm', after step 0>"
    session.admit(session.request("r", range(5)))
    assert repr(session) == "<Session 1 on pool 'm', after step 1>"
    session.close()
    assert repr(session) == "<Session 1 on pool 'm', closed>"


def test_an_evicted_session_says_that_it_ended() -> None:
    with running_server() as address, connect(address) as client, AdminClient(address) as admin:
        assert repr(admin) == f"<AdminClient of {address}>"
        client.create_pool(pool_config())
        session = client.open_session("m", client_name=" ")
        (listed,) = admin.sessions()
        assert listed.client_name.endswith(f"@{socket.gethostname()}:{os.getpid()}"), (
            "a name by which the process is found"
        )
        admin.evict_session("m", 1)
        with pytest.raises(AbortedError):
            session.admit(session.request("r", range(5)))
        assert repr(session) == "<Session 1 on pool 'm', ended>"


def test_the_length_of_an_index_counts_hashes() -> None:
    index = PrefixIndex()
    stored = BlockStored((BlockHash(b"h"),), None, array("I"), 16, None, GroupId(0))
    for number in (1, 2):  # in two blocks
        index.apply(EventBatch(number, (stored,)))
    assert len(index) == len(index.entries()) == 1
    assert repr(index) == "<PrefixIndex: 1 hashes after batch 2, whole: False>"


def test_a_hash_is_cached_while_a_tier_has_it() -> None:
    index, (a, b) = PrefixIndex(), (BlockHash(b"a"), BlockHash(b"b"))
    first = BlockStored((a, b), None, array("I"), 16, None, GroupId(0))
    index.apply(EventBatch(1, (first, replace(first, block_hashes=(a,), medium=Medium.HOST_MEMORY))))
    index.apply(EventBatch(2, (BlockRemoved(a, GroupId(0)),)))
    assert (index.cached([a, b]), index.num_prefix_blocks([a, b])) == ([True, True], 2)
    assert index.cached([a, b], medium=Medium.FIRST_TIER) == [False, True]
    assert index.num_prefix_blocks([a, b], medium=Medium.HOST_MEMORY) == 1
    assert index.entries(Medium.HOST_MEMORY) == {(0, a)}
    index.apply(EventBatch(3, (BlockRemoved(a, GroupId(0), 1, Medium.HOST_MEMORY),)))
    assert index.cached([a, b]) == [True, True], "another copy is left"
    index.apply(EventBatch(4, (BlockRemoved(a, GroupId(0), 0, Medium.HOST_MEMORY),)))
    index.apply(EventBatch(5, (BlockRemoved(a, GroupId(0)), BlockRemoved(b, GroupId(1)))))
    assert index.entries() == index.entries(Medium.FIRST_TIER) == {(0, b)}
