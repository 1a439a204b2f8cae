"""Measures steps of 8 modest sessions alone and beside an aggressive client. Prints one JSON object.

    PYTHONPATH=tests python -m benchmarks.parts.bench_fairness [SECONDS]

A modest session sends a decode step of 32 requests every 20 ms. The output has the median and the 99th percentile of
the time from call to result in milliseconds, and the number of steps. Aggressive clients, each in its own process:

- greedy: one session with four steps of 16,384 operations in flight; `greedy_step_ms` is the time of one such step.
- deaf: a session that sends steps with long answers and reads none.
- restless: 64 sessions that open and close streams without pauses.

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
DECLARED_PER_STEP = 1024  # messages of 2 MiB

Aggressor = Callable[[str], None]


async def modest(address: str, seconds: float) -> list[float]:
    """Returns the times of all steps of all sessions in milliseconds."""
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
    """Yields steps that declare `count` requests of one prompt, then steps of one operation on each without end."""
    hashes = b"".join(i.to_bytes(32, "big") for i in range(PROMPT_TOKENS // 16))
    sequences = itertools.count(1)
    for first in range(0, count, DECLARED_PER_STEP):
        numbers = range(first + 1, min(first + DECLARED_PER_STEP, count) + 1)
        yield step_pb2.Step(
            session_id=session_id,
            sequence=next(sequences),
            operations=[step_pb2.OPERATION_APPEND] * len(numbers),
            request_numbers=numbers,
            declares=[True] * len(numbers),
            num_appended_tokens=[PROMPT_TOKENS] * len(numbers),
            block_hashes=hashes * len(numbers),
            request_ids=map(str, numbers),
        )
    step = step_pb2.Step(operations=[operation] * count, request_numbers=range(1, count + 1))
    for sequence in sequences:
        step.sequence = sequence
        copy = step_pb2.Step()
        copy.CopyFrom(step)
        yield copy


def greedy(address: str) -> None:
    """Keeps steps of maximum size in flight, without end."""
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
    """Sends steps with long answers and reads none; reconnects when it is disconnected, without end."""
    filler = _stub(address)
    steps = _steps(_open(filler), step_pb2.OPERATION_CACHE, 1)
    fill = next(steps)
    fill.operations[0] = step_pb2.OPERATION_ADMIT
    kept = filler.Schedule(iter([fill, step_pb2.Step(sequence=2, executed_sequence=1)]))
    deque(kept, maxlen=0)
    while True:
        stub = _stub(address)
        call = stub.Schedule(itertools.islice(_steps(_open(stub), step_pb2.OPERATION_LOOKUP_UNCOUNTED, 10_000), 60))
        while call.is_active():
            time.sleep(0.5)


def restless(address: str) -> None:
    """Opens and closes streams without pauses and without end."""
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
    """Runs an aggressive client in another process."""
    if aggressor is None:
        yield
        return
    process = multiprocessing.get_context("spawn").Process(target=aggressor, args=(address,), daemon=True)
    process.start()
    await asyncio.sleep(2.0)  # until it has started
    try:
        yield
    finally:
        process.terminate()
        process.join()


def greedy_step_ms(address: str) -> float:
    """Returns the time of a step of maximum size, one at a time."""
    stub = _stub(address)
    times: list[float] = []
    sent: deque[float] = deque()
    num_declaring = -(-OPERATIONS // DECLARED_PER_STEP)

    def steps() -> Iterator[step_pb2.Step]:
        sending = _steps(_open(stub), step_pb2.OPERATION_LOOKUP_UNCOUNTED, OPERATIONS)
        for step in itertools.islice(sending, num_declaring + 5):
            while len(times) < len(sent):
                time.sleep(0.001)
            sent.append(time.perf_counter())
            yield step

    for _ in stub.Schedule(steps()):
        times.append((time.perf_counter() - sent[-1]) * 1000)  # noqa: PERF401 - steps() reads the list
    return statistics.median(times[num_declaring:])


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
    answer: dict[str, object] = {}
    group = KVCacheGroup(FullAttentionSpec(16), ("layer.0",))
    for name, aggressor in (("alone", None), ("greedy", greedy), ("deaf", deaf), ("restless", restless)):
        with running_server() as address:
            with connect(address) as client:
                client.create_pool(PoolConfig(PoolName("bench"), 100_000, 65_536, (group,)))
            if aggressor is greedy:
                answer["greedy_step_ms"] = round(greedy_step_ms(address), 1)
            answer[name] = asyncio.run(measure(address, aggressor, seconds))
    print(json.dumps(answer))  # noqa: T201 - the program's output


if __name__ == "__main__":
    main()
