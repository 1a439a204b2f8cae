"""Steps that a scheduler begins, and settles later."""

from collections.abc import Coroutine, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from kvpool.client import Client, Session, aio, connect
from kvpool.client.transports.link_calls import SocketCall
from kvpool.core.errors import InvalidArgumentError, WrongStateError
from kvpool.core.steps.columns import Outcome
from support.server import ServerProcess, pool_config, running_server

PROMPT = list(range(41))


@pytest.fixture(params=["embedded", "served"])
def client(request: pytest.FixtureRequest) -> Iterator[Client]:
    if request.param == "embedded":
        with connect("embedded:") as client:
            yield client
    else:
        with running_server() as address, connect(address) as client:
            yield client


@pytest.fixture
def session(client: Client) -> Session:
    client.create_pool(pool_config())
    return client.open_session("m")


def test_answers_come_when_the_step_is_settled(client: Client, session: Session) -> None:
    first, second = session.request("a", PROMPT), session.request("b", PROMPT)
    with session.begin_step() as step:
        admitted = step.admit(first)
    assert (admitted.outcome, session.sequence, first.num_computed_tokens) == (None, 0, 0)
    session.settle()
    assert (admitted.outcome, session.sequence, first.num_computed_tokens) == (Outcome.OK, 1, 41)
    with session.begin_step(executed_sequence=1) as step:
        hit = step.admit(second)
    session.settle()
    assert (hit.num_hit_tokens, hit.hit_blocks[0]) == (40, first.block_ids[0][:10])
    assert client.get_pool("m").activity.steps == 2


def test_requests_grow_while_a_step_is_in_flight(client: Client, session: Session) -> None:
    """As in a scheduler that works ahead: the token of a step is known while the next step is in flight."""
    request = session.request("a", PROMPT)
    session.admit(request)
    plain = client.open_session("m")
    twin = plain.request("a", PROMPT[::-1])
    plain.admit(twin)
    answered_at_once = []
    for token_id in range(60):
        with session.begin_step(executed_sequence=session.sequence) as step:
            ahead = step.decode([request])
        request.append([token_id])
        answered_at_once.append(ahead.is_answered)
        session.settle()
        assert ahead.is_answered
        with plain.step(executed_sequence=plain.sequence) as step:
            asked = step.decode([twin])
        twin.append([token_id])
        assert [len(ids) for ids in ahead.new_blocks[0]] == [len(ids) for ids in asked.new_blocks[0]]
    assert set(answered_at_once) == {True, False}
    assert request.num_computed_tokens == twin.num_computed_tokens == 101
    assert [len(request.hashes), len(request.block_ids[0])] == [len(twin.hashes), len(twin.block_ids[0])]


def test_an_unsettled_step_blocks_other_calls(client: Client, session: Session) -> None:
    request = session.request("a", PROMPT)
    with session.begin_step() as step:
        step.admit(request)
    with pytest.raises(WrongStateError, match="settle"):
        session.free(request)
    with pytest.raises(WrongStateError, match="settle"), session.begin_step():
        pass
    session.settle()
    session.settle()  # does nothing
    assert (client.get_pool("m").activity.steps, session.sequence) == (1, 1)
    session.free(request)
    assert client.get_pool("m").free_blocks == 99


def test_a_refusal_is_raised_when_the_step_is_settled(client: Client, session: Session) -> None:
    with session.begin_step() as step:
        step.evict_blocks([100])
    with pytest.raises(InvalidArgumentError, match="block_ids"):
        session.settle()
    session.settle()
    assert (client.get_pool("m").activity.steps, session.sequence) == (0, 0)


@pytest.mark.parametrize("block_id", [-1, 2**40])
def test_a_step_that_cannot_be_encoded_is_refused_and_the_session_continues(
    client: Client, session: Session, block_id: int
) -> None:
    for _ in range(2):
        with session.begin_step() as step:
            step.evict_blocks([block_id])
        with pytest.raises(InvalidArgumentError, match="block_ids"):
            session.settle()
        with pytest.raises(InvalidArgumentError, match="block_ids"), session.step() as step:
            step.evict_blocks([block_id])
    assert (client.get_pool("m").activity.steps, session.sequence) == (0, 0)
    assert session.admit(session.request("a", PROMPT))


def test_a_step_is_collected_once(session: Session) -> None:
    collected = session.begin_step()
    with collected:
        pass
    with pytest.raises(RuntimeError, match="once"), collected:
        pass


@pytest.mark.parametrize("during", ["begin", "settle"])
def test_an_interrupted_step_leaves_no_answer_for_the_next(during: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After Ctrl-C between any two lines, the answer in flight is not taken for the next step's."""
    with running_server() as address, connect(address) as client:
        client.create_pool(pool_config())
        session = client.open_session("m")
        interrupts = [KeyboardInterrupt()]

        def interrupted(call: SocketCall, due_seconds: float) -> Coroutine[object, object, bytes]:
            if interrupts:
                raise interrupts.pop()
            return receive(call, due_seconds)

        def interrupted_once_sent(call: SocketCall, step: bytes, due_seconds: float) -> None:
            send(call, step, due_seconds)
            if interrupts:
                raise interrupts.pop()

        send, receive = SocketCall.send, SocketCall.receive
        if during == "begin":
            monkeypatch.setattr(SocketCall, "send", interrupted_once_sent)
        request = session.request("a", PROMPT)
        expected = pytest.raises(KeyboardInterrupt) if during == "begin" else nullcontext()
        with expected, session.begin_step() as step:
            admitted = step.admit(request)
        if during == "settle":
            monkeypatch.setattr(SocketCall, "receive", interrupted)
            with pytest.raises(KeyboardInterrupt):
                session.settle()
        for _ in range(3):
            session.settle()
        assert admitted.ok
        with session.step() as step:
            hit = step.admit(session.request("b", PROMPT))
        assert (hit.num_hit_tokens, session.sequence) == (40, 2)


def test_the_service_works_while_the_scheduler_does() -> None:
    with running_server() as address, connect(address) as client, connect(address) as other:
        client.create_pool(pool_config())
        session = client.open_session("m")
        with session.begin_step() as step:
            answer = step.admit(session.request("a", PROMPT))
        while not other.get_pool("m").activity.steps:  # the test's time limit ends it
            pass
        assert answer.outcome is None
        session.settle()
        assert answer.ok
        assert other.get_pool("m").activity.retries == 0


async def test_an_asyncio_session_begins_a_step_over_a_restart_of_the_server(tmp_path: Path) -> None:
    """`begin` reports no broken connection: `settle` sends the step again."""
    address, journal = f"unix:{tmp_path / 's'}", {"folder": str(tmp_path / "journal")}
    with ServerProcess(address, journal=journal) as server:
        async with aio.connect(address) as client:
            await client.create_pool(pool_config())
            session = await client.open_session("m")
            request = session.request("a", PROMPT)
            server.kill()
            async with session.begin_step() as step:
                admitted = step.admit(request)
            server.restart()
            await session.settle()
            assert (admitted.outcome, request.num_computed_tokens) == (Outcome.OK, len(PROMPT))
