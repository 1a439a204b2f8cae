"""A network that misbehaves: between a client and a server on unix sockets, breaking off at an exact byte."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

DELAY_SECONDS = 0.05


class Fault(Enum):
    """What happens at the byte."""

    CUT = "cut"
    """Both sides see the connection end; nothing after that byte arrives."""
    DELAY = "delay"
    """The rest comes later."""
    BLACK_HOLE = "black hole"
    """Nothing arrives any more, either way, and nobody is told."""


@dataclass
class Link:
    """One connection through the proxy, and the bytes that went each way."""

    to_server: int = 0
    to_client: int = 0


class Proxy:
    """Passes bytes on, and misbehaves once, on its first connection.

    Attributes:
        address: Where clients connect.
        links: The connections, in the order they were made.
        struck: Whether the fault has come.
    """

    def __init__(
        self, path: Path, server_address: str, fault: Fault, *, to_server: int = -1, to_client: int = -1
    ) -> None:
        """Makes a proxy.

        Args:
            path: Of its socket.
            server_address: Where it connects.
            fault: What it does.
            to_server: After how many bytes from client to server; -1 for never.
            to_client: The same the other way.
        """
        self.address = f"unix:{path}"
        self.links: list[Link] = []
        self.struck = False
        self._path = path
        self._server_path = server_address.removeprefix("unix:")
        self._fault = fault
        self._at = {"to_server": to_server, "to_client": to_client}
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["Proxy"]:
        """Listens while the block runs."""
        server = await asyncio.start_unix_server(self._serve, self._path)
        try:
            yield self
        finally:
            server.close()
            for writer in tuple(self._writers):
                writer.transport.abort()
            await asyncio.gather(*self._tasks)

    def strike_next(self) -> None:
        """Lets the fault come with the next byte to the server."""
        self._at["to_server"] = self.links[0].to_server

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task
        self._tasks.add(task)
        link = Link()
        self.links.append(link)
        server_reader, server_writer = await asyncio.open_unix_connection(self._server_path)
        self._writers |= {writer, server_writer}
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pass_on(link, "to_server", reader, server_writer))
                group.create_task(self._pass_on(link, "to_client", server_reader, writer))
        except* ConnectionError:
            pass  # broken off: by an end, or by us
        finally:
            for end in (writer, server_writer):
                end.transport.abort()
            self._writers -= {writer, server_writer}
            self._tasks.discard(task)

    async def _pass_on(self, link: Link, way: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            if self.struck and self._fault is Fault.BLACK_HOLE and link is self.links[0]:
                continue
            left = self._at[way] - getattr(link, way)
            if not self.struck and link is self.links[0] and 0 <= left <= len(data):
                writer.write(data[:left])
                await writer.drain()
                self.struck = True
                data = data[left:]
                if self._fault is Fault.CUT:
                    raise ConnectionAbortedError
                if self._fault is Fault.BLACK_HOLE:
                    continue
                await asyncio.sleep(DELAY_SECONDS)
            setattr(link, way, getattr(link, way) + len(data))
            writer.write(data)
            await writer.drain()
        raise ConnectionResetError
