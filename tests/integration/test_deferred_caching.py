"""Blocks that decodes fill on credit: other sessions of a real server find them once their step is executed."""

import asyncio

import pytest

from kvpool.client import DeadlineError, aio, connect
from kvpool.client.transports.grpc import StepStream
from kvpool.v1 import step_pb2
from support.server import pool_config, running_server

PROMPTS = ([1] * 8, [2] * 7)
"""In blocks of 4 tokens: the first needs a block with its next token, the second fills one."""


def test_blocks_filled_by_a_synchronous_session_are_hit_after_execution() -> None:
    with running_server() as address, connect(address) as client:
        client.create_pool(pool_config())
        session, other = client.open_session("m"), client.open_session("m")
        requests = [session.request(f"r{i}", prompt) for i, prompt in enumerate(PROMPTS)]
        for request in requests:
            session.admit(request)
        with session.step() as step:
            step.decode(requests, [3, 3])
        assert client.get_pool("m").cached_blocks == 3
        assert other.get_computed_blocks(other.request("before", [*requests[1].token_ids, 0])).num_tokens == 0
        session.mark_executed()
        assert other.get_computed_blocks(other.request("after", [*requests[1].token_ids, 0])).num_tokens == 8
        assert client.get_pool("m").cached_blocks == 4


@pytest.mark.parametrize("continues_with", ["the report again", "the next step"])
def test_blocks_filled_by_an_asyncio_session_are_hit_after_a_lost_report(
    continues_with: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchange = StepStream._exchange_once
    lost: list[step_pb2.StepResult] = []

    async def lose(self: StepStream, message: step_pb2.Step, timeout_seconds: float) -> step_pb2.StepResult:
        lost.append(await exchange(self, message, timeout_seconds))
        monkeypatch.setattr(StepStream, "_exchange_once", exchange)
        raise DeadlineError("DEADLINE", "lost")

    async def play(address: str) -> None:
        async with aio.connect(address) as client:
            session, other = await client.open_session("m"), await client.open_session("m")
            requests = [session.request(f"r{i}", prompt) for i, prompt in enumerate(PROMPTS)]
            for request in requests:
                await session.admit(request)
            async with session.step() as step:
                step.decode(requests, [3, 3])
            monkeypatch.setattr(StepStream, "_exchange_once", lose)
            with pytest.raises(DeadlineError):
                await session.mark_executed()
            if continues_with == "the next step":
                await session.free(requests[0])
            else:
                await session.mark_executed()
            found = await other.get_computed_blocks(other.request("after", [*requests[1].token_ids, 0]))
            assert (len(lost), found.num_tokens) == (1, 8)

    with running_server() as address:
        with connect(address) as client:
            client.create_pool(pool_config())
        asyncio.run(play(address))
