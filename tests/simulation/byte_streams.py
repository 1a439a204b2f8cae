"""Byte streams between simulated servers, in place of TCP.

The bytes of a stream arrive in order, are kept while a path is cut, and are lost from some point on with the
connection. The kernel of a stopped process accepts connections and bytes, which the process gets when it continues.
"""

import asyncio
import socket
from collections.abc import Callable
from functools import partial
from random import Random

from kvpool.wire.descriptor_reserve import DescriptorReserve
from simulation.network import Network, Pipe
from simulation.virtual_loop import Process, current_process

_Factory = Callable[[], asyncio.BaseProtocol]


class ByteStreams:
    """All byte streams of a simulation. Their loop connects and listens with them.

    Attributes:
        connections: The open connections.
    """

    def __init__(self, network: Network, random: Random) -> None:
        self.connections: dict[Connection, None] = {}
        self._network = network
        self._random = random
        self._listeners: dict[tuple[str, int], Listener] = {}
        network.loop.create_server = self._create_server
        network.loop.create_connection = self._create_connection

    def sever(self, is_meant: Callable[["Connection"], bool]) -> None:
        """Breaks connections. Bytes in transit may still arrive, and each side notices at its own time."""
        for connection in [each for each in self.connections if is_meant(each)]:
            connection.sever(self._random)

    async def _create_server(self, factory: _Factory, host: str, port: int, **_: object) -> "Listener":
        listener = Listener(_own_process(), factory, (host, port), self._listeners)
        self._listeners[host, port] = listener
        return listener

    async def _create_connection(
        self, factory: _Factory, host: str, port: int, **_: object
    ) -> tuple[asyncio.Transport, asyncio.BaseProtocol]:
        process = _own_process()
        connected: asyncio.Future[tuple[asyncio.Transport, asyncio.BaseProtocol]]
        connected = asyncio.get_running_loop().create_future()
        there, back = Pipe(self._network, process.name, host), Pipe(self._network, host, process.name)

        def arrive() -> None:
            listener = self._listeners.get((host, port))
            if listener is None:
                back.send(lambda: process.run(refuse))
                return
            client, server = End(process, there), End(listener.process, back)
            client.peer, server.peer = server, client
            connection = Connection(self._network, client, server)
            client.connection = server.connection = connection
            client.closed = server.closed = partial(self.connections.pop, connection, None)
            self.connections[connection] = None
            listener.process.run(server.start, listener.factory)
            back.send(lambda: process.run(accept, client))

        def accept(client: "End") -> None:
            protocol = client.start(factory)
            if connected.done():  # the caller has given up
                client.abort()
            else:
                connected.set_result((client, protocol))

        def refuse() -> None:
            if not connected.done():
                connected.set_exception(ConnectionRefusedError(f"{host}:{port} refused the connection"))

        there.send(arrive)
        return await connected


class Listener:
    """Replaces asyncio.Server.

    Attributes:
        process: The process that listens.
        factory: Makes the protocol of a connection.
        sockets: Itself.
    """

    def __init__(
        self,
        process: Process,
        factory: _Factory,
        address: tuple[str, int],
        listeners: "dict[tuple[str, int], Listener]",
    ) -> None:
        self.process = process
        self.factory = factory
        self.sockets = (self,)
        self._address = address
        self._listeners = listeners
        process.on_death.append(self.close)

    def getsockname(self) -> tuple[str, int]:
        """See socket."""
        return self._address

    def close(self) -> None:
        """See asyncio."""
        if self._listeners.get(self._address) is self:
            del self._listeners[self._address]


class SimulatedAcceptor:
    """Replaces `Acceptor`: there are no floods."""

    def __init__(self, make_protocol: _Factory, _tls: object, _handshake_seconds: float, **_: object) -> None:
        self.reserve = DescriptorReserve(0)
        self._make_protocol = make_protocol
        self._listener: asyncio.Server | None = None

    async def listen(self, host: str, port: int) -> int:
        """See `Acceptor`."""
        self._listener = await asyncio.get_running_loop().create_server(self._make_protocol, host, port)
        return port

    def close(self) -> None:
        """See `Acceptor`."""
        if self._listener:
            self._listener.close()


class Connection:
    """A connection with both ends."""

    def __init__(self, network: Network, client: "End", server: "End") -> None:
        self._network = network
        self._ends = (client, server)

    @property
    def processes(self) -> tuple[Process, Process]:
        """The connected processes: first the one that connected."""
        return self._ends[0].process, self._ends[1].process

    def sever(self, random: Random) -> None:
        """Breaks the connection; see `ByteStreams.sever`."""
        for end in self._ends:
            end.out.is_closed = True
            end.out.is_broken = random.random() < 0.5
            late_seconds = self._network.delay_seconds() + random.random() ** 4
            self._network.at(self._network.loop.now_seconds + late_seconds, end.process.run, end.lose)
        self._ends[0].closed()


class _Socket:
    """What a protocol asks the socket of a connection for."""

    family = socket.AF_INET

    def setsockopt(self, *_: object) -> None:
        """See socket."""


class End(asyncio.Transport):
    """One end of a connection: the transport of its protocol.

    Attributes:
        process: The process that has it.
        out: What it sends with.
        peer: The other end.
        connection: The connection.
        closed: Called when it is closed.
    """

    def __init__(self, process: Process, out: Pipe) -> None:
        super().__init__({"socket": _Socket()})
        self.process = process
        self.out = out
        self.peer: End
        self.connection: Connection
        self.closed: Callable[[], object]
        self._protocol: asyncio.Protocol | None = None
        self._is_closing = False

    def start(self, factory: _Factory) -> asyncio.BaseProtocol:
        """Makes the protocol."""
        protocol = factory()
        if not isinstance(protocol, asyncio.Protocol):
            raise TypeError(f"not a protocol of streams: {protocol}")
        self._protocol = protocol
        protocol.connection_made(self)
        return protocol

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """See asyncio."""
        if not self._is_closing and not self.process.is_dead:
            self.out.send(partial(self.peer.process.run, self.peer.receive, bytes(data)))

    def receive(self, data: bytes) -> None:
        """Gives bytes to the protocol."""
        if self._protocol and not self._is_closing:
            self._protocol.data_received(data)

    def pause_reading(self) -> None:
        """See asyncio. A simulated client sends no more than one step ahead."""

    resume_reading = pause_reading

    def is_closing(self) -> bool:
        """See asyncio."""
        return self._is_closing

    def abort(self) -> None:
        """See asyncio. The kernel still sends what it has, as the buffer of a transport is mostly empty."""
        self.close()

    def close(self) -> None:
        """See asyncio."""
        if not self._is_closing:
            self.out.send(partial(self.peer.process.run, self.peer.lose))
            self.out.is_closed = True
            self.closed()
            self.lose()

    def lose(self) -> None:
        """Ends it here."""
        if not self._is_closing:
            self._is_closing = True
            if self._protocol:
                self.process.run(self._protocol.connection_lost, None)


def _own_process() -> Process:
    process = current_process()
    if process is None:
        raise RuntimeError("a connection is made by a process")
    return process
