"""A TCP link that can lose everything that a server sends, while requests still reach it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator


class LostAnswers:
    """The link.

    Attributes:
        address: Address for clients, `host:port`.
    """

    def __init__(self, target: str) -> None:
        self.address = ""
        self._host, _, self._port = target.rpartition(":")
        self._loses = False
        self._tasks: set[asyncio.Task[None]] = set()

    def lose_answers(self) -> None:
        """Loses what the server sends from now on."""
        self._loses = True

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forwards one connection."""
        server_reader, server_writer = await asyncio.open_connection(self._host, int(self._port))
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._forward(reader, server_writer, is_answer=False))
                group.create_task(self._forward(server_reader, writer, is_answer=True))
        except* ConnectionError:
            pass
        finally:
            writer.transport.abort()
            server_writer.transport.abort()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_answer: bool) -> None:
        while data := await reader.read(65536):
            if not (is_answer and self._loses):
                writer.write(data)
                await writer.drain()
        raise ConnectionResetError


@contextlib.asynccontextmanager
async def lost_answers(target: str) -> AsyncIterator[LostAnswers]:
    """Links a free port of this machine with a server."""
    link = LostAnswers(target)
    server = await asyncio.start_server(link.serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    link.address = f"{host}:{port}"
    try:
        yield link
    finally:
        server.close()
