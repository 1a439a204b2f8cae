"""What steps of 8 modest sessions take alone, and beside one that is greedy, deaf or restless; prints one JSON object.

    PYTHONPATH=tests python -m benchmarks.parts.bench_fairness [SECONDS]

A modest session sends a decode step of 32 requests every 20 ms; told are the median and the 99th percentile of the time
from call to result, in milliseconds, and how many steps there were. The others, each in a process of its own:

- greedy: one session that keeps four steps of 16,384 operations in flight; `greedy_step_ms` is what one of them takes.
- deaf: one that sends steps with long answers, and reads none.
- restless: 64 that open and close streams as fast as they can.

Machines are noisy: compare within one run only.
"""

import asyncio
import contextlib
import itertools
import json
import multiprocessing
import statistics
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator

import grpc

from kvpool.client import FullAttentionSpec, KVCacheGroup, PoolConfig, aio, connect
from kvpool.core.ids import PoolName
from kvpool.v1 import allocator_pb2, allocator_pb2_grpc, step_pb2
from support.server import running_server

SESSIONS, REQUESTS, PERIOD_SECONDS = 8, 32, 0.02
RESTLESS, OPERATIONS, IN_FLIGHT = 64, 16_384, 4
PROMPT_TOKENS = 1000

Aggressor = Callable[[str], None]


async def modest(address: str, seconds: float) -> list[float]:
    """Milliseconds that each step took, of all sessions."""
    taken: list[float] = []
    async with aio.connect(address) as client:
        await asyncio.gather(*(_decode(client, number, seconds, taken) for number in range(SESSIONS)))
    return taken


async def _decode(client: aio.AsyncClient, number: int, seconds: float, taken: list[float]) -> None:
    async with await client.open_session("bench") as session:
        requests = [session.request(f"r{i}", range(number * 10_000 + i, number * 10_000 + i + 64)) for i in range(32)]
        async with session.step() as step:
            for request in requests:
                step.admit(request)
        await asyncio.sleep(number * PERIOD_SECONDS / SESSIONS)
        end_seconds = time.monotonic() + seconds
        while time.monotonic() < end_seconds:
            for request in requests:
                request.append([number])
            start_seconds = time.perf_counter()
            async with session.step(executed_sequence=session.sequence) as step:
                for request in requests:
                    step.allocate_slots(request, 1)
            taken.append((time.perf_counter() - start_seconds) * 1000)
            await asyncio.sleep(max(PERIOD_SECONDS - taken[-1] / 1000, 0))


def _stub(address: str) -> allocator_pb2_grpc.AllocatorServiceStub:
    return allocator_pb2_grpc.AllocatorServiceStub(grpc.insecure_channel(address))


def _open(stub: allocator_pb2_grpc.AllocatorServiceStub) -> str:
    return str(stub.OpenSession(allocator_pb2.OpenSessionRequest(pool_name="bench")).session.session_id)


