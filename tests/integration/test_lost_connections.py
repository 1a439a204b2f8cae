"""A conversation over a network that fails at any byte: every change is made exactly once."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Final

import pytest

from kvpool.client import Client, PoolInfo, connect
from kvpool.client.transports import step_stream
from support.conversations import Answers, converse, converse_synchronously
from support.proxy import Fault, Link, Proxy
from support.server import pool_config, running_server

STRIDE_BYTES: Final = 7
"""Number of bytes between two faults; 1 tests each byte, which takes minutes."""
AT_ONCE: Final = 24
_numbers = count()


@dataclass(frozen=True)
class Outcome:
    """The results of a scheduler, and the final state of the pool."""

    answers: Answers
    pool: PoolInfo


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with running_server(max_pools=100_000) as address:
        yield address


@pytest.fixture(scope="module")
def direct(address: str) -> Iterator[Client]:
    with connect(address) as client:
        yield client


class Network:
    """Runs conversations through proxies, each in its own pool.

    Attributes:
        has_steps: Whether the proxies forward links of steps; otherwise steps go over gRPC.
        sync: Whether the client is the synchronous one.
        retries: Number of changes that were sent again so far.
    """

    def __init__(self, address: str, direct: Client, folder: Path) -> None:
        self._address = address
        self._direct = direct
        self._folder = folder
        self.has_steps = True
        self.sync = False
        self.retries = 0

    async def run(self, fault: Fault, **at: int) -> tuple[Outcome, Proxy]:
        name = f"p{next(_numbers)}"
        self._direct.create_pool(pool_config(name))
        proxy = Proxy(self._folder / name, self._address, fault, has_steps=self.has_steps, **at)
        async with proxy.running():
            if self.sync:
                answers = await asyncio.to_thread(converse_synchronously, proxy.address, name)
            else:
                answers = await converse(proxy.address, name)
        info = self._direct.get_pool(name)
        self.retries += info.activity.retries
        info.ClearField("config")
        info.activity.retries = 0
        return Outcome(answers, info), proxy

    async def run_all(self, fault: Fault, expected: Outcome, link: Link, stride: int) -> int:
        """Applies the fault at every `stride`th byte in each direction. Returns the number of conversations."""
        gate = asyncio.Semaphore(AT_ONCE)

        async def run_one(**at: int) -> None:
            async with gate:
                told, proxy = await self.run(fault, **at)
            assert told == expected, (fault, at)
            assert proxy.struck or fault is not Fault.CUT or not self.has_steps, at  # gRPC's own frames vary

        places: list[dict[str, int]] = [{"to_server": n} for n in range(0, link.to_server, stride)]
        places += [{"to_client": n} for n in range(0, link.to_client, stride)]
        async with asyncio.TaskGroup() as group:
            for at in places:
                group.create_task(run_one(**at))
        return len(places)


@pytest.fixture
def network(address: str, direct: Client, tmp_path: Path) -> Network:
    return Network(address, direct, tmp_path)


@pytest.mark.parametrize(
    ("route", "fault", "stride"),
    [
        ("link asyncio", Fault.CUT, 5 * STRIDE_BYTES),
        ("link blocking", Fault.CUT, 5 * STRIDE_BYTES),
        ("gRPC asyncio", Fault.CUT, 15 * STRIDE_BYTES),
        *(
            pytest.param(*values, marks=pytest.mark.slow)
            for values in (
                ("link asyncio", Fault.CUT, STRIDE_BYTES),
                ("link blocking", Fault.CUT, STRIDE_BYTES),
                ("link asyncio", Fault.DELAY, 2 * STRIDE_BYTES),
                ("link asyncio", Fault.BLACK_HOLE, 3 * STRIDE_BYTES),
                ("link blocking", Fault.BLACK_HOLE, 12 * STRIDE_BYTES),
                ("gRPC asyncio", Fault.CUT, 3 * STRIDE_BYTES),
                ("gRPC blocking", Fault.CUT, 20 * STRIDE_BYTES),
                ("gRPC blocking", Fault.BLACK_HOLE, 15 * STRIDE_BYTES),
            )
        ),
    ],
)
async def test_every_change_is_made_exactly_once_wherever_the_connection_fails(
    route: str, fault: Fault, stride: int, network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    network.has_steps, network.sync = "link" in route, "blocking" in route
    runs = [await network.run(fault) for _ in range(3)]
    expected = runs[0][0]
    for told, proxy in runs:
        assert told == expected
        assert (len(proxy.links), network.retries, proxy.struck) == (1, 0, False)
    assert (expected.pool.free_blocks, expected.pool.activity.steps) == (99, 4)
    monkeypatch.setattr(step_stream, "SILENCE_SECONDS", 1.0)  # so that the test is short
    links = [proxy.links[0] for _, proxy in runs]  # gRPC's own frames sometimes make one longer
    shortest = Link(min(link.to_server for link in links), min(link.to_client for link in links))
    tried = await network.run_all(fault, expected, shortest, stride)
    print(f"{tried} conversations, {network.retries} changes sent again")  # noqa: T201 - shown with -s
    assert (network.retries > 0) == (fault is not Fault.DELAY)
