"""A session that another part of the process takes over: its requests go on as if nothing had happened."""

from collections.abc import Callable
from functools import partial

import pytest

from kvpool.client import (
    AbortedError,
    Client,
    ExtraKeys,
    FullAttentionSpec,
    HeldRequest,
    InvalidArgumentError,
    KVCacheGroup,
    PoolConfig,
    Session,
    SlidingWindowSpec,
    connect,
)
from kvpool.core.ids import PoolName
from support.server import pool_config

PROMPT = list(range(41))


@pytest.fixture
def client() -> Client:
    client = connect("embedded:")
    client.create_pool(pool_config())
    return client


def resumed(client: Client, before: Session) -> tuple[Session, dict[str, HeldRequest]]:
    session = client.resume_session(before.session_id, sequence=before.sequence)
    return session, {held.request_id: held for held in session.held_requests}


def test_requests_go_on_exactly(client: Client) -> None:
    """Windows, tokens that were not sent yet, numbers: what comes after is what an uninterrupted session gets."""
    groups = tuple(map(KVCacheGroup, (FullAttentionSpec(4), SlidingWindowSpec(4, sliding_window=6))))
    answers = []
    for interrupt in (False, True):
        client.create_pool(PoolConfig(PoolName(f"w{interrupt}"), 64, 256, groups))
        session = client.open_session(f"w{interrupt}")
        keys = ExtraKeys(lora_name="l", cache_salt="s")
        request, waiting = session.request("r", PROMPT, extra_keys=keys), session.request("w", PROMPT)
        session.admit(request, 30)
        session.get_computed_blocks(waiting)
        request.append([1, 2, 3])  # the server has not heard of these
        if interrupt:
            after, held = resumed(client, session)
            assert (after.session_number, after.sequence) == (session.session_number + 1, session.sequence)
            assert after.table_lease.session_number == after.session_number
            adopted = after.adopt(held["r"], request.token_ids, extra_keys=keys)
            assert (adopted.block_ids, adopted.hashes) == (request.block_ids, request.hashes)
            session, request, waiting = after, adopted, after.adopt(held["w"], PROMPT)
        told: list[object] = [session.allocate_slots(request, 14), session.admit(waiting), session.sequence]
        new = session.request("n", [*PROMPT, 1])
        told += [session.admit(new), new.number, request.block_ids, waiting.block_ids]
        session.free(request)
        answers.append([*told, session.pool().free_blocks, session.pool().prefix_cache])
    assert answers[0] == answers[1]


def test_the_session_before_is_fenced_for_good(client: Client) -> None:
    session = client.open_session("m")
    request = session.request("r", PROMPT)
    session.admit(request)
    after, held = resumed(client, session)
    calls: list[Callable[[], object]] = [partial(session.free, request), session.mark_executed, session.close]
    for call in (*calls, calls[0]):
        with pytest.raises(AbortedError) as caught:
            call()
        assert caught.value.reason == "SESSION_RESUMED"
    assert (session.lease_left_seconds, after.lease_left_seconds) == (0.0, float("inf"))
    after.free(after.adopt(held["r"], PROMPT))
    assert client.get_pool("m").free_blocks == 99


@pytest.mark.parametrize(
    ("token_ids", "lora_name", "field"),
    [
        (PROMPT[:-1], "l", "token_ids"),
        ([9, *PROMPT[1:]], "l", "token_ids"),
        (PROMPT, None, "extra_keys"),
        (PROMPT, "m", "extra_keys"),
    ],
)
def test_what_is_not_the_request_is_not_adopted(
    client: Client, token_ids: list[int], lora_name: str | None, field: str
) -> None:
    session = client.open_session("m")
    session.admit(session.request("r", PROMPT, extra_keys=ExtraKeys(lora_name="l")))
    after, held = resumed(client, session)
    with pytest.raises(InvalidArgumentError) as caught:
        after.adopt(held["r"], token_ids, extra_keys=ExtraKeys(lora_name=lora_name))
    assert caught.value.field == field
    after.free_held(held["r"])
    assert client.get_pool("m").free_blocks == 99


def hit_of_another(client: Client) -> int:
    with client.open_session("m") as other:
        return other.get_computed_blocks(other.request("q", PROMPT)).num_tokens


def test_a_request_is_adopted_once(client: Client) -> None:
    """Two of one number would take the same slots."""
    before = client.open_session("m")
    before.admit(before.request("r", PROMPT))
    after, held = resumed(client, before)
    with pytest.raises(InvalidArgumentError, match="token_ids"):
        after.adopt(held["r"], PROMPT[1:])
    adopted = after.adopt(held["r"], PROMPT)
    with pytest.raises(InvalidArgumentError, match="adopted already"):
        after.adopt(held["r"], PROMPT)
    after.free(adopted)


def test_what_was_never_said_to_be_computed_goes_with_a_request_that_is_not_adopted(client: Client) -> None:
    session = client.open_session("m")
    request = session.request("r", PROMPT)
    session.admit(request, 20)
    session.mark_executed()
    session.allocate_slots(request, 21)
    after, held = resumed(client, session)
    after.free_held(held["r"])
    after.mark_executed()
    assert hit_of_another(client) == 20
    assert client.get_pool("m").free_blocks == 99


def test_not_even_its_own_session_finds_what_the_process_before_may_not_have_computed(client: Client) -> None:
    session = client.open_session("m")
    session.admit(session.request("r", PROMPT))
    after, held = resumed(client, session)
    after.free_held(held["r"])
    assert after.get_computed_blocks(after.request("again", PROMPT)).num_tokens == 0


def test_what_is_adopted_is_found_when_it_was_computed_again(client: Client) -> None:
    session = client.open_session("m")
    session.admit(session.request("r", PROMPT))
    after, held = resumed(client, session)
    after.adopt(held["r"], PROMPT)
    assert hit_of_another(client) == 0
    after.mark_executed()
    assert hit_of_another(client) == 40


@pytest.mark.parametrize("executed", [False, True])
def test_what_the_process_before_freed_stays_if_it_said_that_it_was_computed(client: Client, *, executed: bool) -> None:
    session = client.open_session("m")
    request = session.request("r", PROMPT)
    session.admit(request)
    if executed:
        session.mark_executed()
    session.free(request)
    after, held = resumed(client, session)
    assert not held
    after.mark_executed()
    assert hit_of_another(client) == (40 if executed else 0)


def test_a_sequence_that_was_never_reached_takes_nothing_over(client: Client) -> None:
    session = client.open_session("m")
    with pytest.raises(InvalidArgumentError, match="sequence"):
        client.resume_session(session.session_id, sequence=1)
    assert session.admit(session.request("r", PROMPT)) is not None


def test_a_session_that_closed_says_so_for_ever(client: Client) -> None:
    session = client.open_session("m")
    session.close()
    for _ in range(2):
        with pytest.raises(AbortedError) as caught:
            session.admit(session.request("r", PROMPT))
        assert caught.value.reason == "SESSION_CLOSED"
    assert session.lease_left_seconds == 0.0
