"""A gRPC server in the test's own process, on a unix socket, whose answers the test gives."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn, Self

import grpc
from grpc_status import rpc_status

from kvpool.core.errors import KvpoolError
from kvpool.wire.errors import to_status


class SocketServer:
    """Serves until it is stopped.

    Args:
        path: Path of the socket.
        add: Adds the services to the server.
        options: Options of gRPC.

    Attributes:
        address: Its address.
    """

    def __init__(self, path: Path, add: Callable[[grpc.Server], None], options: Sequence[tuple[str, int]] = ()) -> None:
        self.address = f"unix:{path}"
        self._server = grpc.server(ThreadPoolExecutor(32), options=options)
        add(self._server)
        self._server.add_insecure_port(self.address)
        self._server.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Ends all calls and connections."""
        self._server.stop(None).wait()


def abort(context: grpc.ServicerContext, error: KvpoolError) -> NoReturn:
    """Ends a call with an error, as a server does."""
    context.abort_with_status(rpc_status.to_status(to_status(error)))
