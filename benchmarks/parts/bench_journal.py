"""Measures the cost of a journal: steps, a snapshot of a full pool, a restart, other stores. Prints one JSON object.

Steps: decode steps of 256 requests through a unix socket, in turns on a server with a journal and one without. Snapshot
and restart: a pool of 1,000,000 blocks, all cached, then a log of decode steps of maximum length. Stores: microseconds
per record, for a decode step of 256 requests and a prompt of 256 blocks; with lmdb if it is installed. Machines are
noisy: compare within one run only.
"""

import argparse
import asyncio
import contextlib
import gc
import json
import mmap
import os
import random
import sqlite3
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.parts.bench_metrics import Decodes
from kvpool.client import connect
from kvpool.core.commands import ApplyStep, Command, CreatePool, OpenSession
from kvpool.core.ids import PoolName, SessionId
from kvpool.core.specs.kinds import FullAttentionSpec
from kvpool.core.specs.pool_config import KVCacheGroup, PoolConfig
from kvpool.core.state import State
from kvpool.core.steps.columns import Operation, Step
from kvpool.server.journal.config import JournalConfig
from kvpool.server.journal.frames import FrameKind, encode_frame
from kvpool.server.journal.journal import Journal
from kvpool.wire.changes import change_bytes
from kvpool.wire.steps import step_to_proto
from support.server import running_server

BLOCK_SIZE = 16
NUM_SNAPSHOTS = 5


