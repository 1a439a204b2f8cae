"""A step, with all operations of one scheduling round, and its result, as packed columns; fields as on the wire.

A column is empty, which means zero for every operation, or it has one entry per operation. A column "per operation and
group" has the entries of all groups, in order, for each operation. A queue has entries only for the operations that
need them.
"""

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final

MAX_OPERATIONS: Final = 65_536
MAX_REQUEST_NUMBER: Final = 2**31 - 1
MAX_ID_BYTES: Final = 256
"""Maximum length of a request id and of a LoRA name, in bytes of UTF-8."""
TRACE_CONTEXT_BYTES: Final = 25
MAX_OPERATION_GROUPS: Final = 2**18
"""Maximum number of entries of a column per operation and group."""
MAX_CREDIT_ALLOCATIONS: Final = 2**24
"""Maximum number of allocations on credit that a step reports. A session that made more reports this number."""
MAX_COPYING_MICROSECONDS: Final = 2**31
"""Maximum time of copies that a step reports."""
MAX_STEP_WORK: Final = 2**18
"""Limit on the hashes looked up plus the block ids returned by a step; further operations of this kind are skipped.

Each takes about a microsecond, during which all other sessions wait.
"""


class Operation(IntEnum):
    """Kind of an operation; numbers and meanings as on the wire."""

    LOOKUP_COUNTED_AT_ONCE = 2
    ADMIT = 3
    ALLOCATE = 4
    CACHE = 5
    FREE = 6
    PREEMPT = 7
    EVICT = 8
    RESET = 9
    COMMON_PREFIX = 10
    APPEND = 11
    LOOKUP_UNCOUNTED = 12
    LOOKUP = 13
    RESERVE = 14

    # That of an enum is a function in Python, which took a tenth of the time of a row of a step.
    __hash__ = int.__hash__


LOOKING_UP: Final = frozenset((Operation.LOOKUP, Operation.LOOKUP_UNCOUNTED, Operation.LOOKUP_COUNTED_AT_ONCE))
DECLARING: Final = frozenset((*LOOKING_UP, Operation.ADMIT, Operation.ALLOCATE, Operation.APPEND))
"""Operations that can declare their request."""
TAKING: Final = frozenset((Operation.ADMIT, Operation.ALLOCATE))
"""Operations that are refused if too few blocks are left."""
LEAVING: Final = frozenset((Operation.FREE, Operation.PREEMPT))
"""Operations after which a request holds no blocks."""


class Outcome(IntEnum):
    """Outcome of an operation; numbers as on the wire."""

    OK = 0
    NO_BLOCKS = 1
    SKIPPED = 2
    HIT_CHANGED = 3
    IN_USE = 4
    OVER_QUOTA = 5
    NEVER_FITS = 6


