"""A server in another process, from the client's call to the client's result, through a synchronous session."""

import time
from collections.abc import Callable, Sequence
from typing import Final

from benchmarks.core_target import pool_config
from benchmarks.workloads import NewBlocks, Task, WorkloadError
from kvpool.client import Allocation, BlockHasher, Client, ComputedBlocks, Request, Session
from kvpool.client.results import Decodes
from kvpool.core.ids import BlockHash

_OTHER_WORK_SECONDS: Final = 0.005
"""Longer than the service needs for a step, so that its answer is there when the scheduler comes for it."""


def decode(session: Session, requests: Sequence[Request], token_ids: Sequence[int]) -> Sequence[NewBlocks | None]:
    """Gives each running request one token and room for it, in one step that also says that the last one has run.

    Returns:
        Each request's new blocks; None of one that found too few.
    """
    with session.step(executed_sequence=session.sequence) as step:
        answer = step.decode(requests, token_ids)
    return _told(answer)


def _told(answer: Decodes) -> Sequence[NewBlocks | None]:
    if answer.refused:
        return [None if i in answer.refused else blocks for i, blocks in enumerate(answer.new_blocks)]
    return answer.new_blocks


class SessionTarget:
    """See `Target`."""

    def __init__(self, client: Client, name: str, task: Task) -> None:
        info = client.create_pool(pool_config(name, task))
        self._hasher = BlockHasher(info.config.hash_scheme, info.config.hash_block_size)
        self._session = client.open_session(name)
        self._count = 0

    def hashing(self, token_ids: list[int]) -> Callable[[], object]:
        """See `Target`."""
        hashes: list[BlockHash] = []
        return lambda: self._hasher.extend(hashes, token_ids)

    def make(self, token_ids: list[int]) -> Request:
        """See `Target`."""
        self._count += 1
        return self._session.request(f"r{self._count}", token_ids)

    def lookup(self, request: Request) -> ComputedBlocks:
        """See `Target`."""
        return self._session.get_computed_blocks(request)

    def num_hit_tokens(self, hit: ComputedBlocks) -> int:
        """See `Target`."""
        return hit.num_tokens

    def allocate(self, request: Request, num_new_tokens: int, hit: ComputedBlocks | None = None) -> NewBlocks | None:
        """See `Target`."""
        room = self._session.allocate_slots(request, num_new_tokens, computed=hit)
        return room.new_blocks if isinstance(room, Allocation) else None

    def serve(self, token_ids: list[int]) -> Request:
        """See `Target`. One message: an admission."""
        request = self.make(token_ids)
        if self._session.admit(request) is None:
            raise WorkloadError("a prompt found too few blocks")
        return request

    def free(self, request: Request) -> None:
        """See `Target`."""
        self._session.free(request)

    def decode(self, requests: Sequence[Request], token_ids: Sequence[int]) -> Sequence[NewBlocks | None]:
        """See `Target`."""
        return decode(self._session, requests, token_ids)

    def settle(self) -> None:
        """See `Target`. A step that asks nothing."""
        with self._session.step(executed_sequence=self._session.sequence):
            pass

    def reset(self) -> None:
        """See `Target`."""
        if not self._session.reset_prefix_cache():
            raise WorkloadError("the cache could not be reset")

    def close(self) -> None:
        """See `Target`."""
        self._session.close()


class AheadTarget(SessionTarget):
    """The same, where a decode step is sent ahead of its answer. See `Target`.

    Attributes:
        micros: What each step took of the scheduler's own time, in microseconds: sending it, and taking its answer.
    """

    def __init__(self, client: Client, name: str, task: Task) -> None:
        super().__init__(client, name, task)
        self.micros: list[float] = []

    def decode(self, requests: Sequence[Request], token_ids: Sequence[int]) -> Sequence[NewBlocks | None]:
        """See `Target`. Between the two the scheduler sleeps, as if it did something else."""
        session = self._session
        began_ns = time.perf_counter_ns()
        with session.begin_step(executed_sequence=session.sequence) as step:
            answer = step.decode(requests, token_ids)
        sent_ns = time.perf_counter_ns()
        time.sleep(_OTHER_WORK_SECONDS)
        back_ns = time.perf_counter_ns()
        session.settle()
        self.micros.append((sent_ns - began_ns + time.perf_counter_ns() - back_ns) / 1000)
        return _told(answer)
