"""A conversation with a server, which has the same results over every way: those of a first session in its pool."""

import asyncio
from collections.abc import Callable
from typing import Final

from kvpool.client import aio, connect
from support.waiting import DEADLINE_SECONDS

_PROMPT: Final = list(range(41))
Answers = tuple[object, ...]


def _nothing() -> None:
    pass


async def converse(address: str, pool: str, between: Callable[[], object] = _nothing) -> Answers:
    """Opens a session, runs three steps, frees and closes.

    Args:
        address: Address of the server.
        pool: The pool, which exists.
        between: Called in a thread after the first step.
    """
    async with aio.connect(address, deadline_seconds=DEADLINE_SECONDS) as client:
        session = await client.open_session(pool, client_name="c")
        first, second = session.request("a", _PROMPT), session.request("b", _PROMPT)
        async with session.step() as step:
            admitted = step.admit(first, 20)
        await asyncio.to_thread(between)
        async with session.step(executed_sequence=1) as step:
            hit, more = step.admit(second), step.allocate_slots(first, 21)
        first.append([7, 8, 9, 10])
        decoded = await session.allocate_slots(first, 4)
        tables = [list(map(list, request.block_ids)) for request in (first, second)]
        await session.free(second)
        await session.close()
    return admitted, hit, more, decoded, tables, session.sequence


def converse_synchronously(address: str, pool: str, between: Callable[[], object] = _nothing) -> Answers:
    """Like `converse`, with the synchronous client, whose first step is sent before its result is awaited."""
    with connect(address, deadline_seconds=DEADLINE_SECONDS) as client:
        session = client.open_session(pool, client_name="c")
        first, second = session.request("a", _PROMPT), session.request("b", _PROMPT)
        with session.begin_step() as step:
            admitted = step.admit(first, 20)
        session.settle()
        between()
        with session.step(executed_sequence=1) as step:
            hit, more = step.admit(second), step.allocate_slots(first, 21)
        first.append([7, 8, 9, 10])
        decoded = session.allocate_slots(first, 4)
        tables = [list(map(list, request.block_ids)) for request in (first, second)]
        session.free(second)
        session.close()
    return admitted, hit, more, decoded, tables, session.sequence
