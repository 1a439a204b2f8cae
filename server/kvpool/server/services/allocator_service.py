"""Implements AllocatorService; proto/kvpool/v1/allocator.proto documents each RPC."""

import contextlib
import secrets
import time
from collections.abc import Awaitable
from contextlib import ExitStack
from typing import Any

from kvpool.core.blocks.kv_cache_manager import KVCacheManager
from kvpool.core.blocks.quota import NO_QUOTA
from kvpool.core.commands import ApplyStep, KeepAlive, MarkExecuted, OpenSession, SetWeightsVersion
from kvpool.core.errors import ExhaustedError, InvalidArgumentError, KvpoolError
from kvpool.core.ids import SessionId
from kvpool.core.sessions.session import Session
from kvpool.core.steps.columns import Outcome, StepResult
from kvpool.server.auth.caller import CALLER, check_session, token_name
from kvpool.server.limits.budgets import Budgets
from kvpool.server.limits.fair_turns import in_turn
from kvpool.server.limits.streams import Context, StreamWriter, read_first
from kvpool.server.metrics.observations import Observations
from kvpool.server.services import unary
from kvpool.server.services.components import Components
from kvpool.v1 import allocator_pb2, allocator_pb2_grpc, step_pb2
from kvpool.wire import pools as wire_pools
from kvpool.wire import sessions as wire_sessions
from kvpool.wire import steps as wire_steps
from kvpool.wire.changes import Change, UnaryChange, change_bytes, step_from_change
from kvpool.wire.protocol_version import PROTOCOL_VERSION, check_client, check_stated


