"""The client for asyncio: `async with aio.connect(address) as client`, `await session.admit(request)`."""

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Generator
from contextlib import asynccontextmanager
from functools import wraps
from pathlib import Path
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self

from kvpool.client import operations
from kvpool.client.connection import DEFAULT_DEADLINE_SECONDS, ClientBase
from kvpool.client.durations import check_deadline
from kvpool.client.session import SessionBase
from kvpool.client.step_builder import StepBuilder
from kvpool.client.transports.embedded import EMBEDDED, EmbeddedTransport
from kvpool.client.transports.transport import EventBatch, watch_options
from kvpool.wire.channels import ClientCredentials, TlsConfig

_P = ParamSpec("_P")


def connect(
    address: str,
    *,
    deadline_seconds: float = DEFAULT_DEADLINE_SECONDS,
    tls: TlsConfig | None = None,
    token: str | Path | None = None,
    allow_plaintext: bool = False,
) -> "AsyncClient":
    """Connects to a service. Call it inside a running event loop.

    Args:
        address: See `kvpool.client.connect`.
        deadline_seconds: See `kvpool.client.connect`.
        tls: See `kvpool.client.connect`.
        token: See `kvpool.client.connect`.
        allow_plaintext: See `kvpool.client.connect`.

    Raises:
        ValueError: See `kvpool.client.connect`.
    """
    check_deadline(deadline_seconds)
    access = ClientCredentials.of(tls, token, allow_plaintext=allow_plaintext)
    if address == EMBEDDED:
        return AsyncClient(EmbeddedTransport())
    from kvpool.client.transports.asyncio_grpc import (  # noqa: PLC0415 - the embedded core needs no grpc
        AsyncioGrpcTransport,
    )

    return AsyncClient(AsyncioGrpcTransport(address, deadline_seconds, access))


class AsyncSession(SessionBase):
    """A scheduler's session for asyncio, one call at a time. Its methods are those of `kvpool.client.Session`.

    Every call may be cancelled. Whether a cancelled step was applied is unknown: the next call is refused until
    `settle` has sent the step again. `close` and `mark_executed` can simply be called again.
    """

    get_computed_blocks = operations.get_computed_blocks
    admit = operations.admit
    allocate_slots = operations.allocate_slots
    cache_blocks = operations.cache_blocks
    free = operations.free
    preempt = operations.preempt
    evict_blocks = operations.evict_blocks
    reset_prefix_cache = operations.reset_prefix_cache
    get_common_prefix_blocks = operations.get_common_prefix_blocks
    settle = SessionBase._settle
    mark_executed = SessionBase._mark_executed
    set_weights_version = SessionBase._set_weights_version
    pool = SessionBase._pool
    close = SessionBase._close
    send = SessionBase._send_collected
    begin = SessionBase._begin

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, _: object, error: BaseException | None, __: object) -> None:
        await self._leave(error)

    @asynccontextmanager
    async def step(
        self, *, admission_budget_tokens: int = 0, executed_sequence: int = 0, launched_sequence: int = 0
    ) -> AsyncIterator[StepBuilder]:
        """See `Session.step`."""
        builder = await self._new_settled_step(admission_budget_tokens, executed_sequence, launched_sequence)
        yield builder
        await self.send(builder)

    @asynccontextmanager
    async def begin_step(
        self, *, admission_budget_tokens: int = 0, executed_sequence: int = 0, launched_sequence: int = 0
    ) -> AsyncIterator[StepBuilder]:
        """See `Session.begin_step`."""
        builder = await self._new_settled_step(admission_budget_tokens, executed_sequence, launched_sequence)
        yield builder
        await self._begin(builder)


class OpenedLater(Coroutine[Any, Any, AsyncSession]):
    """A call that opens a session: `await` it, or enter it with `async with`, which closes the session at the end."""

    def __init__(self, call: Coroutine[Any, Any, AsyncSession]) -> None:
        self._call = call
        self._session: AsyncSession | None = None

    def send(self, value: Any, /) -> Any:  # noqa: ANN401 - a coroutine's signature
        """See `Coroutine`."""
        return self._call.send(value)

    def close(self) -> None:
        """See `Coroutine`."""
        self._call.close()

    def throw(self, *error: Any) -> Any:  # noqa: ANN401 - a coroutine's signature
        """See `Coroutine`."""
        return self._call.throw(*error)

    def __await__(self) -> Generator[Any, Any, AsyncSession]:
        return self._call.__await__()

    async def __aenter__(self) -> AsyncSession:
        self._session = await self._call
        return self._session

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session:
            await self._session.__aexit__(kind, error, trace)


def _opened_later(
    method: Callable[Concatenate[Any, _P], Coroutine[Any, Any, AsyncSession]],
) -> Callable[Concatenate[Any, _P], OpenedLater]:
    """Makes a method that opens a session one whose result can also be entered."""

    @wraps(method)
    def call(self: Any, /, *args: _P.args, **kwargs: _P.kwargs) -> OpenedLater:  # noqa: ANN401 - any class with the method
        return OpenedLater(method(self, *args, **kwargs))

    return call


class AsyncClient(ClientBase[AsyncSession]):
    """A connection to a service, for one event loop. Its methods are those of `kvpool.client.Client`.

    `async with client.open_session(...) as session` closes the session at the end.
    """

    _session = AsyncSession
    create_pool = ClientBase._create_pool
    get_pool = ClientBase._get_pool
    wait_until_ready = ClientBase._wait_until_ready
    open_session = _opened_later(ClientBase[AsyncSession]._open_session)
    close = ClientBase._close

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def watch(
        self, pool: str, *, from_sequence: int = 0, snapshot: bool = False, heartbeat_seconds: float | None = None
    ) -> AsyncGenerator[EventBatch]:
        """Yields a pool's block events, and waits for more. See `Client.watch`."""
        options = watch_options(pool, from_sequence, heartbeat_seconds, snapshot=snapshot)
        async with contextlib.aclosing(await self._service.watch(options)) as batches:
            async for batch in batches:
                yield batch
