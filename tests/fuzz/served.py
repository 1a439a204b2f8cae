"""A server's real objects without sockets: services over one state, a controlled clock, calls as bytes.

Only grpc itself is missing: each call gets a fake context and the received message.
"""

import asyncio
import logging
from contextlib import ExitStack
from dataclasses import dataclass
from random import Random
from typing import Any, Final, NoReturn
from unittest import mock

import grpc
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2

from fuzz.contract import Method
from kvpool.core.blocks.kv_cache_manager import KVCacheManager
from kvpool.server.config import ServerConfig
from kvpool.server.guard.statuses import abort_with
from kvpool.server.services.admin_service import AdminService
from kvpool.server.services.allocator_service import AllocatorService
from kvpool.server.services.components import Components
from kvpool.server.services.directory_service import DirectoryService
from kvpool.server.services.event_service import EventService
from kvpool.server.services.worker_service import WorkerService
from support.clock import ManualClock
from support.core import snapshot
from support.integrity import check_integrity
from support.state import DrivenState
from support.waiting import DEADLINE_SECONDS

MAX_POOL_BLOCKS: Final = 4096
MAX_POOLS: Final = 12


class Refused(Exception):  # noqa: N818 - the name follows its use
    """Raised by `abort` of a context."""


@dataclass(frozen=True, slots=True)
class Ended:
    """Result of a call.

    Attributes:
        code: The status code.
        reason: The reason in the error details; empty for OK.
        answer: The response of a unary call.
    """

    code: grpc.StatusCode
    reason: str = ""
    answer: Message | None = None


class Context:
    """A fake of grpc's context."""

    def __init__(self) -> None:
        self.ended: Ended | None = None
        self.written = 0

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> NoReturn:
        assert isinstance(details, str)
        self.ended = Ended(code, _reason(code, trailing_metadata))
        raise Refused

    async def write(self, message: Message) -> None:
        message.SerializeToString()
        self.written += 1

    def invocation_metadata(self) -> tuple[()]:
        return ()

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"


def _reason(code: grpc.StatusCode, trailing_metadata: Any) -> str:
    details = dict(trailing_metadata).get("grpc-status-details-bin")
    assert details, f"{code} without details"
    status = status_pb2.Status.FromString(details)
    assert status.code == code.value[0]
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info), f"{code} without ErrorInfo"
    assert info.domain == "kvpool"
    assert info.reason.replace("_", "").isupper(), f"{code} with the reason {info.reason!r}"
    return str(info.reason)


class OpenCall(Context):
    """A long-running call, and the task that serves it.

    Attributes:
        method: The method.
        about: The subject of its messages: a session or a pool.
        is_new: Whether no message was sent yet.
    """

    def __init__(self, served: "Served", method: Method) -> None:
        super().__init__()
        self.method = method
        self.about = ""
        self.is_new = True
        self._incoming: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._serve(served))
        self._task.add_done_callback(lambda _: self._give_turn())

    async def _serve(self, served: "Served") -> None:
        if self.method.is_stream:
            await served.answer(self.method, None, self)
        else:
            data = await self._incoming.get()
            assert data is not None
            await served.answer(self.method, self.method.request.FromString(data), self)

    @property
    def is_over(self) -> bool:
        return self._task.done()

    async def read(self) -> object:
        if self._incoming.empty():
            self._give_turn()
        data = await self._incoming.get()
        return grpc.aio.EOF if data is None else self.method.request.FromString(data)

    def begin(self, data: bytes) -> None:
        """Sends the single request of a call without waiting."""
        self._incoming.put_nowait(data)

    async def say(self, data: bytes | None) -> Ended | None:
        """Sends a message, or None to half-close; returns the result if the call ended."""
        self._turn = asyncio.get_running_loop().create_future()
        self._incoming.put_nowait(data)
        async with asyncio.timeout(DEADLINE_SECONDS):
            await self._turn
        return self.result() if self._task.done() else None

    async def cancel(self) -> Ended:
        """Cancels the call, as a disconnecting client does."""
        self._task.cancel()
        await asyncio.wait([self._task])
        return self.result()

    def result(self) -> Ended:
        """Result of the call.

        Raises:
            BaseException: The call ended with an exception that is no status.
        """
        if self._task.cancelled():
            return Ended(grpc.StatusCode.CANCELLED)
        error = self._task.exception()
        if isinstance(error, Refused) and self.ended:
            return self.ended
        if error:
            raise error
        return Ended(grpc.StatusCode.OK)

    def _give_turn(self) -> None:
        if not self._turn.done():
            self._turn.set_result(None)


