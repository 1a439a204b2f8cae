"""Links of a server without connections: what is read, how long it waits, and where it listens."""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import grpc
import pytest

from kvpool.core.errors import ExhaustedError
from kvpool.server.config import ServerConfig
from kvpool.server.limits.config import Limits
from kvpool.server.services.process_watch import ProcessWatch
from kvpool.server.services.step_links import StepLink, StepLinks
from kvpool.v1 import step_pb2
from kvpool.wire import link as wire_link
from kvpool.wire.frames import FrameReader
from support.raw_link import request, steps_hello
from support.waiting import until

STALL_SECONDS: Final = 0.1
HELLO: Final = steps_hello("server")
Serve = Callable[[Any, StepLink], Awaitable[object]]


class Transport(asyncio.Transport):
    """A connection that records what a link does with it."""

    def __init__(self, peer: object = "") -> None:
        super().__init__(
            {"peername": peer, "socket": SimpleNamespace(family=socket.AF_INET, setsockopt=lambda *_: None)}
        )
        self.frames: list[tuple[int, bytes]] = []
        self.reads = True
        self.is_open = True
        self._reader = FrameReader(wire_link.client_state())

    def write(self, data: Any) -> None:
        self.frames += self._reader.feed(data)

    def pause_reading(self) -> None:
        self.reads = False

    def resume_reading(self) -> None:
        self.reads = True

    def close(self) -> None:
        self.is_open = False

    def abort(self) -> None:
        self.is_open = False


class House:
    """The links of a server, each served by `serve`, or by what takes all steps once `is_released` is set."""

    def __init__(self, serve: Serve | None = None, max_links: int = 100, **config: Any) -> None:
        self.is_released = asyncio.Event()
        self.steps: list[object] = []
        """The steps that were taken, and EOF or the error after them."""
        handler: Any = SimpleNamespace(
            stream_stream=serve or self._take_steps, request_deserializer=step_pb2.Step.FromString
        )
        config = {"addresses": ("unix:/none/s",), "limits": Limits(stall_seconds=STALL_SECONDS), **config}
        self.links = StepLinks(ServerConfig(**config), handler, ProcessWatch(lambda _: None), "server", max_links)

    def connect(self, data: bytes = b"", peer: object = "") -> tuple[StepLink, Transport]:
        link, transport = StepLink(self.links), Transport(peer)
        link.connection_made(transport)
        if data:
            link.data_received(data)
        return link, transport

    async def _take_steps(self, _: object, link: StepLink) -> None:
        await self.is_released.wait()
        try:
            while (step := await link.read()) is not grpc.aio.EOF:
                self.steps.append(step.sequence)
            self.steps.append(grpc.aio.EOF)
        except ExhaustedError as error:
            self.steps.append(error.reason)


async def pass_time() -> None:
    """Waits until every timer of a stall that was set before has run."""
    passed = asyncio.Event()
    asyncio.get_running_loop().call_later(2 * STALL_SECONDS, passed.set)
    await passed.wait()


async def test_a_server_reads_no_more_from_a_client_that_is_far_ahead() -> None:
    house = House()
    link, transport = house.connect(HELLO + request(1) + request(2))
    await until(lambda: link.hello)
    link.data_received(request(3))
    assert transport.reads
    link.data_received(request(4) + request(5))
    assert not transport.reads
    house.is_released.set()
    await until(lambda: transport.reads)
    link.data_received(request(6))
    await until(lambda: house.steps == [1, 2, 3, 4, 5, 6])


async def test_the_time_limit_of_a_frame_does_not_run_while_the_server_does_not_read() -> None:
    house = House()
    link, transport = house.connect(HELLO + b"".join(map(request, range(1, 7))) + request(7)[:-1])
    await pass_time()
    assert not transport.reads
    house.is_released.set()
    await until(lambda: transport.reads)
    link.data_received(request(7)[-1:])
    await until(lambda: house.steps == [1, 2, 3, 4, 5, 6, 7])
    link.data_received(request(8)[:-1])
    await until(lambda: house.steps[7:] == ["NOTHING_SENT"])