@dataclass(slots=True)
class Step:
    """Operations of one session, applied in order and atomically.

    Attributes:
        sequence: One more than the number of the session's last change.
        executed_sequence: Newest change whose execution has finished; 0 to report none.
        launched_sequence: Newest change whose execution is certain, in order; 0 to report none. The number of the step
            itself: nothing new is launched, and work without a number of its own, allocated on credit, is in flight.
        admission_budget_tokens: Tokens that all admissions together may allocate; 0 for no limit.
        num_credit_allocations: Number of allocations that requests made on credit since the previous step.
        max_promoted_blocks: An admission whose hit has more blocks of host memory takes slots for its hit alone, so
            that other requests can run while the copies are made; 0 for no limit.
        copying_out_microseconds: Time that copies to host memory have taken since the previous step.
        copying_in_microseconds: Time that copies from host memory have taken since the previous step.
        operations: The operations, values of `Operation`.
        request_numbers: Column: number of the request.
        declares: Column: whether the operation declares its request, whose id is the next of request_ids.
        num_appended_tokens: Column: tokens appended to the request.
        num_prompt_tokens: Column: length of the prompt, if it changes or is not that of all tokens of the declaration.
        num_new_tokens: Column: ALLOCATE: tokens to allocate; ADMIT: the maximum, 0 for all; CACHE: tokens to cache.
        num_taken_tokens: Column: tokens for which the request took slots on credit since it was last named.
        num_rejected_tokens: Column: allocated tokens that were rejected; their slots are reused.
        num_lookahead_tokens: Column: tokens after the new ones for which to allocate slots. RESERVE: tokens after the
            computed ones for which the request should hold slots; it frees the blocks after these.
        num_encoder_tokens: Column: output tokens of the request's encoder, which take slots in cross-attention groups.
        delay_cache_blocks: Column: leave full blocks uncached until CACHE. Not in a session with slots in reserve.
        num_external_tokens: Column: see `AllocationOptions`, also for the next four.
        num_in_flight_tokens: Column.
        num_reserved_blocks: Column.
        num_watermark_blocks: Column.
        full_sequence_must_fit: Column.
        num_block_ids: Column, per operation and group: number of entries in block_ids.
        block_ids: Queue: blocks of the hit (ALLOCATE), blocks to evict (EVICT).
        block_hashes: Queue: joined hashes of the blocks that the appended tokens fill.
        token_ids: Queue: the appended tokens, if the pool makes events.
        request_ids: Queue: ids of the declared requests.
        lora_names: Queue: LoRA names of the declared requests; empty if no request has one.
        trace_contexts: Queue: joined trace contexts of the declared requests; empty if no request has one.
    """

    sequence: int
    executed_sequence: int = 0
    launched_sequence: int = 0
    admission_budget_tokens: int = 0
    num_credit_allocations: int = 0
    max_promoted_blocks: int = 0
    copying_out_microseconds: int = 0
    copying_in_microseconds: int = 0
    operations: list[int] = field(default_factory=list)
    request_numbers: list[int] = field(default_factory=list)
    declares: list[bool] = field(default_factory=list)
    num_appended_tokens: list[int] = field(default_factory=list)
    num_prompt_tokens: list[int] = field(default_factory=list)
    num_new_tokens: list[int] = field(default_factory=list)
    num_taken_tokens: list[int] = field(default_factory=list)
    num_rejected_tokens: list[int] = field(default_factory=list)
    num_lookahead_tokens: list[int] = field(default_factory=list)
    num_encoder_tokens: list[int] = field(default_factory=list)
    delay_cache_blocks: list[bool] = field(default_factory=list)
    num_external_tokens: list[int] = field(default_factory=list)
    num_in_flight_tokens: list[int] = field(default_factory=list)
    num_reserved_blocks: list[int] = field(default_factory=list)
    num_watermark_blocks: list[int] = field(default_factory=list)
    full_sequence_must_fit: list[bool] = field(default_factory=list)
    num_block_ids: list[int] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)
    block_hashes: bytes = b""
    token_ids: list[int] = field(default_factory=list)
    request_ids: list[str] = field(default_factory=list)
    lora_names: list[str] = field(default_factory=list)
    trace_contexts: bytes = b""


@dataclass(slots=True)
class StepResult:
    """The result of a step.

    Attributes:
        sequence: Sequence number of the step.
        free_blocks: Blocks that are available to the session now.
        outcomes: Column: the outcomes, values of `Outcome`.
        num_hit_tokens: Column: tokens found (LOOKUP, ADMIT, changed hit).
        num_shared_hit_tokens: Column: tokens of num_hit_tokens in blocks that another session filled.
        num_host_hit_tokens: Column: tokens of num_hit_tokens in host memory, or copied from there for this hit.
        num_new_tokens: Column: tokens that an admission allocated after the hit.
        shared_prefix_boundary_tokens: Column: see `Request`; in pools with states at the ends of steps only (LOOKUP,
            changed hit).
        credit_tokens: Column: number of computed tokens that the request can reach without an operation, see
            `KVCacheManager.credit_tokens`; 0 without credit.
        num_prefix_blocks: Column, per operation and group: blocks of the hit; COMMON_PREFIX: only the number.
        num_new_blocks: Column, per operation and group: new blocks.
        block_ids: Queue: for each operation the blocks of the hit by group, then the new blocks by group.
        copied_block_ids: Queue: group, source and target of each copy that the engine makes before the step runs.
        reserve_wanted: Whether another session was refused blocks since the last step: give the reserves back.
    """

    sequence: int
    free_blocks: int = 0
    outcomes: list[int] = field(default_factory=list)
    num_hit_tokens: list[int] = field(default_factory=list)
    num_shared_hit_tokens: list[int] = field(default_factory=list)
    num_new_tokens: list[int] = field(default_factory=list)
    shared_prefix_boundary_tokens: list[int] = field(default_factory=list)
    credit_tokens: list[int] = field(default_factory=list)
    num_prefix_blocks: list[int] = field(default_factory=list)
    num_new_blocks: list[int] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)
    copied_block_ids: list[int] = field(default_factory=list)
    reserve_wanted: bool = False
    num_host_hit_tokens: list[int] = field(default_factory=list)

    @property
    def num_entries(self) -> int:
        """Approximate size, in entries of 8 bytes."""
        columns = 4 * len(self.outcomes or self.num_hit_tokens) + len(self.credit_tokens)
        columns += len(self.shared_prefix_boundary_tokens)
        columns += len(self.copied_block_ids)
        return columns + len(self.num_prefix_blocks) + len(self.num_new_blocks) + len(self.block_ids)
