"""The same for asyncio: `async with aio.connect(address) as client`, `await session.admit(request)`."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self, TypeVar

import grpc

from kvpool.client import calls, retries, steps
from kvpool.client.errors import DeadlineError, KvpoolError, UnavailableError
from kvpool.client.lease import now_seconds
from kvpool.client.request import Request
from kvpool.client.results import Admission, Allocation, HitChanged
from kvpool.client.session import SessionBase
from kvpool.client.step_builder import StepBuilder
from kvpool.client.transports import messages
from kvpool.client.transports.embedded import EventBatch, HeldRequest, OpenedSession, watch_options
from kvpool.client.transports.resumable_watch import ResumableWatch
from kvpool.core.blocks.prefix_search import ComputedBlocks
from kvpool.core.blocks.quota import Quota
from kvpool.core.sessions.session_ends import ended_error
from kvpool.core.specs.pool_config import PoolConfig
from kvpool.core.steps.columns import Step, StepResult
from kvpool.core.views.pool_info import PoolInfo
from kvpool.v1 import allocator_pb2, allocator_pb2_grpc, event_pb2, event_pb2_grpc, step_pb2
from kvpool.wire import channels
from kvpool.wire import steps as wire_steps
from kvpool.wire.address import check_address
from kvpool.wire.channels import Access, TlsConfig
from kvpool.wire.errors import from_rpc_error

_T = TypeVar("_T")
_T_co = TypeVar("_T_co", covariant=True)
_RequestT = TypeVar("_RequestT")
_RequestT_contra = TypeVar("_RequestT_contra", contravariant=True)


class _Method(Protocol[_RequestT_contra, _T_co]):
    """A unary call."""

    def __call__(self, request: _RequestT_contra, *, timeout: float | None = None) -> Awaitable[_T_co]: ...


def connect(
    address: str,
    *,
    deadline_seconds: float = messages.DEFAULT_DEADLINE_SECONDS,
    tls: TlsConfig | None = None,
    token: str | Path | None = None,
    allow_plaintext: bool = False,
) -> "AsyncClient":
    """Connects to a service; call it inside a running event loop.

    Args:
        address: `host:port` or `unix:/path`.
        deadline_seconds: How long each call may take, retries included.
        tls: As of `kvpool.client.connect`; likewise the others.
        token: See there.
        allow_plaintext: See there.

    Raises:
        ValueError: As there.
    """
    check_address(address)
    return AsyncClient(address, deadline_seconds, Access.of(tls, token, allow_plaintext=allow_plaintext))


class AsyncClient:
    """A connection to a service, for one event loop. See `kvpool.client.Client`."""

    def __init__(self, address: str, deadline_seconds: float, access: Access) -> None:
        self._calls = _Calls(deadline_seconds)
        self._channel = access.aio_channel(address, channels.SESSION_CHANNEL_OPTIONS)
        self._stub: allocator_pb2_grpc.AllocatorServiceAsyncStub = allocator_pb2_grpc.AllocatorServiceStub(
            self._channel
        )
        self._events: event_pb2_grpc.EventServiceAsyncStub = event_pb2_grpc.EventServiceStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def create_pool(self, config: PoolConfig) -> PoolInfo:
        """See `Client.create_pool`."""
        return messages.read_pool(await self._calls.make(self._stub.CreatePool, messages.create_pool_request(config)))

    async def get_pool(self, name: str) -> PoolInfo:
        """See `Client.get_pool`."""
        return messages.read_pool(
            await self._calls.make(self._stub.GetPool, allocator_pb2.GetPoolRequest(pool_name=name))
        )

    async def wait_until_ready(self, name: str, *, timeout_seconds: float) -> PoolInfo:
        """See `Client.wait_until_ready`."""
        due_seconds = time.monotonic() + timeout_seconds
        left_seconds = timeout_seconds
        while True:
            try:
                async with _converted():
                    request = messages.wait_request(name, left_seconds)
                    deadline_seconds = left_seconds + self._calls.deadline_seconds
                    answer = await self._stub.WaitUntilReady(request, timeout=deadline_seconds)
                return messages.check_ready(messages.read_pool(answer), timeout_seconds)
            except UnavailableError as error:
                await asyncio.sleep(messages.wait_pause_seconds(error, due_seconds))
            left_seconds = max(due_seconds - time.monotonic(), 0.0)

    async def open_session(  # noqa: PLR0913 - what the wire asks
        self,
        pool: str,
        *,
        client_name: str = "",
        lease_seconds: float = 0.0,
        min_blocks: int = 0,
        max_blocks: int = 0,
        memory_id: str = "",
    ) -> "AsyncSession":
        """See `Client.open_session`. Cancelled, it may leave a session that ends with its lease."""
        request = messages.open_session_request(
            pool, client_name, lease_seconds, Quota(min_blocks, max_blocks), memory_id
        )
        sent_seconds, response = await self._calls.make_timed(self._stub.OpenSession, request)
        return AsyncSession(self._stub, messages.read_session(response, sent_seconds), self._calls)

    async def resume_session(self, session_id: str, *, sequence: int = 0) -> "AsyncSession":
        """See `Client.resume_session`. Cancelled, it may have taken the session over; it can be called again."""
        request = messages.resume_session_request(session_id, sequence)
        sent_seconds, response = await self._calls.make_timed(self._stub.ResumeSession, request)
        return AsyncSession(self._stub, messages.read_session(response, sent_seconds), self._calls)

    async def watch(
        self, pool: str, *, from_sequence: int = 0, snapshot: bool = False, heartbeat_seconds: float | None = None
    ) -> AsyncIterator[EventBatch]:
        """Yields a pool's block events, waiting for more. See `Client.watch`."""
        options = watch_options(pool, from_sequence, heartbeat_seconds, snapshot=snapshot)
        if not snapshot:
            async with contextlib.aclosing(self._messages(messages.watch_request(options), None)) as received:
                await anext(received)  # where the watch stands
                async for message in received:
                    yield messages.read_batch(message)
            return
        follower = ResumableWatch(options)
        while True:
            try:
                async with contextlib.aclosing(self._messages(follower.request(), follower)) as received:
                    async for message in received:
                        if batch := follower.read(message):
                            yield batch
            except KvpoolError as error:
                await asyncio.sleep(follower.pause_seconds(error))

    async def _messages(
        self, request: event_pb2.WatchRequest, follower: ResumableWatch | None
    ) -> AsyncGenerator[event_pb2.WatchResponse]:
        call = self._events.Watch(request)
        try:
            async with _converted():
                while True:
                    try:
                        async with asyncio.timeout(follower.silence_seconds if follower else None):
                            message = await call.read()
                    except TimeoutError:
                        raise (follower.silent() if follower else DeadlineError("SILENT", "")) from None
                    if not isinstance(message, event_pb2.WatchResponse):
                        raise UnavailableError("ENDED", "the server ended the watch")
                    yield message
        finally:
            call.cancel()

    async def close(self) -> None:
        """Ends the connection. Sessions that are still open live on for their lease."""
        await self._channel.close()


