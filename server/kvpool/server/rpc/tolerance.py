"""Answers a message that cannot be parsed as any other mistake of a caller's.

Of a unary call grpc itself would answer UNKNOWN, without details, and log a traceback for each.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from kvpool.server.rpc.errors import abort, malformed_error
from kvpool.server.rpc_handlers import Behavior, Handler, behavior_of, rewrapped


class TolerantServer:
    """Stands for a server while services are added to it."""

    def __init__(self, server: grpc.aio.Server) -> None:
        self._server = server

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Handler]) -> None:
        """Adds a service's methods."""
        tolerant = {name: _tolerant(name, handler) for name, handler in handlers.items()}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, tolerant),))
        self._server.add_registered_method_handlers(service, tolerant)

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        """Does nothing: the same methods are added by name."""


def _tolerant(name: str, handler: Handler) -> Handler:
    """Of a stream `errors_sent` meets what cannot be parsed; of one request nobody would."""
    parse = handler.request_deserializer
    if handler.request_streaming or parse is None:
        return handler
    behavior: Behavior = behavior_of(handler)

    def parse_or_not(data: bytes) -> object:
        try:
            return parse(data)
        except DecodeError as error:
            return error

    async def call(request: object, context: Any) -> object:  # noqa: ANN401 - of any call
        if isinstance(request, DecodeError):
            await abort(context, malformed_error(), name)
        return await behavior(request, context)

    return rewrapped(handler, call, parse_or_not)
