"""grpc's handlers of methods, taken apart and put together again by what stands before a service's own code."""

from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeAlias

import grpc

Behavior = Callable[[Any, Any], Awaitable[Any]]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"

_MAKERS: Final[dict[str, "Callable[..., Handler]"]] = {
    "unary_unary": grpc.unary_unary_rpc_method_handler,
    "unary_stream": grpc.unary_stream_rpc_method_handler,
    "stream_unary": grpc.stream_unary_rpc_method_handler,
    "stream_stream": grpc.stream_stream_rpc_method_handler,
}


def method_of(details: grpc.HandlerCallDetails) -> str:
    """The full name of the method that is called, without the slash that it begins with on the wire."""
    return str(details.method).removeprefix("/")


def behavior_of(handler: "Handler") -> Any:  # noqa: ANN401 - of one of four kinds
    """What a handler calls."""
    return getattr(handler, _kind(handler))


def rewrapped(handler: "Handler", behavior: Callable[[Any, Any], object]) -> "Handler":
    """The same handler with something else to call, of the same kind.

    Args:
        handler: The handler.
        behavior: What it is to call.
    """
    return _MAKERS[_kind(handler)](behavior, handler.request_deserializer, handler.response_serializer)


def _kind(handler: "Handler") -> str:
    return next(kind for kind in _MAKERS if getattr(handler, kind, None) is not None)