class _Calls:
    """Makes unary calls that may be sent again."""

    def __init__(self, deadline_seconds: float) -> None:
        self.deadline_seconds = deadline_seconds

    async def make(self, method: _Method[_RequestT, _T], request: _RequestT) -> _T:
        """Makes a call."""
        return (await self.make_timed(method, request))[1]

    async def make_timed(self, method: _Method[_RequestT, _T], request: _RequestT) -> tuple[float, _T]:
        """Makes a call; tells when what was answered was sent."""

        async def attempt(left_seconds: float) -> tuple[float, _T]:
            sent_seconds = now_seconds()
            async with _converted():
                return sent_seconds, await method(request, timeout=left_seconds)

        return await retries.call_async(attempt, self.deadline_seconds)


class AsyncSession(SessionBase):
    """A scheduler's session for asyncio: one call at a time. What each method means: see `kvpool.client.Session`.

    Every call may be cancelled. Of a step it is then not known whether it was applied: the next call is refused until
    `settle` has sent it again. `close` and `mark_executed` can simply be called again.
    """

    def __init__(
        self, stub: "allocator_pb2_grpc.AllocatorServiceAsyncStub", opened: OpenedSession, unary: _Calls
    ) -> None:
        super().__init__(opened)
        self._stub = stub
        self._calls = unary
        self._stream: grpc.aio.StreamStreamCall[step_pb2.Step, step_pb2.StepResult] | None = None
        self._closed = False
        self._keepalive = asyncio.create_task(self._keep_alive())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def get_computed_blocks(self, request: Request, *, counted: bool = True) -> ComputedBlocks:
        """See `Session.get_computed_blocks`."""
        return await self._call(calls.call_get_computed_blocks(request, counted=counted))

    async def admit(
        self,
        request: Request,
        max_new_tokens: int = 0,
        *,
        num_lookahead_tokens: int = 0,
        num_encoder_tokens: int = 0,
    ) -> Admission | None:
        """See `Session.admit`."""
        return await self._call(calls.call_admit(request, max_new_tokens, num_lookahead_tokens, num_encoder_tokens))

    async def allocate_slots(  # noqa: PLR0913 - the reference's own parameters
        self,
        request: Request,
        num_new_tokens: int,
        *,
        computed: ComputedBlocks | None = None,
        num_computed_tokens: int | None = None,
        num_lookahead_tokens: int = 0,
        num_encoder_tokens: int = 0,
        delay_cache_blocks: bool = False,
    ) -> Allocation | HitChanged | None:
        """See `Session.allocate_slots`."""
        return await self._call(
            calls.call_allocate_slots(
                request,
                num_new_tokens,
                computed,
                num_computed_tokens,
                num_lookahead_tokens,
                num_encoder_tokens=num_encoder_tokens,
                delay_cache_blocks=delay_cache_blocks,
            )
        )

    async def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """See `Session.cache_blocks`."""
        await self._call(calls.call_simply(lambda step: step.cache_blocks(request, num_computed_tokens)))

    async def free(self, request: Request) -> None:
        """See `Session.free`."""
        await self._call(calls.call_simply(lambda step: step.free(request)))

    async def preempt(self, request: Request) -> None:
        """See `Session.preempt`."""
        await self._call(calls.call_simply(lambda step: step.preempt(request)))

    async def free_held(self, held: HeldRequest) -> None:
        """See `Session.free_held`."""
        await self._call(calls.call_simply(lambda step: step.free(self._held(held, ()))))

    async def evict_blocks(self, block_ids: Sequence[int]) -> None:
        """See `Session.evict_blocks`."""
        await self._call(calls.call_simply(lambda step: step.evict_blocks(block_ids)))

    async def reset_prefix_cache(self) -> bool:
        """See `Session.reset_prefix_cache`."""
        return (await self._call(calls.call_simply(lambda step: step.reset_prefix_cache()))).ok

    async def get_common_prefix_blocks(self, request: Request) -> list[int]:
        """See `Session.get_common_prefix_blocks`."""
        call = calls.call_simply(lambda step: step.get_common_prefix_blocks(request))
        return (await self._call(call)).num_common_blocks

    @asynccontextmanager
    async def step(
        self, *, admission_budget_tokens: int = 0, executed_sequence: int = 0, launched_sequence: int = 0
    ) -> AsyncIterator[StepBuilder]:
        """See `Session.step`."""
        builder = StepBuilder(admission_budget_tokens, executed_sequence, launched_sequence)
        yield builder
        await self._send(builder)

    async def settle(self) -> None:
        """See `Session.settle`."""
        step = self._protocol.unanswered()
        if step is not None:
            await self._exchange(step)

    async def mark_executed(self, sequence: int | None = None) -> None:
        """See `Session.mark_executed`."""
        executed = self.sequence if sequence is None else sequence
        await self._settle_telling()
        if self._protocol.must_tell(executed):
            await self._send(StepBuilder(executed_sequence=executed))
            return
        request = allocator_pb2.MarkExecutedRequest(session_id=self.session_id, executed_sequence=executed)
        with self._noted():
            sent_seconds, _ = await self._calls.make_timed(self._stub.MarkExecuted, request)
        self._protocol.note_executed(executed)
        self._lease_timer.renew(sent_seconds)

    async def pool(self) -> PoolInfo:
        """See `Session.pool`."""
        request = allocator_pb2.GetPoolRequest(pool_name=self.config.name)
        return messages.read_pool(await self._calls.make(self._stub.GetPool, request))

    async def close(self) -> None:
        """See `Session.close`."""
        if self._closed:
            return
        self._keepalive.cancel()
        self._end_stream()
        request = allocator_pb2.CloseSessionRequest(session_id=self.session_id)
        with self._noted():
            await self._calls.make(self._stub.CloseSession, request)
        self._closed = True
        self._note(ended_error("SESSION_CLOSED"))

    async def _call(self, call: calls.Call[calls.ResultT]) -> calls.ResultT:
        builder, read = call
        await self._send(builder)
        return read()

    async def _settle_telling(self) -> None:
        if self._protocol.is_telling:
            await self.settle()

    async def _send(self, builder: StepBuilder) -> None:
        await self._settle_telling()
        step = self._next_step(builder)
        if step:
            await self._exchange(step)

    async def _exchange(self, step: Step) -> None:
        deadline_seconds = self._calls.deadline_seconds
        try:
            message = wire_steps.step_to_proto(step, self.session_id)
            async with asyncio.timeout(deadline_seconds):
                result = await retries.call_async(lambda _: self._exchange_once(message), deadline_seconds)
        except TimeoutError:
            raise DeadlineError("DEADLINE", f"no answer to step {step.sequence} in {deadline_seconds} s") from None
        except KvpoolError as error:
            self._fail(error)
            raise
        self._protocol.finish(result)

    async def _exchange_once(self, message: step_pb2.Step) -> StepResult:
        sent_seconds = now_seconds()
        try:
            answer = await self._ask(message)
        except BaseException:
            self._end_stream()  # its answer, should it come yet, would be taken for the next step's
            raise
        self._lease_timer.renew(sent_seconds)
        if answer.sequence != message.sequence:
            self._end_stream()  # so that the next step's answer is not one that comes late, too
        return wire_steps.result_from_proto(answer)

    async def _ask(self, message: step_pb2.Step) -> step_pb2.StepResult:
        async with _converted():
            if self._stream is None:
                self._stream = self._stub.Schedule()
            with contextlib.suppress(asyncio.InvalidStateError):  # the stream has ended: read() says how
                await self._stream.write(message)
            answer = await self._stream.read()
        if not isinstance(answer, step_pb2.StepResult):
            raise UnavailableError("ENDED", "the server ended the stream")
        return answer

    def _end_stream(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.cancel()

    async def _keep_alive(self) -> None:
        period_seconds = min(self.lease_seconds / 3, self._calls.deadline_seconds / 4)
        request = allocator_pb2.KeepAliveRequest(session_id=self.session_id)
        while True:
            started_seconds, sent_seconds = time.monotonic(), now_seconds()
            try:
                await self._stub.KeepAlive(request, timeout=period_seconds)
            except grpc.RpcError as error:
                if steps.ends_session(from_rpc_error(error)):
                    self._lease_timer.end()
                    return  # the next step will tell
            except grpc.aio.UsageError:  # the channel was closed
                return
            else:
                self._lease_timer.renew(sent_seconds)
            await asyncio.sleep(max(0.0, period_seconds - (time.monotonic() - started_seconds)))


@asynccontextmanager
async def _converted() -> AsyncIterator[None]:
    try:
        yield
    except grpc.RpcError as error:
        raise from_rpc_error(error) from None