class AllocatorService(allocator_pb2_grpc.AllocatorServiceServicer):
    """The service of one server."""

    def __init__(self, parts: Components, observations: Observations | None = None) -> None:
        self.turns = parts.turns
        self._parts = parts
        self._budgets = Budgets(parts.config.limits, parts.state.sessions)
        self._observations = observations
        self._tracer = parts.tracer

    def flow_of(self, request: object) -> tuple[str, object]:
        """Returns the flow of the request's session. All calls without a session share one flow."""
        pool, session = "", 0
        session_id = getattr(request, "session_id", "")
        if session_id:
            with contextlib.suppress(KvpoolError):  # the method reports it
                found = self._parts.sessions.find(session_id)
                pool, session = found[0].config.name, found[1].session_number
        return pool, session

    @in_turn
    def CreatePool(self, request: allocator_pb2.CreatePoolRequest) -> allocator_pb2.CreatePoolResponse:
        pool, created = self._parts.pools.create(wire_pools.config_from_proto(request.config), request.memory_id)
        return allocator_pb2.CreatePoolResponse(pool=self._parts.pools.describe(pool.config.name), created=created)

    @in_turn
    def GetPool(self, request: allocator_pb2.GetPoolRequest) -> allocator_pb2.GetPoolResponse:
        return allocator_pb2.GetPoolResponse(pool=self._parts.pools.describe(request.pool_name))

    async def WaitUntilReady(
        self, request: allocator_pb2.WaitUntilReadyRequest, _: object
    ) -> allocator_pb2.WaitUntilReadyResponse:
        with self._parts.calls.open() as call, call.wait():
            info = await self._parts.pools.wait_until_ready(request.pool_name, request.timeout_seconds)
        return allocator_pb2.WaitUntilReadyResponse(pool=info)

    @in_turn
    def OpenSession(self, request: allocator_pb2.OpenSessionRequest) -> allocator_pb2.OpenSessionResponse:
        check_client(request.protocol_version)
        caller = CALLER.get()
        owner = token_name()
        lease_seconds, quota = request.lease_seconds, NO_QUOTA
        opened, now_seconds = self._parts.sessions.opened_by(request.open_key, owner)
        if opened is None:  # a retry is always answered
            self._parts.pools.check_formed(request.pool_name)
            num_host_blocks = self._parts.state.pools.get(request.pool_name).config.num_host_blocks
            check_stated(request.protocol_version, num_host_blocks)
            self._parts.sessions.check_can_open(request.pool_name, owner)
            lease_seconds = self._parts.config.leases.choose(request.lease_seconds)
            quota = self._parts.config.limits.quota(request.min_blocks, request.max_blocks)
        pool, session = self._parts.sessions.open(
            OpenSession(
                request.pool_name,
                SessionId(secrets.token_urlsafe(24)),
                request.client_name,
                lease_seconds,
                open_key=request.open_key,
                requested=(request.lease_seconds, request.min_blocks, request.max_blocks),
                quota=quota,
                owner=owner,
                salt=caller.grant.salt if caller else b"",
                namespace=caller.grant.namespace if caller else b"",
                memory_id=request.memory_id,
                weights_version=request.weights_version,
                reserve_tokens=request.reserve_tokens,
            ),
            now_seconds,
        )
        self._parts.faults.reach("session.opened")
        return allocator_pb2.OpenSessionResponse(
            session=wire_sessions.session_to_proto(pool, session),
            config=wire_sessions.config_to_proto(pool, session),
            protocol_version=PROTOCOL_VERSION,
            step_listener=self._parts.step_listener,
        )

    async def KeepAlive(self, request: allocator_pb2.KeepAliveRequest, _: object) -> allocator_pb2.KeepAliveResponse:
        _, session = self._parts.sessions.find(request.session_id)
        self._parts.executor.execute(KeepAlive(request.session_id))
        return allocator_pb2.KeepAliveResponse(
            lease_seconds=session.lease_seconds, step_listener=self._parts.step_listener
        )

    async def CloseSession(
        self, request: allocator_pb2.CloseSessionRequest, _: object
    ) -> allocator_pb2.CloseSessionResponse:
        response = allocator_pb2.CloseSessionResponse()
        freed: int | None = 0
        while freed is not None:  # a part of a large session per turn
            await self.turns.take(*self.flow_of(request))
            try:
                freed = self._parts.sessions.free_part(request.session_id)
                if freed is None:
                    count = self._parts.sessions.close(request.session_id, response.num_freed_requests)
                    response.num_freed_requests = count
                    self._parts.faults.reach("session.closed")
                else:
                    response.num_freed_requests += freed
            finally:
                self.turns.end()
        return response

    @in_turn
    def GetComputedBlocks(
        self, request: allocator_pb2.GetComputedBlocksRequest
    ) -> allocator_pb2.GetComputedBlocksResponse:
        result = self._run(request)
        return allocator_pb2.GetComputedBlocksResponse(
            computed=_computed(result), shared_prefix_boundary_tokens=result.shared_prefix_boundary_tokens
        )

    @in_turn
    def AllocateSlots(self, request: allocator_pb2.AllocateSlotsRequest) -> allocator_pb2.AllocateSlotsResponse:
        result = self._run(request)
        return allocator_pb2.AllocateSlotsResponse(
            outcome=int(result.outcome),  # type: ignore[arg-type]
            new_blocks=unary.groups(result.new_blocks),
            computed=_computed(result) if result.outcome is Outcome.HIT_CHANGED else None,
            copied_block_ids=result.copied_block_ids,
        )

    @in_turn
    def CacheBlocks(self, request: allocator_pb2.CacheBlocksRequest) -> allocator_pb2.CacheBlocksResponse:
        self._run(request)
        return allocator_pb2.CacheBlocksResponse()

    @in_turn
    def Free(self, request: allocator_pb2.FreeRequest) -> allocator_pb2.FreeResponse:
        self._run(request)
        return allocator_pb2.FreeResponse()

    @in_turn
    def EvictBlocks(self, request: allocator_pb2.EvictBlocksRequest) -> allocator_pb2.EvictBlocksResponse:
        self._run(request)
        return allocator_pb2.EvictBlocksResponse()

    @in_turn
    def ResetPrefixCache(
        self, request: allocator_pb2.ResetPrefixCacheRequest
    ) -> allocator_pb2.ResetPrefixCacheResponse:
        return allocator_pb2.ResetPrefixCacheResponse(reset=self._run(request).outcome is Outcome.OK)

    @in_turn
    def GetCommonPrefixBlocks(
        self, request: allocator_pb2.GetCommonPrefixBlocksRequest
    ) -> allocator_pb2.GetCommonPrefixBlocksResponse:
        return allocator_pb2.GetCommonPrefixBlocksResponse(num_blocks=self._run(request).num_prefix_blocks)

    @in_turn
    def MarkExecuted(self, request: allocator_pb2.MarkExecutedRequest) -> allocator_pb2.MarkExecutedResponse:
        self._parts.sessions.find(request.session_id)
        self._parts.executor.execute(MarkExecuted(request.session_id, request.executed_sequence))
        return allocator_pb2.MarkExecutedResponse()

    @in_turn
    def SetWeightsVersion(
        self, request: allocator_pb2.SetWeightsVersionRequest
    ) -> allocator_pb2.SetWeightsVersionResponse:
        self._parts.sessions.find(request.session_id)
        self._parts.executor.execute(SetWeightsVersion(request.session_id, request.weights_version, request.set_key))
        self._parts.executor.execute(KeepAlive(request.session_id))
        return allocator_pb2.SetWeightsVersionResponse()

    def Schedule(self, _: object, context: Context) -> Awaitable[None]:  # type: ignore[override]
        return self._serve_steps(context, None)

    def serve_link(self, _: object, link: Any) -> Awaitable[None]:  # noqa: ANN401 - a `StepLink`, maybe in a `GatedContext`
        """Serves the steps of a link, as `Schedule` does those of a stream. The hello was checked."""
        return self._serve_steps(link, link.hello.steps.session_id)

    async def _serve_steps(self, context: Any, session_id: str | None) -> None:  # noqa: ANN401 - see its callers
        """Applies steps of a session, in turn, and sends the results.

        Args:
            context: The context of the call.
            session_id: The session of a link; None for a stream, whose first message names it.
        """
        stall_seconds, message, write = self._parts.config.limits.stall_seconds, None, context.write
        with ExitStack() as stack:
            call = stack.enter_context(self._parts.calls.open())
            if session_id is None:
                write = stack.enter_context(StreamWriter(context, stall_seconds)).write
                with call.wait():
                    error = ExhaustedError("NOTHING_SENT", f"the stream sent nothing for {stall_seconds:g} s")
                    message = await read_first(context, stall_seconds, error)
                if not isinstance(message, step_pb2.Step):  # EOF: the client closed its side
                    return
                check_client(message.protocol_version)
                session_id = message.session_id
            check_session(self._parts.state, session_id)
            pool, session = self._parts.sessions.find(session_id)
            protocol_version = PROTOCOL_VERSION
            if message is None:  # a link keeps no session alive, as a stopped process has one; its messages do
                stack.enter_context(self._parts.calls.of_session(session.session_id, call))
                context.welcome(session_id)
                with call.wait():
                    message = await context.read()
            else:
                stack.enter_context(self._parts.sessions.attached(session, call))
            while isinstance(message, step_pb2.Step):
                if message.session_id not in ("", session_id):
                    raise InvalidArgumentError("session_id", "differs from the stream's first step")
                if self._tracer:
                    self._tracer.message_arrived()
                await self.turns.take(pool.config.name, session.session_number)
                try:
                    start_seconds = time.perf_counter()
                    message.ClearField("protocol_version")  # a retry of the step may have it or not
                    result = wire_steps.result_to_proto(self._apply(session_id, pool, session, message))
                    if self._observations:
                        seconds = time.perf_counter() - start_seconds
                        self._observations.step(pool.config.name, len(message.operations), seconds)
                finally:
                    self.turns.end()
                del message  # it may be large, and the next one may take long
                result.protocol_version, protocol_version = protocol_version, 0  # in the first result
                try:
                    await write(result)
                finally:  # the client may have ended the stream once it had the answer
                    if self._tracer:
                        self._tracer.end_step(pool, session, result.sequence)
                if self._parts.faults.can_be_armed:
                    self._parts.faults.reach("step.answered")
                with call.wait():
                    message = await context.read()

    def _run(self, change: UnaryChange) -> unary.UnaryResult:
        """Finds the session of a unary change, and applies it."""
        session_id = change.session_id
        pool, session = self._parts.sessions.find(session_id)
        return unary.result_of(self._apply(session_id, pool, session, change), len(pool.config.groups))

    def _apply(self, session_id: str, pool: KVCacheManager, session: Session, change: Change) -> StepResult:
        """Applies a change of a session once, however often it is sent.

        Args:
            session_id: The id with which the session was found. The core refuses the change if it has ended since.
            pool: The session's pool.
            session: The session.
            change: The change; its session id is cleared.

        Raises:
            KvpoolError: The change is refused. The field is named as in the message.
        """
        if self._parts.faults.can_be_armed:
            self._parts.faults.reach("step.decoded")
        change.ClearField("session_id")  # a retry may have none
        step = step_from_change(pool, session, change)
        try:
            self._budgets.check_step(pool, session, step)
            admissions = self._tracer.admissions(session, step) if self._tracer else None
            result = self._parts.executor.execute(ApplyStep(session_id, step, change_bytes(change)))
        except KvpoolError as error:
            if not isinstance(change, step_pb2.Step):
                error.rename_field(unary.field_name(error, step))
            raise
        if self._parts.faults.can_be_armed:
            self._parts.faults.reach("step.applied")
        self._parts.event_logs.publish(pool)
        if self._tracer and admissions:
            self._tracer.record_admissions(pool, session, admissions, step, result)
        return result


def _computed(result: unary.UnaryResult) -> allocator_pb2.ComputedBlocks:
    return allocator_pb2.ComputedBlocks(groups=unary.groups(result.hit_blocks), num_tokens=result.num_hit_tokens)
