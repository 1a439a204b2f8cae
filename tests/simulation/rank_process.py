"""A rank: the real protocol with the server, and a fake GPU."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import cast

import grpc

from kvpool.core.errors import KvpoolError, UnavailableError
from kvpool.core.ids import TableLease
from kvpool.core.ranks.messages import Planned, Ready, Registration
from kvpool.gpu_worker.rank_effects import (
    Allocate,
    Allocation,
    Effect,
    EpochBegan,
    EpochPassed,
    Failed,
    JoinLater,
    OpenStream,
    Send,
)
from kvpool.gpu_worker.rank_protocol import RankProtocol
from kvpool.gpu_worker.stream import message_request, registration_request
from kvpool.lending.fence import Fence, StaleTablesError
from kvpool.v1 import worker_pb2, worker_pb2_grpc
from kvpool.wire.address import parse_seeds
from kvpool.wire.errors import from_rpc_error
from kvpool.wire.ranks import server_message_from_proto
from simulation.gpu import GroupLayout, Memory, StepWork, Violation
from simulation.grpc_channel import StreamCall
from simulation.virtual_loop import Process

_Event = Callable[[], list[Effect]]


@dataclass(frozen=True, slots=True)
class GpuStep:
    """A step sent from a scheduler to the ranks."""

    lease: TableLease
    work: StepWork
    answer: Callable[[str], None]
    """Sends the response: "" when the step is done, else the reason of the refusal."""


@dataclass(slots=True)
class RankSettings:
    """Settings of a rank process."""

    pool: str
    address: str
    registration: Registration
    groups: tuple[GroupLayout, ...]
    num_host_blocks: int
    random: Random
    fail: Callable[[str], None]
    trace: Callable[..., None]


class RankProcess:
    """One process of a rank, from its start to its end."""

    def __init__(self, settings: RankSettings) -> None:
        self._settings = settings
        self._random = settings.random
        boot_id = f"{settings.random.getrandbits(64):016x}"
        self._fence = Fence(lambda: self._events.put_nowait(self._protocol.steps_ended))
        registration = replace(settings.registration, boot_id=boot_id, fences=True)
        seeds = parse_seeds(settings.address)
        self._protocol = RankProtocol(registration, seeds, self._fence, draw=settings.random.random)
        self._events: asyncio.Queue[_Event] = asyncio.Queue()
        self._stream: StreamCall | None = None
        self._memory: Memory | None = None
        self._lines: dict[Process, asyncio.Queue[GpuStep]] = {}

    @property
    def last_epoch(self) -> int:
        """The newest epoch that the rank knows."""
        return self._protocol._last_epoch

    async def main(self) -> None:
        """Runs the protocol with the server indefinitely, as `Worker` does."""
        protocol = self._protocol
        while not protocol.is_over:
            self._carry_out(protocol.tick(time.monotonic()))
            wait_seconds = max(protocol.next_due_seconds - time.monotonic(), 0.0)
            try:
                async with asyncio.timeout(wait_seconds):
                    event = await self._events.get()
            except TimeoutError:
                continue
            self._carry_out(event())

    def submit(self, sender: Process, step: GpuStep) -> None:
        """Receives a step of a scheduler process, whose steps run one after the other."""
        if sender not in self._lines:
            self._lines[sender] = asyncio.Queue()
            asyncio.create_task(self._run_steps(sender))  # noqa: RUF006 - the loop keeps it
        self._lines[sender].put_nowait(step)

    async def _run_steps(self, sender: Process) -> None:
        while True:
            step = await self._lines[sender].get()
            step.answer(await self._run_step(sender, step))

    async def _run_step(self, sender: Process, step: GpuStep) -> str:
        try:
            ticket = self._fence.step(step.lease)
        except StaleTablesError as error:
            return error.reason
        with ticket:
            memory = self._memory
            if memory is None:
                self._settings.fail("a step was let through while there is no memory")
            elif await self._copy(memory, sender, step):
                await self._compute(memory, step)
            else:
                return "ENDED"
        return ""

    async def _copy(self, memory: Memory, sender: Process, step: GpuStep) -> bool:
        """Makes the copies of a step; False if its engine ends, like its scheduler or session, in the middle of one."""
        copies = step.work.copies
        if copies:
            at = self._random.randrange(len(copies))
            memory.copy(copies[:at])
            memory.begin_copy(*copies[at])
            # Most are longer than a computation, so that other sessions and faults come in between.
            await asyncio.sleep(0.3 * self._random.random() ** 2)
            if sender.is_dead or not self._fence.admits(step.lease):
                self._settings.trace("rank %d: ends in %s, copy %d", self._settings.registration.rank, copies, at)
                return False
            memory.end_copy(*copies[at])
            memory.copy(copies[at + 1 :])
        return True

    async def _compute(self, memory: Memory, step: GpuStep) -> None:
        work = step.work.computations
        try:
            memory.begin(work)
            if work:
                await asyncio.sleep(self._duration_seconds())
            memory.finish(work)
        except Violation as violation:
            self._settings.fail(f"rank {self._settings.registration.rank}: {violation}")

    def _duration_seconds(self) -> float:
        drawn = self._random.random()
        return 0.002 + 0.02 * drawn if drawn < 0.95 else 3.0 * self._random.random() ** 2

    def _carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case OpenStream(registration):
                    self._open_stream(registration)
                case JoinLater():
                    self._drop_stream()
                case Send(message):
                    self._send(message_request(message))
                case Allocate(planned):
                    self._memory = None
                    asyncio.create_task(self._allocate(planned))  # noqa: RUF006 - the loop keeps it
                case EpochBegan(ready):
                    asyncio.create_task(self._open(ready))  # noqa: RUF006 - the loop keeps it
                case EpochPassed():
                    pass  # the server closed the fence
                case Failed(error):
                    self._settings.trace("rank %d failed: %s", self._settings.registration.rank, error)

    def _open_stream(self, registration: Registration) -> None:
        channel = grpc.aio.insecure_channel(self._protocol.target)
        self._stream = stream = cast("StreamCall", worker_pb2_grpc.WorkerServiceStub(channel).Join())
        asyncio.create_task(self._read(stream))  # noqa: RUF006 - the loop keeps it
        self._send(registration_request(self._settings.pool, registration))

    def _send(self, message: worker_pb2.JoinRequest) -> None:
        if self._stream:
            asyncio.create_task(_write(self._stream, message))  # noqa: RUF006 - the loop keeps it

    def _drop_stream(self) -> None:
        stream, self._stream = self._stream, None
        if stream:
            stream.cancel()

    async def _read(self, stream: StreamCall) -> None:
        error: KvpoolError = UnavailableError("STREAM_ENDED", "the server ended the stream")
        try:
            while (message := await stream.read()) is not grpc.aio.EOF:
                self._events.put_nowait(partial(self._take_in, stream, message))
        except grpc.RpcError as failure:
            error = from_rpc_error(failure)
        self._events.put_nowait(partial(self._ended, stream, error))

    def _take_in(self, stream: StreamCall, message: worker_pb2.JoinResponse) -> list[Effect]:
        received = server_message_from_proto(message) if stream is self._stream else None
        return self._protocol.received(received, time.monotonic()) if received else []

    def _ended(self, stream: StreamCall, error: KvpoolError) -> list[Effect]:
        if stream is not self._stream:
            return []
        self._drop_stream()
        return self._protocol.stream_ended(error, time.monotonic())

    async def _allocate(self, planned: Planned) -> None:
        await asyncio.sleep(self._duration_seconds())
        self._memory = Memory(planned.config.num_blocks + self._settings.num_host_blocks, self._settings.groups)
        allocation = Allocation(planned.config, planned.config.num_blocks, 1)
        self._events.put_nowait(partial(self._protocol.allocated, planned, allocation))

    async def _open(self, ready: Ready) -> None:
        """Allows steps once the views are made, unless the epoch has passed meanwhile."""
        await asyncio.sleep(0.001 * self._random.random())
        if self._protocol.ready is ready:
            self._fence.open(ready.epoch)


async def _write(stream: StreamCall, message: worker_pb2.JoinRequest) -> None:
    try:
        await stream.write(message)
    except asyncio.InvalidStateError:
        return  # its reader reports the reason
