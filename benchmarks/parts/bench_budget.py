"""Measures a server whose pools use a share of its maximum of blocks. Prints one JSON object.

    PYTHONPATH=tests python -m benchmarks.parts.bench_budget [BLOCKS [SHARE]]

One client creates 64 pools of BLOCKS together (default 2^22), and fills SHARE of them (default 0.25) with requests of
32,768 cached blocks that are never reported as executed. It closes its sessions and removes the pools. Another sends an
empty step every 5 ms. For each phase, the output has its duration, the longest time of such a step, and the server's
resident memory after it.
"""

import itertools
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import grpc

from kvpool.client import FullAttentionSpec, KVCacheGroup, PoolConfig, connect
from kvpool.client.admin import AdminClient
from kvpool.core.ids import PoolName
from kvpool.v1 import allocator_pb2, allocator_pb2_grpc, step_pb2
from support.server import ServerProcess, server_process

POOLS, REQUEST_BLOCKS, BLOCK_TOKENS, HASH_BYTES = 64, 2**15, 16, 32
PERIOD_SECONDS = 0.005
GROUP = KVCacheGroup(FullAttentionSpec(BLOCK_TOKENS), ("layer.0",))


def modest(address: str, pipe: Connection) -> None:
    """Sends steps; answers each message with the longest time of a step since the last, in milliseconds."""
    with connect(address) as client:
        client.create_pool(PoolConfig(PoolName("modest"), 10_000, 65_536, (GROUP,)))
        with client.open_session("modest") as session:
            request = session.request("r", range(64))
            longest_ms = 0.0
            with session.step() as step:
                step.admit(request)
            pipe.send(None)
            while True:
                start_seconds = time.perf_counter()
                with session.step(executed_sequence=session.sequence):
                    pass
                longest_ms = max(longest_ms, (time.perf_counter() - start_seconds) * 1000)
                if pipe.poll(PERIOD_SECONDS):
                    if pipe.recv() is None:
                        return
                    pipe.send(longest_ms)
                    longest_ms = 0.0


def fill(stub: allocator_pb2_grpc.AllocatorServiceStub, pool_name: str, num_requests: int) -> str:
    """Fills a pool with requests of new prompts, one per step; returns the session."""
    opened = stub.OpenSession(allocator_pb2.OpenSessionRequest(pool_name=pool_name, lease_seconds=600))
    session_id = str(opened.session.session_id)
    steps = (
        step_pb2.Step(
            session_id=session_id,
            sequence=number,
            operations=[step_pb2.OPERATION_ADMIT],
            request_numbers=[number],
            declares=[True],
            request_ids=[str(number)],
            num_appended_tokens=[REQUEST_BLOCKS * BLOCK_TOKENS],
            block_hashes=os.urandom(REQUEST_BLOCKS * HASH_BYTES),
        )
        for number in range(1, num_requests + 1)
    )
    for result in stub.Schedule(steps):
        if any(result.outcomes):
            raise RuntimeError(f"not allocated: {result.outcomes}")
    return session_id


def measure(server: ServerProcess, num_blocks: int, share: float) -> dict[str, dict[str, float]]:
    """Runs all phases."""
    address, statm = server.addresses[0], Path(f"/proc/{server.process.pid}/statm")
    names = [PoolName(f"p{i}") for i in range(POOLS)]
    size = num_blocks // POOLS
    figures: dict[str, dict[str, float]] = {}
    sessions: list[str] = []
    pipe, other = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=modest, args=(address, other), daemon=True)
    process.start()
    pipe.recv()
    with connect(address) as client, AdminClient(address) as admin, grpc.insecure_channel(address) as channel:
        stub = allocator_pb2_grpc.AllocatorServiceStub(channel)

        def create() -> None:
            for name in names:
                client.create_pool(
                    PoolConfig(name, size, REQUEST_BLOCKS * BLOCK_TOKENS * 2, (GROUP,), allow_too_few_blocks=True)
                )

        def fill_share() -> None:
            filled = itertools.islice(names, round(POOLS * share))
            sessions.extend(fill(stub, name, (size - 1) // REQUEST_BLOCKS) for name in filled)

        def close() -> None:
            for session_id in sessions:
                stub.CloseSession(allocator_pb2.CloseSessionRequest(session_id=session_id))

        def remove() -> None:
            for name in names:
                admin.remove_pool(name)

        phases: dict[str, Callable[[], None]] = {"create": create, "fill": fill_share, "close": close, "remove": remove}
        for phase, run in phases.items():
            pipe.send(phase)
            pipe.recv()
            start_seconds = time.perf_counter()
            run()
            seconds = time.perf_counter() - start_seconds
            time.sleep(4 * PERIOD_SECONDS)
            pipe.send(phase)
            longest_ms = pipe.recv()
            resident_mib = int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
            figures[phase] = {
                "seconds": round(seconds, 2),
                "longest_step_ms": round(longest_ms, 1),
                "resident_mib": round(resident_mib),
            }
    pipe.send(None)
    process.join()
    return figures


def main() -> None:
    num_blocks = int(sys.argv[1]) if len(sys.argv) > 1 else 2**22
    share = float(sys.argv[2]) if len(sys.argv) > 2 else 0.25
    limits = {"max_total_blocks": num_blocks + 10_000}
    with server_process(limits=limits) as server:
        print(json.dumps(measure(server, num_blocks, share)))  # noqa: T201 - the program's output


if __name__ == "__main__":
    main()
