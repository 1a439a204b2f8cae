"""Implements WorkerService; proto/kvpool/v1/worker.proto documents its protocol."""

import asyncio
import contextlib
from typing import Final

import grpc

from kvpool.core.errors import AbortedError, ExhaustedError, InvalidArgumentError, fields_renamed
from kvpool.core.ids import PoolName, SessionNumber
from kvpool.core.ranks.messages import Allocated, Registration
from kvpool.core.specs.pool_config import check_pool_name
from kvpool.server.auth.caller import check_pool
from kvpool.server.limits.streams import Context, StreamWriter, read_first
from kvpool.server.services.calls import OpenCall
from kvpool.server.services.components import Components
from kvpool.server.services.ranks import RankLink
from kvpool.v1 import worker_pb2, worker_pb2_grpc
from kvpool.wire import ranks as wire_ranks
from kvpool.wire.fields import field_values
from kvpool.wire.pools import mapping_processes_from_proto

_FLUSH_SECONDS: Final = 1.0
"""Maximum time to send the queued messages of a stream that ends."""


class WorkerService(worker_pb2_grpc.WorkerServiceServicer):
    """The service of one server."""

    def __init__(self, parts: Components) -> None:
        self._parts = parts

    async def Join(self, _: object, context: Context) -> None:  # type: ignore[override]
        seconds = self._parts.config.rank_timing.heartbeat_timeout_seconds
        with self._parts.calls.open() as call:
            with call.wait():
                error = AbortedError("NOT_REGISTERED", f"no message arrived within {seconds:g} s")
                message = await read_first(context, seconds, error)
            if isinstance(message, worker_pb2.JoinRequest):  # else EOF: the rank closed its side
                await self._serve(call, context, message)

    async def _serve(self, call: OpenCall, context: Context, message: worker_pb2.JoinRequest) -> None:
        registration = self._check_register(message)
        name = PoolName(message.register.pool_name)
        link = self._register(call, name, registration)
        sender = asyncio.create_task(_send(link, context, self._parts.config.limits.stall_seconds))
        try:
            while True:
                with call.wait():
                    message = await context.read()
                if not isinstance(message, worker_pb2.JoinRequest) or self._handle(link, message):
                    return
        finally:
            link.outbox.put_nowait(None)
            self._parts.ranks.close_link(link)
            with contextlib.suppress(TimeoutError, grpc.aio.BaseError):
                await asyncio.wait_for(sender, _FLUSH_SECONDS)

    def _check_register(self, message: worker_pb2.JoinRequest) -> Registration:
        if message.WhichOneof("message") != "register":
            raise InvalidArgumentError("message", "the first message must be register")
        check_pool(message.register.pool_name, "register.pool_name")
        check_pool_name("register.pool_name", message.register.pool_name)
        return wire_ranks.registration_from_proto(message.register)

    def _register(self, call: OpenCall, name: PoolName, registration: Registration) -> RankLink:
        with fields_renamed(lambda field: field if field.startswith(("register.", "ranks[")) else f"register.{field}"):
            return self._parts.ranks.register(call, name, registration)

    def _handle(self, link: RankLink, message: worker_pb2.JoinRequest) -> bool:
        """Handles a message of a registered rank. Returns whether the rank has left."""
        match message.WhichOneof("message"):
            case "initialized":
                self._parts.ranks.initialized(link, Allocated(**field_values(Allocated, message.initialized)))
            case "heartbeat":
                heartbeat = message.heartbeat
                processes = mapping_processes_from_proto(heartbeat.mapping_processes)
                self._parts.ranks.heartbeat(link, heartbeat.sequence, processes)
            case "fenced":
                pending = tuple(map(SessionNumber, message.fenced.pending_session_numbers))
                self._parts.ranks.fenced(link, message.fenced.fence_sequence, pending)
            case "sessions_gone":
                self._parts.ranks.sessions_gone(link, tuple(map(SessionNumber, message.sessions_gone.session_numbers)))
            case "leave":
                self._parts.ranks.leave(link)
                return True
            case "register":
                raise InvalidArgumentError("message", "the stream is already registered")
            case _:
                raise InvalidArgumentError("message", "is not set, or of a kind that this server does not know")
        return False


async def _send(link: RankLink, context: Context, stall_seconds: float) -> None:
    with StreamWriter(context, stall_seconds) as writer:
        while (message := await link.outbox.get()) is not None:
            try:
                await writer.write(message)
            except ExhaustedError as error:
                link.call.end(error)
                return
