"""A session that another part of the process resumes: its requests continue unchanged."""

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


def test_adopted_requests_continue_with_the_same_tables(client: Client) -> None:
    """With windows and unsent tokens, later answers equal those of an uninterrupted session."""
    groups = tuple(map(KVCacheGroup, (FullAttentionSpec(4), SlidingWindowSpec(4, sliding_window=6))))
    answers = []
    for interrupt in (False, True):
        client.create_pool(PoolConfig(PoolName(f"w{interrupt}"), 64, 200, groups))
        session = client.open_session(f"w{interrupt}")
        keys = ExtraKeys(lora_name="l", cache_salt="s")
        request, waiting = session.request("r", PROMPT, extra_keys=keys), session.request("w", PROMPT)
        session.admit(request, 30)
        session.get_computed_blocks(waiting)
        request.append([1, 2, 3])  # not sent to the server yet
        if interrupt:
            after, held = resumed(client, session)
            assert (after.session_number, after.sequence) == (session.session_number + 1, session.sequence)
            assert after.table_lease.session_number == after.session_number
            adopted = after.adopt(held["r"], request.token_ids, extra_keys=keys)
            assert (adopted.block_ids, adopted.hashes) == (request.block_ids, request.hashes)
            session, request, waiting = after, adopted, after.adopt(held["w"], PROMPT)
        results: list[object] = [session.allocate_slots(request, 14), session.admit(waiting), session.sequence]
        new = session.request("n", [*PROMPT, 1])
        results += [session.admit(new), new.number, request.block_ids, waiting.block_ids]
        session.free(request)
        answers.append([*results, session.pool().free_blocks, session.pool().prefix_cache])
    assert answers[0] == answers[1]


def test_the_previous_session_stays_fenced(client: Client) -> None:
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
def test_other_tokens_or_keys_are_not_adopted(
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
    """Two requests with one number would use the same slots."""
    before = client.open_session("m")
    before.admit(before.request("r", PROMPT))
    after, held = resumed(client, before)
    with pytest.raises(InvalidArgumentError, match="token_ids"):
        after.adopt(held["r"], PROMPT[1:])
    adopted = after.adopt(held["r"], PROMPT)
    for call in (lambda: after.adopt(held["r"], PROMPT), lambda: after.free_held(held["r"])):
        with pytest.raises(InvalidArgumentError, match="adopted or freed already"):
            call()
    after.free(adopted)


def test_blocks_not_reported_as_executed_are_lost_when_a_held_request_is_freed(client: Client) -> None:
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


def test_a_resumed_session_does_not_hit_blocks_that_may_not_have_been_executed(client: Client) -> None:
    session = client.open_session("m")
    session.admit(session.request("r", PROMPT))
    after, held = resumed(client, session)
    after.free_held(held["r"])
    assert after.get_computed_blocks(after.request("again", PROMPT)).num_tokens == 0


def test_adopted_blocks_are_hit_after_they_are_computed_again(client: Client) -> None:
    session = client.open_session("m")
    session.admit(session.request("r", PROMPT))
    after, held = resumed(client, session)
    after.adopt(held["r"], PROMPT)
    assert hit_of_another(client) == 0
    after.mark_executed()
    assert hit_of_another(client) == 40


@pytest.mark.parametrize("executed", [False, True])
def test_blocks_freed_by_the_previous_process_stay_cached_if_reported_as_executed(
    client: Client, *, executed: bool
) -> None:
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


def test_resuming_with_a_sequence_that_was_never_reached_is_refused(client: Client) -> None:
    session = client.open_session("m")
    with pytest.raises(InvalidArgumentError, match="sequence"):
        client.resume_session(session.session_id, sequence=1)
    assert session.admit(session.request("r", PROMPT)) is not None


def test_a_closed_session_raises_the_same_error_every_time(client: Client) -> None:
    session = client.open_session("m")
    session.close()
    for _ in range(2):
        with pytest.raises(AbortedError) as caught:
            session.admit(session.request("r", PROMPT))
        assert caught.value.reason == "SESSION_CLOSED"
    assert session.lease_left_seconds == 0.0