async def test_the_time_limit_of_a_frame_ends_with_the_frame() -> None:
    house = House()
    house.is_released.set()
    link, _ = house.connect(HELLO + request(1)[:3])
    link.data_received(request(1)[3:])
    await pass_time()
    link.data_received(request(2))
    await until(lambda: house.steps == [1, 2])


async def test_a_link_that_waits_ends_when_its_client_has_gone() -> None:
    house = House()
    house.is_released.set()
    link, _ = house.connect(HELLO + request(1))
    await until(lambda: house.steps)
    link.connection_lost(None)
    await until(lambda: house.steps == [1, grpc.aio.EOF])
    assert link.task
    await link.task


async def test_a_step_whose_client_has_gone_is_cancelled() -> None:
    house = House()
    link, _ = house.connect(HELLO)
    await until(lambda: link.hello)
    link.connection_lost(None)
    assert link.task
    await link.task
    assert not house.steps


async def test_a_client_that_does_not_read_is_refused_in_time_and_one_that_reads_again_is_not() -> None:
    met: list[object] = []

    async def answer(_: object, link: StepLink) -> None:
        link.pause_writing()
        asyncio.get_running_loop().call_soon(link.resume_writing)
        await link.write(step_pb2.StepResult())
        link.pause_writing()
        try:
            await link.write(step_pb2.StepResult())
        except ExhaustedError as error:
            met.append(error.reason)

    link, transport = House(answer).connect(HELLO)
    link.welcome("session")
    await until(lambda: met == ["NOT_READING"])
    assert [kind for kind, _ in transport.frames] == [2, 5, 5]


@pytest.mark.parametrize(
    ("name", "peer"),
    [(("127.0.0.1", 5), "ipv4:127.0.0.1:5"), (("::1", 5, 0, 0), "ipv6:::1:5"), ("", "unix:"), (None, "unix:")],
)
async def test_a_link_names_its_peer_as_grpc_does(name: object, peer: str) -> None:
    link, _ = House().connect(peer=name)
    assert link.peer() == peer


async def test_connections_without_a_hello_take_no_place_of_a_session() -> None:
    house = House(max_links=3)
    greeted, _ = house.connect(HELLO)
    await until(lambda: greeted.hello)
    strangers = [house.connect() for _ in range(2)]
    others = [house.connect(HELLO) for _ in range(2)]
    assert [transport.is_open for _, transport in strangers] == [False, False]
    for link, transport in others:
        await until(lambda link=link: link.hello)  # type: ignore[misc]  # of the default
        assert transport.is_open
    for link, _ in strangers:
        link.connection_lost(None)
    link, transport = house.connect(HELLO)
    assert (transport.is_open, link.task) == (False, None), "all have said hello"
    link.connection_lost(None)
    others[0][0].connection_lost(None)
    assert house.connect(HELLO)[1].is_open


async def test_an_address_that_cannot_be_bound_fails_only_if_it_is_a_setting(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a.steps").write_text("a file")
    addresses = tuple(f"unix:{tmp_path / name}" for name in "ab")
    links = House(addresses=addresses).links
    with caplog.at_level(logging.WARNING):
        assert await links.listen(None) == [f"unix:{tmp_path / 'b.steps'}"]
    assert [(record.msg, record.__dict__["address"]) for record in caplog.records] == [
        ("steps taken over gRPC only", f"unix:{tmp_path / 'a.steps'}")
    ]
    assert (links.listener.server_id, [*links.listener.paths]) == ("server", ["b.steps"])
    await asyncio.sleep(0)  # it waits for connections
    await links.stop(0)
    assert [path.name for path in tmp_path.iterdir()] == ["a.steps"]  # noqa: ASYNC240 - a local folder
    with pytest.raises(OSError, match=f"^steps_listen: .*{tmp_path}/a.steps: "):
        await House(addresses=addresses, steps_listen=(f"unix:{tmp_path / 'a.steps'}",)).links.listen(None)
