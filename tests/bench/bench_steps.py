"""What allocator work costs, in process and through a server on a unix socket; prints one JSON object.

Medians in microseconds of the same work as vLLM's manager was measured with: blocks of 16 tokens, one group of full
attention, 100,000 blocks, caching on; prompts of 256 blocks; a decode step gives each of 256 requests one token, and
a sixteenth of them crosses into a new block. Machines are noisy: compare within one run only.
"""

import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

from kvpool.client import Client, FullAttentionSpec, KVCacheGroup, PoolConfig, Request, Session, connect
from kvpool.server.core.types import PoolName

sys.path.insert(0, str(Path(__file__).parents[1]))
from support_server import running_server

BLOCK_SIZE, PROMPT_BLOCKS, NUM_REQUESTS = 16, 256, 256
ROUNDS = 200


class Bench:
    """One session's work, timed call by call."""

    def __init__(self, client: Client) -> None:
        group = KVCacheGroup(FullAttentionSpec(BLOCK_SIZE), ("layer.0",))
        client.create_pool(PoolConfig(PoolName("bench"), 100_000, 65_536, (group,)))
        self._session: Session = client.open_session("bench")
        self._random = random.Random(0)  # noqa: S311 - a workload
        self._count = 0
        self._micros: dict[str, list[float]] = {}

    def run(self) -> dict[str, float]:
        self._empty_steps()
        self._prompts()
        self._decodes()
        self._session.close()
        return {name: round(statistics.median(values), 1) for name, values in self._micros.items()}

    def _timed(self, name: str, work: Callable[[], object]) -> None:
        start = time.perf_counter_ns()
        work()
        self._micros.setdefault(name, []).append((time.perf_counter_ns() - start) / 1000)

    def _request(self, token_ids: list[int]) -> Request:
        self._count += 1
        return self._session.request(f"r{self._count}", token_ids)

    def _tokens(self, count: int) -> list[int]:
        return [self._random.randrange(100_000) for _ in range(count)]

    def _tell_executed(self) -> None:
        with self._session.step(executed_sequence=self._session.sequence):
            pass

    def _empty_steps(self) -> None:
        self._session.get_computed_blocks(self._request([0]))

        for _ in range(ROUNDS):
            self._timed("empty_step", self._tell_executed)

    def _prompts(self) -> None:
        session = self._session
        for _ in range(ROUNDS):
            prompt = self._tokens(PROMPT_BLOCKS * BLOCK_SIZE + 1)
            cold, warm = self._request(prompt), self._request(prompt)
            self._timed("lookup_miss_256", lambda: session.get_computed_blocks(cold))  # noqa: B023 - called at once
            self._timed("allocate_cold_256", lambda: session.allocate_slots(cold, len(prompt)))  # noqa: B023
            self._timed("lookup_hit_256", lambda: session.get_computed_blocks(warm))  # noqa: B023
            self._tell_executed()  # else what it cached is to be forgotten
            self._timed("free_256", lambda: session.free(cold))  # noqa: B023
            session.free(warm)

    def _decodes(self) -> None:
        session = self._session
        requests = [self._request(self._tokens(BLOCK_SIZE * 4 + i % BLOCK_SIZE)) for i in range(NUM_REQUESTS)]
        for request in requests:
            session.admit(request)

        def decode() -> None:
            with session.step(executed_sequence=session.sequence) as step:
                for request in requests:
                    step.allocate_slots(request, 1)

        for _ in range(ROUNDS):
            for request in requests:
                request.append([self._random.randrange(100_000)])
            self._timed("decode_step_256_requests", decode)


def main() -> None:
    with connect("embedded:") as client:
        core = Bench(client).run()
    with running_server() as address, connect(address) as client:
        service = Bench(client).run()
    print(json.dumps({"core": core, "grpc": service}))  # noqa: T201 - what it is for


if __name__ == "__main__":
    main()
