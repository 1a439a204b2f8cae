"""Requests that wait for copies of their hits from host memory, which engines make in the background.

1. A large hit is admitted alone while other requests run. Its request waits, as for a KV connector, until its copies
   have been made; then it allocates slots for its other tokens.
2. The copies of the requests of one round are a batch. Workers make batches in order. One rank reports how many it has
   made, which is a hint: other ranks can be later.
3. A round that uses what a batch writes joins it: each rank runs the step of the round after the batch. When the
   output of that step arrives, all ranks have made the batch. Until then, the steps that ordered its copies do not
   count as executed, so that no other session gets the blocks.
4. A round joins a batch if a request of the batch continues or is aborted, or if another request hits its blocks.
"""

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from kvpool.core.sessions.request import BlockCopy
from kvpool.core.specs.pool_config import PoolConfig
from kvpool.core.steps.columns import Step
from kvpool.lending.host_copies import CopyOrders, CopyReport

_MIB: Final = 2**20


def max_promoted_blocks(scheduler: Any, config: PoolConfig, max_mib: int) -> int:
    """Number of blocks of a hit that are copied before a step, of `max_mib` MiB per rank; 0 if all always are."""
    has_loads = scheduler.connector is not None or scheduler.ec_connector is not None
    if not config.num_host_blocks or has_loads or scheduler.is_encoder_decoder or scheduler.prefix_replay_tokens:
        return 0
    memory_bytes = max((int(each.size) for each in scheduler.kv_cache_config.kv_cache_tensors), default=0)
    return max(max_mib * _MIB // max(memory_bytes // config.num_blocks, 1), 1)


@dataclass(slots=True)
class _Batch:
    """Copies of one round.

    Attributes:
        number: Its place among all batches, from 1.
        copies: The copies, until an output carries them.
        sequence: Number of the first step that ordered one.
        targets: The blocks that they fill.
    """

    number: int
    copies: list[BlockCopy] = field(default_factory=list)
    sequence: int = 0
    targets: set[int] = field(default_factory=set)


class Promotions:
    """The copies in the background of one engine.

    Attributes:
        max_blocks: Number of blocks of host memory in a hit that are copied before a step, not beside steps.
        report: What the workers have reported of copies.
        num_copies: Number of copies in the background so far.
    """

    def __init__(self, max_blocks: int) -> None:
        self.max_blocks = max_blocks
        self.report = self._sent_report = CopyReport()
        self.num_copies = 0
        self._num_sent = self._num_joined = 0
        self._batches: deque[_Batch] = deque()
        """Those that some rank may not have made."""
        self._requests: dict[str, _Batch] = {}

    @property
    def waiting(self) -> Collection[str]:
        """The requests that wait."""
        return self._requests.keys()

    def begin(self, request_id: str, copies: Collection[BlockCopy]) -> None:
        """Has a request wait for copies, which go with the output of this round."""
        if not self._batches or self._batches[-1].number <= self._num_sent:
            self._batches.append(_Batch(self._num_sent + 1, sequence=min(copy.sequence for copy in copies)))
        batch = self._requests[request_id] = self._batches[-1]
        batch.copies += copies
        self.num_copies += len(copies)
        batch.targets |= {copy.target for copy in copies}

    def waits(self, request_id: str) -> bool:
        """Whether a request waits for copies that may not have been made."""
        batch = self._requests.get(request_id)
        return batch is not None and batch.number > self.report.num_made

    def end(self, request_id: str) -> None:
        """Has this round join the copies of a request, which continues or is aborted."""
        if batch := self._requests.pop(request_id, None):
            self._num_joined = max(self._num_joined, batch.number)

    def note_hit(self, block_ids: Iterable[int]) -> None:
        """Has this round join the batches that fill these blocks, which a request hits."""
        if self._batches:
            hit = set(block_ids)
            self._num_joined = max(
                [self._num_joined, *(each.number for each in self._batches if not hit.isdisjoint(each.targets))]
            )

    def orders(self, before: list[tuple[int, int]]) -> CopyOrders | None:
        """Returns what copies go with the output of this round, `before` it and beside; None for none."""
        beside: list[tuple[int, int]] = []
        if self._batches and self._batches[-1].number > self._num_sent:
            beside = [(copy.source, copy.target) for copy in self._batches[-1].copies]
            self._num_sent += 1
        joins = any(batch.number <= self._num_joined for batch in self._batches)
        return CopyOrders(before, beside, self._num_joined) if before or beside or joins else None

    def settle(self, orders: CopyOrders) -> None:
        """Records that the output of a round with these orders has arrived."""
        while self._batches and self._batches[0].number <= orders.joined:
            self._batches.popleft()

    def put_times(self, step: Step) -> None:
        """Has a step report how long copies took since the step before."""
        now, before, self._sent_report = self.report, self._sent_report, self.report
        step.copying_out_microseconds = now.demotion_microseconds - before.demotion_microseconds
        step.copying_in_microseconds = now.promotion_microseconds - before.promotion_microseconds

    def last_executed(self, sequence: int) -> int:
        """Returns the newest step, at most this one, whose copies in the background all ranks have made."""
        return min([sequence, *(batch.sequence - 1 for batch in self._batches)])
