"""Answers of operations, and results of a session's methods."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvpool.core.blocks.prefix_search import ComputedBlocks
from kvpool.core.ids import BlockId
from kvpool.core.steps.columns import Outcome


@dataclass(slots=True)
class Answer:
    """The answer of one operation of a step. Filled when the step has been answered.

    Attributes:
        outcome: Its outcome; None until the step has been answered.
        num_hit_tokens: Tokens found in the cache.
        num_shared_hit_tokens: Hit tokens of blocks that another session filled.
        num_new_tokens: Of an admission: tokens beyond the hit for which slots were allocated.
        hit_blocks: Blocks of the hit, per group.
        new_blocks: Newly allocated blocks, per group.
        num_common_blocks: Of a common prefix: its number of blocks, per group.
    """

    outcome: Outcome | None = None
    num_hit_tokens: int = 0
    num_shared_hit_tokens: int = 0
    num_new_tokens: int = 0
    hit_blocks: list[list[int]] = field(default_factory=list)
    new_blocks: list[list[int]] = field(default_factory=list)
    num_common_blocks: list[int] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether the operation succeeded."""
        return self.outcome is Outcome.OK

    @property
    def computed(self) -> ComputedBlocks:
        """The hit, as an argument of `allocate_slots`."""
        return ComputedBlocks(tuple([BlockId(b) for b in blocks] for blocks in self.hit_blocks), self.num_hit_tokens)


@dataclass(frozen=True, slots=True)
class Allocation:
    """Result of `Session.allocate_slots`.

    Attributes:
        new_blocks: Newly allocated blocks, per group; empty where the last block had free slots.
    """

    new_blocks: list[list[int]]


@dataclass(slots=True)
class Decodes:
    """The answer of a batch of decodes. Filled when the step has been answered.

    Attributes:
        new_blocks: The newly allocated blocks of each request, per group; empty for most. Do not change it.
        refused: By place in the batch, the outcome of each request that got no slot: preempt a request and try again.
        is_answered: Whether the other attributes are final.
        may_need_blocks: Places in the batch of the requests that may need new blocks. All others certainly get none.
    """

    new_blocks: list[list[list[int]]]
    refused: dict[int, Outcome] = field(default_factory=dict)
    is_answered: bool = False
    may_need_blocks: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Admission:
    """Result of `Session.admit`.

    Attributes:
        num_hit_tokens: Tokens found in the cache.
        num_new_tokens: Tokens beyond the hit for which slots were allocated.
        hit_blocks: Blocks of the hit, per group.
        new_blocks: Newly allocated blocks, per group.
    """

    num_hit_tokens: int
    num_new_tokens: int
    hit_blocks: list[list[int]]
    new_blocks: list[list[int]]


@dataclass(frozen=True, slots=True)
class HitChanged:
    """Result of `Session.allocate_slots` if a block of the look-up has been evicted. Nothing was allocated.

    Attributes:
        computed: The hit as it is now; allocate again with it.
    """

    computed: ComputedBlocks
