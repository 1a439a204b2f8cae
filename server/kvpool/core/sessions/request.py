"""Requests, their block tables, and the blocks that a session with a quota holds.

1. The lists of a request (hashes, last hashes, token ids, tables without skipped blocks) only grow at their end, or
   are replaced. A reference to a list together with its length is therefore a snapshot.
2. Every request of a session has the session's holding.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from operator import attrgetter

from kvpool.core.ids import (
    MAX_TOKENS,
    NULL_BLOCK,
    BlockHash,
    BlockId,
    GroupId,
    MapId,
    RequestId,
    RequestNumber,
    SessionNumber,
    StepNumber,
)
from kvpool.core.snapshots import left_out
from kvpool.core.statistics import Miss


@dataclass(slots=True)
class BlockTable:
    """A request's blocks in one group.

    Attributes:
        block_ids: The blocks in the order of their tokens, after one null block per skipped block. Changed in place,
            other than at its end, only after blocks were skipped. States that are kept at the ends of steps only have
            null blocks between them, too.
        num_cached: Number of leading blocks that were hit, cached by this request when they became full, or not kept
            then (see `retention`). Only grows while the table holds blocks. See `stop_caching`.
        num_skipped: Number of leading null blocks. Only grows while the table holds blocks.
    """

    block_ids: list[BlockId] = field(default_factory=list)
    num_cached: int = 0
    num_skipped: int = 0

    @property
    def held_block_ids(self) -> list[BlockId]:
        """The blocks that the table holds, without null ones. A copy."""
        held = self.block_ids[self.num_skipped :]
        return [block_id for block_id in held if block_id] if NULL_BLOCK in held else held

    @property
    def num_held(self) -> int:
        """Number of blocks that the table holds. O(blocks)."""
        return len(self.block_ids) - self.block_ids.count(NULL_BLOCK)

    def freeze(self) -> Callable[[], "BlockTable"]:
        """Returns a function that makes a copy of the table as it is now. O(1); O(blocks) if blocks were skipped."""
        num_cached, num_skipped = self.num_cached, self.num_skipped
        block_ids = self.block_ids[num_skipped:] if num_skipped else self.block_ids
        num_held = len(self.block_ids) - num_skipped
        return lambda: BlockTable([NULL_BLOCK] * num_skipped + block_ids[:num_held], num_cached, num_skipped)

    @property
    def has_stopped_caching(self) -> bool:
        """Whether further full blocks of the table are not cached."""
        return self.num_cached == MAX_TOKENS

    def stop_caching(self) -> None:
        """Makes all further blocks of the table count as cached already, until it is empty again."""
        self.num_cached = MAX_TOKENS

    def clear(self) -> None:
        """Empties the table. The caller frees the blocks."""
        self.block_ids = []
        self.num_cached = self.num_skipped = 0


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """A copy that the engine makes before the layers of a step run. It holds its blocks until then.

    Attributes:
        group_id: Group of the blocks.
        source: The block whose contents are copied.
        target: The block that they are copied to.
        sequence: The session's step that makes the copy.
        holds_source: Whether it holds the source. Not one in host memory, which `HostTier` holds for longer.
    """

    group_id: GroupId
    source: BlockId
    target: BlockId
    sequence: StepNumber
    holds_source: bool = True

    @property
    def held_block_ids(self) -> tuple[BlockId, ...]:
        """The blocks that it holds."""
        return (self.source, self.target) if self.holds_source else (self.target,)


@dataclass(slots=True, eq=False)
class Holding:
    """The distinct blocks that the requests of a session with a quota hold. Maintained by `Quotas`.

    Attributes:
        min_blocks: See `Quota`.
        max_blocks: See `Quota`.
        counts: For each block, the number of the session's tables that contain it.
        uncovered: Held blocks beyond the session's minimum, in the order in which they were gained. An OrderedDict
            finds its first key in O(1), even after many deletions.
        is_over: Whether an allocation that is being refused would have exceeded the maximum.
        session_number: The session.
        num_waiting_covered: Number of blocks that wait for steps of the session and count as covered.
    """

    min_blocks: int
    max_blocks: int
    counts: dict[BlockId, int] = field(default_factory=dict)
    uncovered: dict[BlockId, None] = field(default_factory=OrderedDict)
    is_over: bool = False
    session_number: SessionNumber = field(default=SessionNumber(0), metadata=left_out("is the session's"))
    num_waiting_covered: int = field(default=0, metadata=left_out("follows from the free list"))

    @property
    def num_lacking(self) -> int:
        """Number of blocks of the minimum that the session does not hold."""
        return self.min_blocks - len(self.counts) + len(self.uncovered)

    def drop(self, block_id: BlockId) -> None:
        """Removes one table from a block's count."""
        count = self.counts[block_id] - 1
        if count:
            self.counts[block_id] = count
        else:
            del self.counts[block_id]
            self.uncovered.pop(block_id, None)


