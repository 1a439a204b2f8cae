"""A step, all that a scheduling round asks, and its result: packed columns, field by field as on the wire.

A column is empty, which means zero for every operation, or has one entry an operation ("an operation and group":
operation by operation, in each the groups in order). A queue has entries only for the operations that need some.
"""

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final

MAX_OPERATIONS: Final = 65_536
MAX_OPERATION_GROUPS: Final = 2**18
"""Most entries of a column that has one an operation and group."""
MAX_CREDIT_ALLOCATIONS: Final = 2**24
"""Most allocations without asking that a step tells of; a session that had more tells fewer."""
MAX_STEP_WORK: Final = 2**18
"""Once a step has looked up hashes and answered block ids, so many together, operations that would are not tried.

Each is about a microsecond, for which all others wait.
"""


class Operation(IntEnum):
    """What is asked for one request; numbers as on the wire."""

    ADD = 1
    LOOKUP = 2
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
    LOOKUP_COUNTED_ON_ADMIT = 13


class Outcome(IntEnum):
    """How an operation ended; numbers as on the wire."""

    OK = 0
    NO_BLOCKS = 1
    SKIPPED = 2
    HIT_CHANGED = 3
    IN_USE = 4
    OVER_QUOTA = 5


@dataclass(slots=True)
class Step:
    """Operations of one session, applied in order and as a whole.

    Attributes:
        sequence: One more than the session's last change.
        executed_sequence: Newest change whose execution has finished; 0 for no news.
        launched_sequence: Newest change whose execution is sure to come, in order; 0 for no news.
        admission_budget_tokens: Tokens that all admissions together may make room for; 0 for no limit.
        num_credit_allocations: How often requests took room without asking since the step before.
        operations: The operations, values of `Operation`.
        request_numbers: Column: the request.
        num_appended_tokens: Column: tokens the request has grown by.
        num_new_tokens: Column: ALLOCATE: tokens to make room for; ADMIT: the most, 0 for all; CACHE: up to where.
        num_taken_tokens: Column: tokens that the request has taken room for without asking, see `credit`.
        num_rejected_tokens: Column: tokens given room earlier whose contents were thrown away.
        num_lookahead_tokens: Column: tokens beyond the new ones to keep room for.
        num_encoder_tokens: Column: tokens that the request's encoder puts out; needs room in groups of cross attention.
        delay_cache_blocks: Column: leave full blocks uncached until CACHE.
        num_external_tokens: Column: see `AllocationOptions`; so are the next four.
        num_in_flight_tokens: Column.
        num_reserved_blocks: Column.
        num_watermark_blocks: Column.
        full_sequence_must_fit: Column.
        num_block_ids: Column, an operation and group: how many of block_ids are its.
        block_ids: Queue: promised blocks (ALLOCATE), blocks to evict (EVICT).
        block_hashes: Queue: hashes of the blocks that the appended tokens filled, joined.
        token_ids: Queue: the appended tokens, if the pool makes events.
        request_ids: Queue: ids of the added requests.
        lora_names: Queue: their LoRA names; or empty.
    """

    sequence: int
    executed_sequence: int = 0
    launched_sequence: int = 0
    admission_budget_tokens: int = 0
    num_credit_allocations: int = 0
    operations: list[int] = field(default_factory=list)
    request_numbers: list[int] = field(default_factory=list)
    num_appended_tokens: list[int] = field(default_factory=list)
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

    @property
    def num_entries(self) -> int:
        """About how much it holds, in entries of 8 bytes."""
        named = 64 * len(self.request_ids)  # at most: an id and a LoRA name of 256 bytes
        options = (
            len(self.num_external_tokens)
            + len(self.num_in_flight_tokens)
            + len(self.num_reserved_blocks)
            + len(self.num_watermark_blocks)
            + len(self.full_sequence_must_fit)
        )
        return (
            9 * len(self.operations)
            + options
            + len(self.num_block_ids)
            + len(self.block_ids)
            + len(self.block_hashes) // 8
            + len(self.token_ids)
            + named
        )


@dataclass(slots=True)
class StepResult:
    """What became of a step.

    Attributes:
        sequence: The step's.
        free_blocks: Blocks that the session can be given now.
        outcomes: Column: how each operation ended, values of `Outcome`.
        num_hit_tokens: Column: tokens found (LOOKUP, ADMIT, changed hit).
        num_shared_hit_tokens: Column: of num_hit_tokens, those of blocks that another session filled.
        num_new_tokens: Column: tokens that an admission made room for beyond the hit.
        num_prefix_blocks: Column, an operation and group: blocks of the hit; COMMON_PREFIX: the count alone.
        num_new_blocks: Column, an operation and group: newly allocated blocks.
        block_ids: Queue: for each operation the hit's blocks group by group, then the new blocks group by group.
    """

    sequence: int
    free_blocks: int = 0
    outcomes: list[int] = field(default_factory=list)
    num_hit_tokens: list[int] = field(default_factory=list)
    num_shared_hit_tokens: list[int] = field(default_factory=list)
    num_new_tokens: list[int] = field(default_factory=list)
    num_prefix_blocks: list[int] = field(default_factory=list)
    num_new_blocks: list[int] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)

    @property
    def num_entries(self) -> int:
        """About how much it holds, in entries of 8 bytes."""
        columns = 4 * len(self.outcomes or self.num_hit_tokens)
        return columns + len(self.num_prefix_blocks) + len(self.num_new_blocks) + len(self.block_ids)