def cost_of_a_step(rounds: int) -> dict[str, float]:
    """Measures decode steps with and without a journal, in turns."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory())
        addresses = {
            "on": stack.enter_context(running_server(journal={"folder": folder})),
            "off": stack.enter_context(running_server()),
        }
        sides = {name: Decodes(stack.enter_context(connect(at)), 100_000) for name, at in addresses.items()}
        took: dict[str, list[float]] = {name: [] for name in sides}
        for i in range(rounds):
            for name in ("on", "off") if i % 2 else ("off", "on"):
                took[name].append(sides[name].step())
        on, off = (statistics.median(took[name]) * 1000 for name in ("on", "off"))
        ratios = [with_it / without for with_it, without in zip(took["on"], took["off"], strict=True)]
        return {"on_us": on, "off_us": off, "ratio": on / off, "median_of_ratios": statistics.median(ratios)}


class FullPool:
    """A session in this process that fills a pool with cached blocks, then decodes."""

    def __init__(self, journal: Journal, num_blocks: int, num_requests: int) -> None:
        self._random = random.Random(0)  # noqa: S311 - a workload
        group = KVCacheGroup(FullAttentionSpec(BLOCK_SIZE), ("layer.0",))
        config = PoolConfig(PoolName("bench"), num_blocks, 65_536, (group,))
        self._journal = journal
        self._execute(CreatePool(config, b"n" * 32))
        self._execute(OpenSession("bench", SessionId("s"), "", 10.0))
        self._pool, self._session = journal.state.sessions.find("s", 0.0)
        for number in range(1, num_blocks // 4000 + 1):
            self._prompt(number, 4000)
            self._apply(Step(0, operations=[int(Operation.FREE)], request_numbers=[number]))
        for number in range(num_requests):
            self._prompt(10_000 + number, 4)

    def _prompt(self, number: int, blocks: int) -> None:
        self._apply(
            Step(
                0,
                operations=[int(Operation.ADMIT)],
                request_numbers=[number],
                declares=[True],
                num_appended_tokens=[blocks * BLOCK_SIZE],
                block_hashes=self._random.randbytes(blocks * 32),
                request_ids=[f"r{number}"],
            )
        )

    def decode(self) -> None:
        """Appends a token to each request; one in 16 requests fills a block."""
        requests = list(self._session.requests.values())
        full = sum((request.num_tokens + 1) % BLOCK_SIZE == 0 for request in requests)
        self._apply(
            Step(
                0,
                operations=[int(Operation.ALLOCATE)] * len(requests),
                request_numbers=[request.number for request in requests],
                num_appended_tokens=[1] * len(requests),
                num_new_tokens=[1] * len(requests),
                block_hashes=self._random.randbytes(full * 32),
            )
        )

    def _apply(self, step: Step) -> None:
        step.sequence = self._session.sequence + 1
        step.executed_sequence = self._session.sequence
        message = step_to_proto(step, "")
        self._execute(ApplyStep("s", step, change_bytes(message)))
        self._pool.blocks.take_events()

    def _execute(self, command: Command[Any]) -> None:
        self._journal.record(command, 0.0, self._journal.state.execute(command, 0.0))


async def cost_of_a_snapshot(num_blocks: int, num_requests: int, log_bytes: int, folder: str) -> dict[str, float]:
    """Measures a snapshot and the pauses of the event loop, then a log of maximum length, then a restart."""
    journal = _journal(folder)
    journal.begin()
    pool = FullPool(journal, num_blocks, num_requests)
    gc.collect()
    gc.freeze()
    steps = [_milliseconds(pool.decode) for _ in range(100)]
    with journal.state.snapshot():
        guarded_steps = [_milliseconds(pool.decode) for _ in range(100)]
    stops = [stop for _ in range(NUM_SNAPSHOTS) for stop in await _stops(journal, pool)]
    clocks, processor = zip(*stops, strict=True)
    size_bytes = journal.counts.size_bytes
    first_record = journal.counts.records
    log = journal._log
    while log and log.size_bytes < log_bytes:
        pool.decode()
    records = journal.counts.records - first_record
    result = {
        "num_blocks": num_blocks,
        "num_requests": num_requests,
        "freeze_ms": journal.counts.stopped_seconds * 1000,
        "longest_stop_ms": max(clocks),
        "longest_stop_processor_ms": max(processor),
        "median_stop_processor_ms": statistics.median(processor),
        "decode_processor_ms": statistics.median(steps),
        "decode_amid_a_snapshot_processor_ms": statistics.median(guarded_steps),
        "seconds": journal.counts.snapshot_seconds,
        "bytes_a_block": size_bytes / num_blocks,
        "records_of_the_log": records,
    }
    if log:
        log.close()
    journal._folder.close()
    start = time.process_time()
    again = _journal(folder)
    result["restart_with_the_log_processor_seconds"] = time.process_time() - start
    if again.recovery.dropped:
        raise RuntimeError(again.recovery.detail)
    result["restart_with_the_log_seconds"] = again.recovery.seconds
    again.begin()
    again.close()
    start = time.process_time()
    result["restart_after_a_clean_stop_seconds"] = _journal(folder).recovery.seconds
    result["restart_after_a_clean_stop_processor_seconds"] = time.process_time() - start
    return result


async def _stops(journal: Journal, pool: FullPool) -> list[tuple[float, float]]:
    """Writes a snapshot; returns how long each of its turns lets steps wait, in milliseconds and of processor time."""
    snapshot = asyncio.create_task(journal._snapshot())
    stops: list[tuple[float, float]] = []
    while not snapshot.done():
        if len(stops) % 16 == 0:
            pool.decode()
        begin = time.perf_counter(), time.process_time()
        await asyncio.sleep(0)
        end = time.perf_counter(), time.process_time()
        stops.append(((end[0] - begin[0]) * 1000, (end[1] - begin[1]) * 1000))
    return stops


def _milliseconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return (time.process_time() - start) * 1000


def _journal(folder: str) -> Journal:
    return Journal(JournalConfig(folder), State)


def cost_of_stores(rounds: int) -> dict[str, float]:
    """Measures the time to write a record in microseconds, with a checksum if the store has none."""
    records = {"decode": random.Random(0).randbytes(2_300), "prompt": random.Random(0).randbytes(8_400)}  # noqa: S311
    result: dict[str, float] = {}
    with TemporaryDirectory() as folder:
        for store in (_append, _mapped, _sqlite, _lmdb):
            for name, record in records.items():
                with store(Path(folder) / f"{store.__name__}-{name}") as write:
                    if write is None:
                        continue
                    times = []
                    for _ in range(rounds):
                        start = time.perf_counter_ns()
                        write(record)
                        times.append((time.perf_counter_ns() - start) / 1000)
                result[f"{store.__name__[1:]}_{name}_us"] = statistics.median(times)
    return result


_Write = Callable[[bytes], object] | None


@contextlib.contextmanager
def _append(path: Path) -> Iterator[_Write]:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    yield lambda record: os.write(descriptor, encode_frame(FrameKind.RECORD, record))
    os.close(descriptor)


@contextlib.contextmanager
def _mapped(path: Path) -> Iterator[_Write]:
    with path.open("w+b") as file:
        file.truncate(2**26)
        with mmap.mmap(file.fileno(), 2**26) as mapped:

            def write(record: bytes) -> None:
                frame = encode_frame(FrameKind.RECORD, record)
                if mapped.tell() + len(frame) > len(mapped):
                    mapped.seek(0)
                mapped.write(frame)

            yield write


@contextlib.contextmanager
def _sqlite(path: Path) -> Iterator[_Write]:
    base = sqlite3.connect(path, isolation_level=None)
    base.execute("PRAGMA journal_mode=WAL")
    base.execute("PRAGMA synchronous=OFF")
    base.execute("CREATE TABLE log (number INTEGER PRIMARY KEY, record BLOB)")
    yield lambda record: base.execute("INSERT INTO log (record) VALUES (?)", (record,))
    base.close()


@contextlib.contextmanager
def _lmdb(path: Path) -> Iterator[_Write]:
    try:
        import lmdb  # type: ignore[import-not-found]  # noqa: PLC0415 - optional
    except ImportError:
        yield None
        return
    base = lmdb.open(str(path), map_size=2**30, sync=False, metasync=False, writemap=True)
    count = 0

    def write(record: bytes) -> None:
        nonlocal count
        count += 1
        with base.begin(write=True) as change:
            change.put(count.to_bytes(8, "big"), record, append=True)

    yield write
    base.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--num-blocks", type=int, default=1_000_000)
    parser.add_argument("--num-requests", type=int, default=256, help="running requests in the pool of the snapshot")
    parser.add_argument("--log-bytes", type=int, default=JournalConfig().log_bytes)
    arguments = parser.parse_args()
    with TemporaryDirectory() as folder:
        result = {
            "stores": cost_of_stores(arguments.rounds),
            "snapshot": asyncio.run(
                cost_of_a_snapshot(arguments.num_blocks, arguments.num_requests, arguments.log_bytes, folder)
            ),
            "step": cost_of_a_step(arguments.rounds),
        }
    rounded = {part: {name: round(value, 3) for name, value in figures.items()} for part, figures in result.items()}
    print(json.dumps(rounded))  # noqa: T201 - the program's output


if __name__ == "__main__":
    main()
