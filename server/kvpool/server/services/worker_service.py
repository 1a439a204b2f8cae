"""WorkerService: see proto/kvpool/v1/worker.proto for what it promises."""

import asyncio
import contextlib
from typing import Final

import grpc

from kvpool.core.errors import AbortedError, ExhaustedError, InvalidArgumentError
from kvpool.core.ranks.membership import Membership
from kvpool.server.auth.caller import check_pool
from kvpool.server.limits.stalls import Writer, read_first
from kvpool.server.rpc.guards import errors_sent
from kvpool.server.services.hub import Hub, Stream
from kvpool.server.services.ranks import RankLink, Ranks
from kvpool.v1 import worker_pb2, worker_pb2_grpc
from kvpool.wire import ranks as wire_ranks

_JoinContext = grpc.aio.ServicerContext[worker_pb2.JoinRequest, worker_pb2.JoinResponse]

_FLUSH_SECONDS: Final = 1.0
"""How long a stream that ends waits for the rank to take what was said before."""


class WorkerService(worker_pb2_grpc.WorkerServiceServicer):
    """The service, over a hub and the ranks of its pools."""

    def __init__(self, hub: Hub, ranks: Ranks) -> None:
        self._hub = hub
        self._ranks = ranks

    async def Join(self, _: object, context: _JoinContext) -> None:  # type: ignore[override]
        async with errors_sent(context, "Join"):
            with self._hub.streaming() as stream:
                await self._serve(stream, context)

    async def _serve(self, stream: Stream, context: _JoinContext) -> None:
        link = self._ranks.open_link(stream)
        sender = asyncio.create_task(_send(link, context, self._hub.limits.stall_seconds))
        membership: Membership | None = None
        try:
            while True:
                with stream.wait():
                    message = await (self._read_first(context) if membership is None else context.read())
                if not isinstance(message, worker_pb2.JoinRequest):  # EOF: the rank is done sending
                    return
                if membership is None:
                    membership = self._register(link, message)
                elif self._said(membership, link, message):
                    return
        finally:
            self._ranks.close_link(membership, link)
            link.outbox.put_nowait(None)
            with contextlib.suppress(TimeoutError, grpc.aio.BaseError):
                await asyncio.wait_for(sender, _FLUSH_SECONDS)

    async def _read_first(self, context: _JoinContext) -> object:
        patience_seconds = self._ranks.timing.heartbeat_timeout_seconds
        silence = AbortedError("NOT_REGISTERED", f"nothing was said for {patience_seconds:g} s")
        return await read_first(context, patience_seconds, silence)

    def _register(self, link: RankLink, message: worker_pb2.JoinRequest) -> Membership:
        if message.WhichOneof("message") != "register":
            raise InvalidArgumentError("message", "the first message must be register")
        check_pool(message.register.pool_name, "register.pool_name")
        registration = wire_ranks.registration_from_proto(message.register)
        try:
            return self._ranks.register(link, message.register.pool_name, registration)
        except InvalidArgumentError as error:
            if not error.field.startswith(("register.", "ranks[")):
                error.rename_field(f"register.{error.field}")
            raise

    def _said(self, membership: Membership, link: RankLink, message: worker_pb2.JoinRequest) -> bool:
        """Takes in what a rank says; returns whether it has left."""
        match message.WhichOneof("message"):
            case "initialized":
                self._ranks.initialized(membership, link, wire_ranks.allocated_from_proto(message.initialized))
            case "heartbeat":
                self._ranks.heard(membership, link, message.heartbeat.sequence)
            case "fenced":
                self._ranks.fenced(membership, link, message.fenced.fence_sequence)
            case "leave":
                self._ranks.leave(membership, link)
                return True
            case "register":
                raise InvalidArgumentError("message", "a stream registers once")
            case _:
                raise InvalidArgumentError("message", "not set, or of a kind that this server lacks")
        return False


async def _send(link: RankLink, context: _JoinContext, stall_seconds: float) -> None:
    with Writer(context, stall_seconds) as writer:
        while (message := await link.outbox.get()) is not None:
            try:
                await writer.write(message)
            except ExhaustedError as error:
                link.end(error)
                return
