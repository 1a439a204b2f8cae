"""A conversation over a network that fails at any byte: every change is made exactly once."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Final

import pytest

from kvpool.client import Client, PoolInfo, aio, connect
from support.proxy import Fault, Link, Proxy
from support.server import pool_config, running_server
from support.waiting import DEADLINE_SECONDS

PROMPT: Final = list(range(41))
STRIDE_BYTES: Final = 7
"""Number of bytes between two faults; 1 tests each byte, which takes minutes."""
AT_ONCE: Final = 24
_numbers = count()


@dataclass(frozen=True)
class Outcome:
    """The results of a scheduler, and the final state of the pool."""

    answers: tuple[object, ...]
    pool: PoolInfo


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with running_server(max_pools=100_000) as address:
        yield address


@pytest.fixture(scope="module")
def direct(address: str) -> Iterator[Client]:
    with connect(address) as client:
        yield client


async def converse(address: str, pool: str) -> tuple[object, ...]:
    """Opens a session, runs three steps, frees and closes."""
    async with aio.connect(address, deadline_seconds=DEADLINE_SECONDS) as client:
        session = await client.open_session(pool, client_name="c")
        first, second = session.request("a", PROMPT), session.request("b", PROMPT)
        async with session.step() as step:
            admitted = step.admit(first, 20)
        async with session.step(executed_sequence=1) as step:
            hit, more = step.admit(second), step.allocate_slots(first, 21)
        first.append([7, 8, 9, 10])
        decoded = await session.allocate_slots(first, 4)
        tables = [list(map(list, request.block_ids)) for request in (first, second)]
        await session.free(second)
        await session.close()
    return admitted, hit, more, decoded, tables, session.sequence


def converse_synchronously(address: str, pool: str) -> tuple[object, ...]:
    """Like `converse`, with the synchronous client, whose first step is sent before its result is awaited."""
    with connect(address, deadline_seconds=DEADLINE_SECONDS) as client:
        session = client.open_session(pool, client_name="c")
        first, second = session.request("a", PROMPT), session.request("b", PROMPT)
        with session.begin_step() as step:
            admitted = step.admit(first, 20)
        session.settle()
        with session.step(executed_sequence=1) as step:
            hit, more = step.admit(second), step.allocate_slots(first, 21)
        first.append([7, 8, 9, 10])
        decoded = session.allocate_slots(first, 4)
        tables = [list(map(list, request.block_ids)) for request in (first, second)]
        session.free(second)
        session.close()
    return admitted, hit, more, decoded, tables, session.sequence


class Network:
    """Runs conversations through proxies, each in its own pool."""

    def __init__(self, address: str, direct: Client, folder: Path) -> None:
        self._address = address
        self._direct = direct
        self._folder = folder
        self.retries = 0

    async def run(self, fault: Fault, *, sync: bool = False, **at: int) -> tuple[Outcome, Proxy]:
        name = f"p{next(_numbers)}"
        self._direct.create_pool(pool_config(name))
        async with Proxy(self._folder / name, self._address, fault, **at).running() as proxy:
            if sync:
                answers = await asyncio.to_thread(converse_synchronously, proxy.address, name)
            else:
                answers = await converse(proxy.address, name)
        info = self._direct.get_pool(name)
        self.retries += info.activity.retries
        info.ClearField("config")
        info.activity.retries = 0
        return Outcome(answers, info), proxy

    async def run_all(self, fault: Fault, expected: Outcome, link: Link, *, stride: int, sync: bool = False) -> int:
        """Applies the fault at every `stride`th byte in each direction. Returns the number of conversations."""
        gate = asyncio.Semaphore(AT_ONCE)

        async def run_one(**at: int) -> None:
            async with gate:
                told, proxy = await self.run(fault, sync=sync, **at)
            assert told == expected, (fault, at)
            assert proxy.struck or fault is not Fault.CUT, at

        places: list[dict[str, int]] = [{"to_server": n} for n in range(0, link.to_server - 40, stride)]
        places += [{"to_client": n} for n in range(0, link.to_client - 40, stride)]
        async with asyncio.TaskGroup() as group:
            for at in places:
                group.create_task(run_one(**at))
        return len(places)


@pytest.fixture
def network(address: str, direct: Client, tmp_path: Path) -> Network:
    return Network(address, direct, tmp_path)


@pytest.mark.parametrize(
    ("fault", "stride", "sync"),
    [
        (Fault.CUT, 5 * STRIDE_BYTES, False),
        pytest.param(Fault.CUT, STRIDE_BYTES, False, marks=pytest.mark.slow),
        pytest.param(Fault.CUT, 20 * STRIDE_BYTES, True, marks=pytest.mark.slow),
        pytest.param(Fault.DELAY, 5 * STRIDE_BYTES, False, marks=pytest.mark.slow),
        pytest.param(Fault.BLACK_HOLE, 15 * STRIDE_BYTES, False, marks=pytest.mark.slow),
        (Fault.BLACK_HOLE, 60 * STRIDE_BYTES, True),
    ],
)
async def test_every_change_is_made_exactly_once_wherever_the_connection_fails(
    fault: Fault,
    stride: int,
    sync: bool,  # noqa: FBT001 - a parameter of the test
    network: Network,
) -> None:
    runs = [await network.run(fault, sync=sync) for _ in range(3)]
    expected = runs[0][0]
    for told, proxy in runs:
        assert told == expected
        assert (len(proxy.links), network.retries, proxy.struck) == (1, 0, False)
    assert (expected.pool.free_blocks, expected.pool.activity.steps) == (99, 4)
    links = [proxy.links[0] for _, proxy in runs]  # gRPC's own frames sometimes make one longer
    shortest = Link(min(link.to_server for link in links), min(link.to_client for link in links))
    tried = await network.run_all(fault, expected, shortest, stride=stride, sync=sync)
    print(f"{tried} conversations, {network.retries} changes sent again")  # noqa: T201 - shown with -s
    assert (network.retries > 0) == (fault is not Fault.DELAY)
