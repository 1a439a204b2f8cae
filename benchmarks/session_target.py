"""A server in another process, called through a synchronous session; times include the client."""

import time
from collections.abc import Callable, Sequence
from typing import Final

from benchmarks.core_target import pool_config
from benchmarks.workloads import NewBlocks, Task, WorkloadError
from kvpool.client import Allocation, BlockHasher, Client, ComputedBlocks, Request, Session
from kvpool.client.results import Decodes
from kvpool.core.ids import BlockHash
from kvpool.wire.pools import config_from_proto

_OTHER_WORK_SECONDS: Final = 0.005
"""Longer than the service needs for a step, so that the answer has arrived when the scheduler takes it."""


def decode(session: Session, requests: Sequence[Request], token_ids: Sequence[int]) -> Sequence[NewBlocks | None]:
    """Appends one token to each request and allocates slots, in one step that reports the last one as executed.

    Returns:
        The new blocks of each request; None for a request that found too few.
    """
    with session.step(executed_sequence=session.sequence) as step:
        answer = step.decode(requests, token_ids)
    return _new_blocks(answer)


def _new_blocks(answer: Decodes) -> Sequence[NewBlocks | None]:
    if answer.refused:
        return [None if i in answer.refused else blocks for i, blocks in enumerate(answer.new_blocks)]
    return answer.new_blocks


class SessionTarget:
    """See `Target`."""

    def __init__(self, client: Client, name: str, task: Task) -> None:
        config = config_from_proto(client.create_pool(pool_config(name, task)).config)
        self._hasher = BlockHasher(config.hash_scheme, config.hash_block_size)
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
        allocation = self._session.allocate_slots(request, num_new_tokens, computed=hit)
        return allocation.new_blocks if isinstance(allocation, Allocation) else None

    def serve(self, token_ids: list[int]) -> Request:
        """See `Target`. One message, which admits the request."""
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
        """See `Target`. An empty step."""
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
    """A `SessionTarget` that sends decode steps ahead of their answers. See `Target`.

    Attributes:
        micros: The scheduler's own time per step, in microseconds: sending the step and taking its answer.
    """

    def __init__(self, client: Client, name: str, task: Task) -> None:
        super().__init__(client, name, task)
        self.micros: list[float] = []

    def decode(self, requests: Sequence[Request], token_ids: Sequence[int]) -> Sequence[NewBlocks | None]:
        """See `Target`. Sleeps between sending and taking the answer, in place of other work of a scheduler."""
        session = self._session
        began_ns = time.perf_counter_ns()
        with session.begin_step(executed_sequence=session.sequence) as step:
            answer = step.decode(requests, token_ids)
        sent_ns = time.perf_counter_ns()
        time.sleep(_OTHER_WORK_SECONDS)
        back_ns = time.perf_counter_ns()
        session.settle()
        self.micros.append((sent_ns - began_ns + time.perf_counter_ns() - back_ns) / 1000)
        return _new_blocks(answer)