@dataclass(slots=True, eq=False)
class Request:
    """A request of a session.

    Attributes:
        request_id: Name of the request.
        number: Number of the request in steps.
        session_number: Number of the session.
        num_tokens: Known tokens, prompt and output. Caching never goes past them.
        num_prompt_tokens: Tokens of the prompt: those that the request was declared with, or the last that was said.
        shared_prefix_boundary_tokens: Length of the prefix that the leading groups had cached at the most recent
            look-up, if it was longer than the hit of all groups; else 0. Only set if windows are cached sparsely. See
            `prefix_search`.
        num_found_tokens: Length of the hit that the most recent look-up found; kept in pools with partial hits.
        num_computed_tokens: Tokens that have slots, hits included. The next allocation starts there.
        credit_tokens: Number of computed tokens that the request can reach without a change of the pool.
        num_preemptions: Number of times that the request was preempted.
        filling_sequence: Most recent step of the session that allocated slots to the request; its execution fills them.
        has_uncounted_lookup: Whether to count the most recent look-up when the request gets slots.
        miss: Where and why the most recent look-up of an operation of its own ended early; None if it did not.
        hashes: One hash per full hash block of the known tokens, if caching is enabled.
        last_hashes: Hashes of larger blocks, by the number of hash blocks that each covers; selected on demand.
        token_ids: The known tokens, if the pool makes events.
        lora_name: LoRA of the request, for events.
        sampled: Those of the hashes that the pool's `HitCurve` samples, in order, and at most its `max_sampled`.
        trace_context: Trace id, span id and flags for spans; empty or zeros for none, and after a recovery.
        tables: Block tables, group by group.
        holding: The blocks that the session's requests hold, if the session has a quota.
        first_map: First map of the session's scope in the pool's prefix map.
        copies: The copies of the session's steps that may still have to be made, see `Session`.
        reserve_tokens: See `Session`.
    """

    request_id: RequestId
    number: RequestNumber
    session_number: SessionNumber
    tables: tuple[BlockTable, ...]
    num_tokens: int = 0
    num_prompt_tokens: int = 0
    shared_prefix_boundary_tokens: int = 0
    num_found_tokens: int = 0
    num_computed_tokens: int = 0
    credit_tokens: int = 0
    num_preemptions: int = 0
    filling_sequence: StepNumber = StepNumber(0)  # noqa: RUF009 - a NewType of int is immutable
    has_uncounted_lookup: bool = False
    miss: Miss | None = None
    hashes: list[BlockHash] = field(default_factory=list)
    last_hashes: dict[int, list[BlockHash]] = field(default_factory=dict)
    token_ids: list[int] = field(default_factory=list)
    lora_name: str | None = None
    sampled: list[BlockHash] = field(default_factory=list, metadata=left_out("is a statistic's"))
    trace_context: bytes = field(default=b"", metadata=left_out("is needed by traces alone"))
    holding: Holding | None = field(default=None, metadata=left_out("is the session's"))
    first_map: MapId = field(default=MapId(0), metadata=left_out("is the session's"))
    copies: list[BlockCopy] = field(default_factory=list, metadata=left_out("is the session's"))
    reserve_tokens: int = field(default=0, metadata=left_out("is the session's"))

    def freeze(self) -> Callable[[], "Request"]:
        """Returns a function that makes a copy of the request as it is now, see rule 1."""
        now = Request(*_values_of(self))
        num_hashes, num_token_ids = len(self.hashes), len(self.token_ids)
        num_last = {per_block: len(last) for per_block, last in self.last_hashes.items()}
        tables = [table.freeze() for table in self.tables]

        def make() -> Request:
            now.hashes, now.token_ids = now.hashes[:num_hashes], now.token_ids[:num_token_ids]
            now.last_hashes = {count: now.last_hashes[count][:length] for count, length in num_last.items()}
            now.tables = tuple(make_table() for make_table in tables)
            return now

        return make

    @property
    def holds_blocks(self) -> bool:
        """Whether it has any block."""
        for table in self.tables:  # noqa: SIM110 - a generator expression is three times slower
            if table.block_ids:
                return True
        return False


_values_of = attrgetter(*Request.__dataclass_fields__)


class RequestsCopy:
    """The requests that a session has now, to be read while they change, end, and others are added.

    Attributes:
        requests: The requests by id. Before the session adds or removes one, it replaces its dict with a copy.
    """

    __slots__ = ("_before", "requests")

    def __init__(self, requests: dict[RequestId, Request]) -> None:
        self.requests = requests
        self._before: dict[Request, Callable[[], Request]] = {}

    def before_change(self, requests: Iterable[Request]) -> None:
        """Keeps requests that are about to change; those that were added later are not kept."""
        for request in requests:
            if self.requests.get(request.request_id) is request and request not in self._before:
                self._before[request] = request.freeze()

    def __iter__(self) -> Iterator[Request]:
        for request in self.requests.values():
            yield (self._before.get(request) or request.freeze())()
        self.requests, self._before = {}, {}
