"""What a session's calls answer."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvpool.core.blocks.prefix_search import ComputedBlocks
from kvpool.core.ids import BlockId
from kvpool.core.steps.columns import Outcome


@dataclass(slots=True)
class Answer:
    """What became of one operation of a step. Filled when the step has been answered.

    Attributes:
        outcome: How it ended; None until that is known.
        num_hit_tokens: Tokens found in the cache.
        num_shared_hit_tokens: Of these, tokens of blocks that another session filled.
        num_new_tokens: Admissions: tokens beyond the hit that have room now.
        hit_blocks: The hit's blocks, group by group.
        new_blocks: Newly allocated blocks, group by group.
        num_common_blocks: Common prefix: its blocks, group by group.
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
        """Whether the operation did as asked."""
        return self.outcome is Outcome.OK

    @property
    def computed(self) -> ComputedBlocks:
        """The hit, as an allocation is told of it."""
        return ComputedBlocks(tuple([BlockId(b) for b in blocks] for blocks in self.hit_blocks), self.num_hit_tokens)


@dataclass(frozen=True, slots=True)
class Allocation:
    """Room that was made.

    Attributes:
        new_blocks: The newly allocated blocks, group by group; may be empty where the last block had room.
    """

    new_blocks: list[list[int]]


@dataclass(slots=True)
class Decodes:
    """What became of a batch of decodes. Filled when the step has been answered.

    Attributes:
        new_blocks: For each request its newly allocated blocks, group by group; none for most. Not to be changed.
        refused: By place in the batch, why a request got no room: preempt, and ask again.
        is_answered: Whether the others mean something yet.
        asking: Places in the batch of those without room in the blocks that they hold: the others get none, for sure.
    """

    new_blocks: list[list[list[int]]]
    refused: dict[int, Outcome] = field(default_factory=dict)
    is_answered: bool = False
    asking: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Admission:
    """A request that was looked up and allocated at once.

    Attributes:
        num_hit_tokens: Tokens found in the cache.
        num_new_tokens: Tokens beyond these that have room now.
        hit_blocks: The hit's blocks, group by group.
        new_blocks: The newly allocated blocks, group by group.
    """

    num_hit_tokens: int
    num_new_tokens: int
    hit_blocks: list[list[int]]
    new_blocks: list[list[int]]


@dataclass(frozen=True, slots=True)
class HitChanged:
    """What a look-up had promised was evicted before it was allocated. Nothing was allocated.

    Attributes:
        computed: What is cached now; allocate again with it.
    """

    computed: ComputedBlocks
