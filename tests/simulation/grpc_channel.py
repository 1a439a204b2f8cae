"""Replaces grpc.aio's channels; the generated stubs run on it unchanged."""

import asyncio
from collections.abc import Callable, Generator, Iterable
from typing import Any

import grpc

from simulation.grpc_call import Call, Wire
from simulation.virtual_loop import current_process

Serializer = Callable[[Any], bytes]
Deserializer = Callable[[bytes], Any]

_REPEATABLE = ("KeepAlive", "MarkExecuted", "CloseSession", "SetWeightsVersion")
"""Unary calls that a network may deliver twice."""


class SimulatedChannel:
    """Replaces grpc.aio.Channel."""

    def __init__(self, wire: Wire, address: str) -> None:
        self._wire = wire
        self._address = address
        self._calls: list[Call] = []

    def unary_unary(
        self, method: str, request_serializer: Serializer, response_deserializer: Deserializer, **_: object
    ) -> Callable[..., "UnaryCall"]:
        """See grpc."""

        def begin(request: Any, timeout: float | None = None, **_: object) -> UnaryCall:
            call, data = self._begin(method), request_serializer(request)
            call.send(data)
            call.finish_sending()
            call.set_deadline(timeout)
            if method.rpartition("/")[2] in _REPEATABLE and self._wire.random.random() < self._wire.repeats:
                again = self._begin(method)
                again.send(data)
                again.finish_sending()
            return UnaryCall(call, response_deserializer)

        return begin

    def unary_stream(
        self, method: str, request_serializer: Serializer, response_deserializer: Deserializer, **_: object
    ) -> Callable[..., "StreamCall"]:
        """See grpc."""

        def begin(request: Any, **_: object) -> StreamCall:
            call = self._begin(method)
            call.send(request_serializer(request))
            call.finish_sending()
            return StreamCall(call, request_serializer, response_deserializer)

        return begin

    def stream_stream(
        self,
        method: str,
        request_serializer: Serializer = bytes,
        response_deserializer: Deserializer = bytes,
        **_: object,
    ) -> Callable[..., "StreamCall"]:
        """See grpc."""

        def begin(requests: Iterable[Any] = (), **_: object) -> StreamCall:
            call = self._begin(method)
            for request in requests:
                call.send(request_serializer(request))
            return StreamCall(call, request_serializer, response_deserializer)

        return begin

    def _begin(self, method: str) -> Call:
        process = current_process()
        if process is None:
            raise RuntimeError("a call is made by a process")
        call = Call(self._wire, method, process, self._address)
        self._calls = [*(each for each in self._calls if each.status is None), call]
        return call

    async def close(self, grace: float | None = None) -> None:
        """See grpc: cancels the calls."""
        del grace
        for call in self._calls:
            call.cancel()


class UnaryCall:
    """A call with one response."""

    def __init__(self, call: Call, deserialize: Deserializer) -> None:
        self._call = call
        self._deserialize = deserialize

    def __await__(self) -> Generator[Any, None, Any]:
        return self._answer().__await__()

    def cancel(self) -> bool:
        """See grpc."""
        self._call.cancel()
        return True

    async def _answer(self) -> Any:
        data = await self._call.next_message()
        if data is None:
            raise _error_of(self._call)
        return self._deserialize(data)


class StreamCall:
    """A call with many messages in both directions."""

    def __init__(self, call: Call, serialize: Serializer, deserialize: Deserializer) -> None:
        self._call = call
        self._serialize = serialize
        self._deserialize = deserialize

    async def write(self, message: Any) -> None:
        """See grpc."""
        if self._call.status is not None:
            raise asyncio.InvalidStateError("the call has ended")
        self._call.send(self._serialize(message))

    async def read(self) -> Any:
        """See grpc."""
        call = self._call
        data = await call.next_message()
        if data is not None:
            return self._deserialize(data)
        if call.status and call.status[0] is grpc.StatusCode.OK:
            return grpc.aio.EOF
        raise _error_of(call)

    async def done_writing(self) -> None:
        """See grpc."""
        self._call.finish_sending()

    def cancel(self) -> bool:
        """See grpc."""
        self._call.cancel()
        return True


def _error_of(call: Call) -> BaseException:
    """The error of a call; as in grpc another one if it was cancelled here."""
    return asyncio.CancelledError() if call.is_cancelled else call.error()
