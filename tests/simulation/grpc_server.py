"""Replaces grpc.aio's server; the generated servicers run on it unchanged."""

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc

from kvpool.server.guard.guard import Guard
from simulation.grpc_call import OK, Call, Status, Tap, Wire
from simulation.virtual_loop import Process, current_process


class SimulatedServer:
    """Replaces grpc.aio.Server."""

    def __init__(self, wire: Wire, interceptors: Sequence[Guard]) -> None:
        self.calls: dict[Call, None] = {}
        self._wire = wire
        (self._guard,) = interceptors
        self._is_stopped = False
        self._handlers: dict[str, Any] = {}
        self._addresses: list[str] = []
        self._process: Process | None = None

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        """Does nothing: the registered handlers suffice."""

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        """See grpc."""
        for name, handler in handlers.items():
            self._handlers[f"/{service}/{name}"] = self._guard.wrap(handler, f"{service}/{name}")

    def add_insecure_port(self, address: str) -> int:
        """See grpc."""
        self._addresses.append(address)
        return 1

    @property
    def process(self) -> Process:
        """The process in which it was started."""
        if self._process is None:
            raise RuntimeError("the server was not started")
        return self._process

    async def start(self) -> None:
        """See grpc."""
        self._process = current_process()
        if self._process is None:
            raise RuntimeError("a server runs in a process")
        self._process.on_death.append(self._die)
        for address in self._addresses:
            self._wire.listeners[address] = self

    async def stop(self, grace: float | None) -> None:
        """See grpc: ends the calls that are in progress after the grace time."""
        self._unlisten()
        self._is_stopped = True
        tasks = [call.server_task for call in self.calls if call.server_task]
        if tasks and grace:
            await asyncio.wait(tasks, timeout=grace)
        for call in tuple(self.calls):
            call.sever(self._wire.random)
        for task in tasks:
            task.cancel()

    def _unlisten(self) -> None:
        for address in self._addresses:
            if self._wire.listeners.get(address) is self:
                del self._wire.listeners[address]

    def _die(self) -> None:
        self._unlisten()
        for call in tuple(self.calls):
            call.sever(self._wire.random)

    def take(self, call: Call) -> None:
        """Starts a call that has arrived."""
        process = self._process
        if process is None or process.is_dead:
            return  # `_die` has informed the client
        if self._is_stopped:
            call.sever(self._wire.random)
            return
        handler = self._handlers.get(call.method)
        if handler is None:
            call.end((grpc.StatusCode.UNIMPLEMENTED, call.method, ()))
            return
        call.server_task = process.start(self._serve(call, handler))

    async def _serve(self, call: Call, handler: Any) -> None:
        context = ServerContext(call, handler, self._wire.tap)
        try:
            if handler.response_streaming:
                await handler.stream_stream(context, context)
            else:
                await context.write(await handler.stream_unary(context, context))
        except (grpc.aio.AbortError, asyncio.CancelledError):
            return
        context.end(OK)


class ServerContext:
    """Replaces grpc.aio.ServicerContext."""

    def __init__(self, call: Call, handler: Any, tap: Tap) -> None:
        self._call = call
        self._handler = handler
        self._tap = tap
        self._code = grpc.StatusCode.OK

    def code(self) -> grpc.StatusCode:
        """See grpc."""
        return self._code

    async def read(self) -> Any:
        """See grpc."""
        data = await self._call.next_request()
        if data is None:
            return grpc.aio.EOF
        message = self._handler.request_deserializer(data)
        self._tap.received(self._call, message)
        return message

    async def write(self, message: Any) -> None:
        """See grpc."""
        self._tap.answered(self._call, message)
        self._call.answer(self._handler.response_serializer(message))

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: Sequence[tuple[str, str | bytes]] = ()
    ) -> None:
        """See grpc."""
        self.end((code, details, tuple(trailing_metadata)))
        raise grpc.aio.AbortError

    def end(self, status: Status) -> None:
        """Ends the call, unless another task has."""
        self._code = status[0]
        if not self._call.is_ended:
            self._tap.ended(self._call, status)
            self._call.end(status)

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        """See grpc."""
        return ()

    def peer(self) -> str:
        """See grpc."""
        return f"ipv4:127.0.0.1:{self._call.client.name}"