def _steps(session_id: str, operation: step_pb2.Operation.ValueType, count: int) -> Iterator[step_pb2.Step]:
    """A request, then for ever steps of one operation on it."""
    tokens = PROMPT_TOKENS
    first = step_pb2.Step(session_id=session_id, sequence=1, operations=[step_pb2.OPERATION_ADD], request_numbers=[1])
    first.num_appended_tokens.append(tokens)
    first.block_hashes = b"".join(i.to_bytes(32, "big") for i in range(tokens // 16))
    first.request_ids.append("x")
    yield first
    step = step_pb2.Step(operations=[operation] * count, request_numbers=[1] * count)
    for sequence in itertools.count(2):
        step.sequence = sequence
        copy = step_pb2.Step()
        copy.CopyFrom(step)
        yield copy


def greedy(address: str) -> None:
    """Keeps maximal steps in flight, for ever."""
    asyncio.run(_greedy(address))


async def _greedy(address: str) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        stub: allocator_pb2_grpc.AllocatorServiceAsyncStub = allocator_pb2_grpc.AllocatorServiceStub(channel)
        opened = await stub.OpenSession(allocator_pb2.OpenSessionRequest(pool_name="bench"))
        call = stub.Schedule()
        in_flight = 0
        for step in _steps(opened.session.session_id, step_pb2.OPERATION_LOOKUP_UNCOUNTED, OPERATIONS):
            await call.write(step)
            in_flight += 1
            if in_flight == IN_FLIGHT:
                await call.read()
                in_flight -= 1


def deaf(address: str) -> None:
    """Sends steps with long answers, reads none, and comes back when it is cut off; for ever."""
    filler = _stub(address)
    steps = _steps(_open(filler), step_pb2.OPERATION_CACHE, 1)
    fill = next(steps)
    fill.operations.append(step_pb2.OPERATION_ADMIT)
    fill.request_numbers.append(1)
    fill.num_appended_tokens.append(0)
    kept = filler.Schedule(iter([fill, step_pb2.Step(sequence=2, executed_sequence=1)]))
    deque(kept, maxlen=0)
    while True:
        stub = _stub(address)
        call = stub.Schedule(itertools.islice(_steps(_open(stub), step_pb2.OPERATION_LOOKUP_UNCOUNTED, 10_000), 50))
        while call.is_active():
            time.sleep(0.5)


def restless(address: str) -> None:
    """Opens and closes streams as fast as it can, for ever."""
    asyncio.run(_restless(address))


async def _restless(address: str) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        stub: allocator_pb2_grpc.AllocatorServiceAsyncStub = allocator_pb2_grpc.AllocatorServiceStub(channel)

        async def one() -> None:
            opened = await stub.OpenSession(allocator_pb2.OpenSessionRequest(pool_name="bench"))
            session_id = opened.session.session_id
            for sequence in itertools.count(1):
                call = stub.Schedule()
                with contextlib.suppress(grpc.aio.AioRpcError):
                    await call.write(step_pb2.Step(session_id=session_id, sequence=sequence))
                    await call.read()
                call.cancel()

        await asyncio.gather(*(one() for _ in range(RESTLESS)))


@contextlib.asynccontextmanager
async def beside(address: str, aggressor: Aggressor | None) -> AsyncIterator[None]:
    """Runs an aggressor in a process of its own meanwhile."""
    if aggressor is None:
        yield
        return
    process = multiprocessing.get_context("spawn").Process(target=aggressor, args=(address,), daemon=True)
    process.start()
    await asyncio.sleep(2.0)  # until it is at work
    try:
        yield
    finally:
        process.terminate()
        process.join()


def greedy_step_ms(address: str) -> float:
    """What a maximal step takes, one at a time."""
    stub = _stub(address)
    times: list[float] = []
    sent: deque[float] = deque()

    def steps() -> Iterator[step_pb2.Step]:
        for step in itertools.islice(_steps(_open(stub), step_pb2.OPERATION_LOOKUP_UNCOUNTED, OPERATIONS), 6):
            while len(times) < len(sent):
                time.sleep(0.001)
            sent.append(time.perf_counter())
            yield step

    for _ in stub.Schedule(steps()):
        times.append((time.perf_counter() - sent[-1]) * 1000)  # noqa: PERF401 - steps() looks at it
    return statistics.median(times[1:])


async def measure(address: str, aggressor: Aggressor | None, seconds: float) -> dict[str, float]:
    async with beside(address, aggressor):
        taken = sorted(await modest(address, seconds))
    return {
        "p50_ms": round(statistics.median(taken), 2),
        "p99_ms": round(taken[int(len(taken) * 0.99)], 2),
        "max_ms": round(taken[-1], 2),
        "steps": len(taken),
    }


def main() -> None:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 10.0
    told: dict[str, object] = {}
    group = KVCacheGroup(FullAttentionSpec(16), ("layer.0",))
    for name, aggressor in (("alone", None), ("greedy", greedy), ("deaf", deaf), ("restless", restless)):
        with running_server() as address:
            with connect(address) as client:
                client.create_pool(PoolConfig(PoolName("bench"), 100_000, 65_536, (group,)))
            if aggressor is greedy:
                told["greedy_step_ms"] = round(greedy_step_ms(address), 1)
            told[name] = asyncio.run(measure(address, aggressor, seconds))
    print(json.dumps(told))  # noqa: T201 - what it is for


if __name__ == "__main__":
    main()
