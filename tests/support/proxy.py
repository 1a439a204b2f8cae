"""A faulty network between a client and a server on unix sockets: it fails at an exact byte."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path

DELAY_SECONDS = 0.05


class Fault(Enum):
    """The fault."""

    CUT = "cut"
    """The connection is closed on both sides; later bytes are lost."""
    DELAY = "delay"
    """Later bytes are delayed."""
    BLACK_HOLE = "black hole"
    """Later bytes are lost in both directions, and the connection stays open."""


@dataclass
class Link:
    """One connection through the proxy, with the number of bytes in each direction."""

    to_server: int = 0
    to_client: int = 0


class Proxy:
    """Forwards gRPC and links of steps, or gRPC only. Applies one fault to the first connection that carries steps.

    Attributes:
        address: Address for clients.
        links: The connections that carry steps, in order.
        struck: Whether the fault has happened.
    """

    def __init__(  # noqa: PLR0913 - a fault at a place
        self,
        folder: Path,
        server_address: str,
        fault: Fault,
        *,
        has_steps: bool = True,
        to_server: int = -1,
        to_client: int = -1,
    ) -> None:
        """Makes a proxy.

        Args:
            folder: Folder of its sockets, which is made.
            server_address: Address of the server.
            fault: The fault.
            has_steps: Whether it forwards links of steps.
            to_server: Number of bytes from client to server before the fault; -1 for never.
            to_client: Number of bytes from server to client before the fault; -1 for never.
        """
        folder.mkdir()
        self._server_path = server_address.removeprefix("unix:")
        self._path = str(folder / Path(self._server_path).name)
        self.address = f"unix:{self._path}"
        self.links: list[Link] = []
        self.struck = False
        self._has_steps = has_steps
        self._fault = fault
        self._at = {"to_server": to_server, "to_client": to_client}
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["Proxy"]:
        """Listens while the block runs."""
        suffixes = ("", ".steps") if self._has_steps else ("",)
        servers = [await asyncio.start_unix_server(partial(self._serve, each), self._path + each) for each in suffixes]
        try:
            yield self
        finally:
            for server in servers:
                server.close()
            for writer in tuple(self._writers):
                writer.transport.abort()
            await asyncio.gather(*self._tasks)

    def strike_next(self) -> None:
        """Applies the fault at the next byte to the server."""
        self._at["to_server"] = self.links[0].to_server

    async def _serve(self, suffix: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task
        self._tasks.add(task)
        link = Link()
        if bool(suffix) is self._has_steps:
            self.links.append(link)
        server_reader, server_writer = await asyncio.open_unix_connection(self._server_path + suffix)
        self._writers |= {writer, server_writer}
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._forward(link, "to_server", reader, server_writer))
                group.create_task(self._forward(link, "to_client", server_reader, writer))
        except* ConnectionError:
            pass  # closed by one side, or by the proxy
        finally:
            for end in (writer, server_writer):
                end.transport.abort()
            self._writers -= {writer, server_writer}
            self._tasks.discard(task)

    async def _forward(self, link: Link, way: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            is_first = bool(self.links) and link is self.links[0]
            if self.struck and self._fault is Fault.BLACK_HOLE and is_first:
                continue
            left = self._at[way] - getattr(link, way)
            if not self.struck and is_first and 0 <= left <= len(data):
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
