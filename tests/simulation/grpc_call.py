"""One call of the simulated gRPC, with both ends. Its messages cross the network as bytes.

A call is bound to the server process that listened when it began. It ends once, for each side on its own: with a
status, a deadline, a cancellation, or because its connection broke, with any part of what was sent delivered before.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, Protocol

import grpc

from simulation.network import Network, Pipe
from simulation.virtual_loop import Process

Status = tuple[grpc.StatusCode, str, Sequence[tuple[str, str | bytes]]]

OK: Status = (grpc.StatusCode.OK, "", ())


class Tap(Protocol):
    """Observes the messages of a server."""

    def received(self, call: "Call", message: Any) -> None:
        """Called when the service receives a message."""

    def answered(self, call: "Call", message: Any) -> None:
        """Called when the service sends a message."""

    def ended(self, call: "Call", status: Status) -> None:
        """Called when the service ends the call."""


class Listener(Protocol):
    """A server, from the view of a call.

    Attributes:
        calls: The calls in progress.
    """

    calls: "dict[Call, None]"

    @property
    def process(self) -> Process:
        """The process of the server."""

    def take(self, call: "Call") -> None:
        """Starts a call that has arrived."""


class Wire:
    """All channels and servers of a simulation.

    Attributes:
        network: Carries the messages.
        random: Decides which calls are delivered twice.
        tap: Observes the messages.
        repeats: Share of the repeatable calls that are delivered twice.
        losses: Share of the messages at which their connection breaks.
        listeners: Servers by address.
    """

    def __init__(self, network: Network, random: Random, tap: Tap) -> None:
        self.network = network
        self.random = random
        self.tap = tap
        self.repeats = 0.0
        self.losses = 0.0
        self.listeners: dict[str, Listener] = {}

    def sever_process(self, client: Process) -> None:
        """Breaks all calls of a process."""
        self._sever(lambda call: call.client is client)

    def sever_hosts(self, one: str, other: str) -> None:
        """Breaks all calls between two hosts."""
        self._sever(lambda call: {call.to_server.sender, call.to_server.receiver} == {one, other})

    def _sever(self, is_meant: Callable[["Call"], bool]) -> None:
        for server in tuple(self.listeners.values()):
            for call in [call for call in server.calls if is_meant(call)]:
                call.sever(self.random)


class Call:
    """One call, with both ends.

    Attributes:
        method: Path of the method.
        client: The process that made the call.
        status: Final status at the client; None while the call is in progress.
        session_id: The session named by its first message, if any.
        is_cancelled: Whether the client cancelled it.
        is_ended: Whether the service has ended it.
        primary_term: For the tap: the newest term that had a primary when the newest message arrived.
        was_ended: For the tap: reason why the session had ended when the newest message arrived; empty if it had not.
    """

    def __init__(self, wire: Wire, method: str, client: Process, address: str) -> None:
        self.method = method
        self.client = client
        self.status: Status | None = None
        self.session_id = ""
        self.was_ended = ""
        self.inbox: deque[bytes] = deque()
        self.server_inbox: deque[bytes] = deque()
        self.client_is_done = False
        self.is_cancelled = False
        self.is_ended = False
        self.primary_term = 0
        self.server_task: asyncio.Task[None] | None = None
        self.server: Listener | None = None
        self._wire = wire
        self._waiter: asyncio.Future[None] | None = None
        self._server_waiter: asyncio.Future[None] | None = None
        self._deadline: asyncio.TimerHandle | None = None
        network = wire.network
        host = host_of(address)
        self.to_server = Pipe(network, client.name, host)
        self.to_client = Pipe(network, host, client.name)
        server = wire.listeners.get(address)
        if server is None:
            network.soon(self.end_client, (grpc.StatusCode.UNAVAILABLE, "connection refused", ()))
            return
        self.server = server
        server.calls[self] = None
        self.to_server.send(lambda: server.take(self))

    # The client's end.

    def set_deadline(self, timeout_seconds: float | None) -> None:
        """Sets the deadline of the call."""
        if timeout_seconds is not None:
            self._deadline = asyncio.get_running_loop().call_later(timeout_seconds, self._pass_deadline)

    def _pass_deadline(self) -> None:
        self._give_up((grpc.StatusCode.DEADLINE_EXCEEDED, "deadline exceeded", ()))

    def cancel(self) -> None:
        """Cancels the call from the client."""
        self.is_cancelled |= self.status is None
        self._give_up((grpc.StatusCode.CANCELLED, "cancelled", ()))

    def _give_up(self, status: Status) -> None:
        if self.status is None and not self.client.is_dead:
            self.end_client(status)
            self.to_server.send(self._cancel_server)
            self.to_server.is_closed = True

    def send(self, data: bytes) -> None:
        """Sends a message to the server."""
        if not self.client.is_dead:
            self.to_server.send(lambda: self._arrived(data))
            self._break_by_chance()

    def finish_sending(self) -> None:
        """Half-closes the call."""
        self.to_server.send(self._half_closed)

    async def next_message(self) -> bytes | None:
        """Waits for a message from the server; None if the call has ended and there is none.

        Cancelling this wait cancels the call, as in grpc.
        """
        while not self.inbox:
            if self.status is not None:
                return None
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            except asyncio.CancelledError:
                self.cancel()
                raise
        return self.inbox.popleft()

    def end_client(self, status: Status) -> None:
        """Ends the call for the client."""
        if self.status is None:
            self.status = status
            if self._deadline:
                self._deadline.cancel()
            if status[0] is not grpc.StatusCode.OK:
                self.inbox.clear()
            _wake(self._waiter)

    def error(self) -> grpc.aio.AioRpcError:
        """The error that the client gets from a failed call."""
        code, details, trailers = self.status or OK
        return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailers), details)

    # The server's end.

    def answer(self, data: bytes) -> None:
        """Sends a message to the client."""
        self.to_client.send(lambda: self._answered(data))
        self._break_by_chance()

    def end(self, status: Status) -> None:
        """Ends the call from the service."""
        self.is_ended = True
        if self.server:
            self.server.calls.pop(self, None)
        _wake(self._server_waiter)
        self.to_client.send(lambda: self.end_client(status))
        self.to_client.is_closed = True

    async def next_request(self) -> bytes | None:
        """Waits for a message from the client; None if it half-closed the call, or the call has ended."""
        while not self.server_inbox:
            if self.client_is_done or self.is_ended:
                return None
            self._server_waiter = asyncio.get_running_loop().create_future()
            await self._server_waiter
        return self.server_inbox.popleft()

    # The network's.

    def _break_by_chance(self) -> None:
        losses = self._wire.losses
        if losses and self._wire.random.random() < losses:
            self.sever(self._wire.random)

    def sever(self, random: Random) -> None:
        """Breaks the call's connection. Messages in transit may still arrive, and each side notices at its own time."""
        for pipe in (self.to_server, self.to_client):
            pipe.is_closed = True
            pipe.is_broken = random.random() < 0.5
        self._tell_later(self._lose_server, random)
        self._tell_later(self._lose_client, random)
        if self.server:
            self.server.calls.pop(self, None)

    def _tell_later(self, tell: Callable[[], None], random: Random) -> None:
        network = self._wire.network
        late_seconds = random.random() ** 4
        network.at(network.loop.now_seconds + network.delay_seconds() + late_seconds, tell)

    def _lose_server(self) -> None:
        self.to_client.is_broken = True
        self.end_client((grpc.StatusCode.UNAVAILABLE, "connection lost", ()))

    def _lose_client(self) -> None:
        self.to_server.is_broken = True
        self._cancel_server()

    def _cancel_server(self) -> None:
        if self.server:
            self.server.calls.pop(self, None)
        if self.server_task and not self.server_task.done():
            self.server_task.cancel()

    def _arrived(self, data: bytes) -> None:
        self.server_inbox.append(data)
        _wake(self._server_waiter)

    def _half_closed(self) -> None:
        self.client_is_done = True
        _wake(self._server_waiter)

    def _answered(self, data: bytes) -> None:
        if self.status is None:
            self.inbox.append(data)
            _wake(self._waiter)


def host_of(address: str) -> str:
    """The host of an address: the name of the process that listens there."""
    return address.rpartition(":")[0]


def _wake(waiter: "asyncio.Future[None] | None") -> None:
    if waiter and not waiter.done():
        waiter.set_result(None)