class _Bugs(logging.Handler):
    """Keeps log records of bugs."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.logged: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.logged.append(logging.Formatter("%(message)s").format(record))


class Served:
    """The services of one server."""

    def __init__(self, rng: Random, allocator: DrivenState | None = None) -> None:
        # Session ids and boot ids depend on the seed only, so that a finding can be repeated.
        self._patched = ExitStack()
        self._patched.enter_context(mock.patch("secrets.token_urlsafe", lambda count: rng.randbytes(count).hex()))
        self._patched.enter_context(mock.patch("secrets.token_bytes", rng.randbytes))
        self._clock = ManualClock()
        config = ServerConfig(max_pool_blocks=MAX_POOL_BLOCKS, max_pools=MAX_POOLS, quarantine_seconds=2.0)
        self.parts = Components(config, allocator, clock=self._clock)
        self.state = self.parts.state
        self._fences = asyncio.create_task(self.parts.ranks.send_fences())
        self._services = {
            "AllocatorService": AllocatorService(self.parts),
            "AdminService": AdminService(self.parts, None),
            "DirectoryService": DirectoryService(self.parts, None, ("unix:/fuzz",)),
            "EventService": EventService(self.parts),
            "WorkerService": WorkerService(self.parts),
        }
        self._bugs = _Bugs()
        logging.getLogger("kvpool").addHandler(self._bugs)

    def close(self) -> None:
        """Undoes all patches."""
        self._fences.cancel()
        logging.getLogger("kvpool").removeHandler(self._bugs)
        self._patched.close()

    async def answer(self, method: Method, request: Message | None, context: Context) -> Any:
        """Serves a call. Errors become statuses as in the guard."""
        try:
            return await getattr(self._services[method.service], method.name)(request, context)
        except Refused:
            raise
        except Exception as error:  # noqa: BLE001 - as in the guard
            await abort_with(context, error, method.name)  # type: ignore[arg-type]  # a stand-in

    def pools(self) -> list[KVCacheManager]:
        """All pools."""
        return list(self.state.pools)

    async def call(self, method: Method, data: bytes) -> Ended | None:
        """Makes a unary call; None if the message cannot be parsed, which grpc refuses."""
        try:
            request = method.request.FromString(data)
        except DecodeError:
            return None
        context = Context()
        try:
            answer = await self.answer(method, request, context)
        except Refused:
            assert context.ended
            return context.ended
        answer.SerializeToString()
        return Ended(grpc.StatusCode.OK, answer=answer)

    def pass_time(self, seconds: float) -> None:
        """Advances the time, and does the server's periodic work."""
        self._clock.seconds += seconds
        self.parts.sessions.end_due()
        self.parts.ranks.tick()

    def fingerprint(self) -> object:
        """A cheap fingerprint of the state, which a refused call must not change."""
        allocator = self.state
        return (
            [
                (
                    pool.config.name,
                    pool.epoch,
                    pool.is_suspended,
                    pool.blocks.num_free_blocks,
                    len(pool.blocks.prefix_map),
                    pool.blocks.num_evicted,
                    pool.num_preemptions,
                    pool.quarantine.num_blocks,
                    repr(pool.stats),
                    repr(pool.activity),
                    [
                        (s.session_number, s.sequence, s.executed_sequence, len(s.requests))
                        for s in pool.sessions.values()
                    ],
                )
                for pool in allocator.pools
            ],
            (
                sorted(allocator.pools.drained, key=lambda name: name or ""),
                self.parts.shutdown.is_requested,
            ),
            [(name, repr(membership)) for name, membership in self.parts.pools.memberships.items()],
        )

    def whole(self) -> object:
        """The whole visible state."""
        return self.fingerprint(), [snapshot(pool, self._sessions(pool)) for pool in self.pools()]

    def check(self) -> None:
        """Raises unless all integrity checks pass and no bug was logged."""
        for pool in self.pools():
            check_integrity(pool, self._sessions(pool))
        assert not self._bugs.logged, self._bugs.logged[0]

    def bug(self) -> str:
        """The last logged bug."""
        return self._bugs.logged[-1] if self._bugs.logged else ""

    def _sessions(self, pool: KVCacheManager) -> list[Any]:
        return list(pool.sessions.values())
