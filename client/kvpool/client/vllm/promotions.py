"""Requests that wait for copies of their hits from host memory, which engines make in the background.

1. A large hit is admitted alone while other requests run. Its request waits, as for a KV connector, until its copies
   have been made; then it allocates slots for its other tokens.
2. The copies of the requests that one round admits alone are a batch, except those to blocks that the step of the round
   reads: these are made before it. Workers make batches in order. One rank reports how many it has made, which is a
   hint: other ranks can be later.
3. A round that uses what a batch writes joins it: each rank runs the step of the round after the batch. When the
   output of that step arrives, all ranks have made the batch. Until then, the steps that ordered its copies do not
   count as executed, so that no other session gets the blocks.
4. A round joins the batches that were reported as made, those that fill blocks of requests that it admits, and those of
   requests that gave up their blocks. A round of an idle engine joins all. So each batch is joined.
5. If nothing can run, these requests give up their blocks, as each may lack what others hold.
"""

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvpool.client.request import Request
from kvpool.core.sessions.request import BlockCopy
from kvpool.core.specs.pool_config import PoolConfig
from kvpool.core.steps.columns import Step
from kvpool.lending.host_copies import CopyOrders, CopyReport

_MIB: Final = 2**20


def max_promoted_blocks(scheduler: Any, config: PoolConfig, max_mib: int) -> int:
    """Number of blocks of a hit that are copied before a step, of `max_mib` MiB per rank; 0 if all always are."""
    has_loads = scheduler.connector is not None or scheduler.ec_connector is not None
    has_host_hits = config.num_host_blocks and config.enable_caching
    if not has_host_hits or has_loads or scheduler.is_encoder_decoder or scheduler.prefix_replay_tokens:
        return 0
    memory_bytes = max((int(each.size) for each in scheduler.kv_cache_config.kv_cache_tensors), default=0)
    return max(max_mib * _MIB // max(memory_bytes // config.num_blocks, 1), 1)


@dataclass(frozen=True, slots=True)
class _Batch:
    """Copies of one round.

    Attributes:
        number: Its place among all batches, from 1.
        sequence: Number of the first step that ordered one.
        targets: The blocks that they fill.
    """

    number: int
    sequence: int
    targets: frozenset[int]


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
        self._requests: dict[str, int] = {}
        """The requests that were admitted alone and not scheduled since, with the numbers of their batches."""
        self._admitted: dict[str, Request] = {}
        """Those of this round."""

    @property
    def waiting(self) -> Collection[str]:
        """The requests that were admitted for their hits alone, and have not been scheduled since."""
        return self._requests.keys()

    @property
    def has_unjoined(self) -> bool:
        """Whether a batch needs a round that joins it."""
        return bool(self._batches) and self._batches[-1].number > self._num_joined

    def admit(self, session_request: Request) -> None:
        """Has a request wait for the copies that this round orders to its blocks."""
        self._requests[session_request.request_id] = self._num_sent + 1
        self._admitted[session_request.request_id] = session_request

    def waits(self, request_id: str) -> bool:
        """Whether a request waits for copies that may not have been made."""
        return self._requests.get(request_id, 0) > self.report.num_made

    def end(self, request_id: str) -> None:
        """Records that a request is scheduled, or gives up its blocks. Then the next round joins its batch."""
        if self._admitted.pop(request_id, None) is None:
            self._num_joined = max(self._num_joined, self._requests.get(request_id, 0))
        self._requests.pop(request_id, None)

    def orders(self, copies: Sequence[BlockCopy], used: Collection[int], *, is_idle: bool) -> CopyOrders | None:
        """Returns what copies go with the output of this round; None for none.

        Args:
            copies: Those that it has ordered.
            used: Blocks of the requests that it has admitted and scheduled, and sources of copies that it makes.
            is_idle: Whether it schedules no tokens, and the next one will not either.
        """
        waiting = {block_id for each in self._admitted.values() for ids in each.block_ids for block_id in ids}
        waiting.difference_update(used)
        beside = [copy for copy in copies if copy.target in waiting]
        before = [copy for copy in copies if copy.target not in waiting] if beside else copies
        if beside:
            self._num_sent += 1
            self.num_copies += len(beside)
            targets = frozenset(copy.target for copy in beside)
            self._batches.append(_Batch(self._num_sent, min(copy.sequence for copy in beside), targets))
        else:
            self._requests.update(dict.fromkeys(self._admitted, 0))
        self._admitted.clear()
        joined = [batch.number for batch in self._batches if is_idle or not batch.targets.isdisjoint(used)]
        joined.append(min(self.report.num_made, self._num_sent))
        self._num_joined = max(self._num_joined, *joined)
        if not before and not beside and not any(batch.number <= self._num_joined for batch in self._batches):
            return None
        return CopyOrders(_pairs(before), _pairs(beside), self._num_joined)

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


def _pairs(copies: Iterable[BlockCopy]) -> list[tuple[int, int]]:
    return [(copy.source, copy.target) for copy in copies]
