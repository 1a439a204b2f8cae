"""Answers of operations, and results of a session's methods."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NoReturn

from kvpool.core.blocks.prefix_search import ComputedBlocks
from kvpool.core.errors import WrongStateError
from kvpool.core.ids import BlockId
from kvpool.core.steps.columns import Outcome


class _Unanswered:
    """Base of answers whose attributes do not exist before the step has been answered."""

    __slots__ = ()

    if not TYPE_CHECKING:  # only missing attributes come here

        def __getattr__(self, name: str) -> NoReturn:
            if name not in self.__dataclass_fields__:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
            raise _unanswered_error(name)


def _unanswered_error(name: str) -> WrongStateError:
    message = f"the step has no answer yet, so that {name} is unknown: leave its with block, or send or settle it first"
    return WrongStateError("STEP_NOT_ANSWERED", message)


@dataclass(slots=True, repr=False)
class Answer(_Unanswered):
    """The answer of one operation of a step. Filled when the step has been answered.

    Until then only `outcome` can be read; everything else raises WrongStateError (STEP_NOT_ANSWERED).

    Attributes:
        outcome: Its outcome; None until the step has been answered.
        num_hit_tokens: Tokens found in the cache.
        num_shared_hit_tokens: Hit tokens of blocks that another session filled.
        num_host_hit_tokens: Hit tokens in host memory, or copied from there for this hit.
        num_new_tokens: Of an admission: tokens beyond the hit for which slots were allocated.
        shared_prefix_boundary_tokens: Of a look-up, if only states at the ends of steps are kept: length of the prefix
            that the other groups have cached, if it is longer than the hit; else 0.
        hit_blocks: Blocks of the hit, per group.
        new_blocks: Newly allocated blocks, per group.
        num_common_blocks: Of a common prefix: its number of blocks, per group.
    """

    outcome: Outcome | None = None
    num_hit_tokens: int = field(init=False)
    num_shared_hit_tokens: int = field(init=False)
    num_host_hit_tokens: int = field(init=False)
    num_new_tokens: int = field(init=False)
    shared_prefix_boundary_tokens: int = field(init=False)
    hit_blocks: list[list[int]] = field(init=False)
    new_blocks: list[list[int]] = field(init=False)
    num_common_blocks: list[int] = field(init=False)

    def __repr__(self) -> str:
        return f"<Answer: {self.outcome.name if self.outcome is not None else None}>"

    def fill(self, outcome: Outcome, new_blocks: list[list[int]]) -> None:
        """Answers it, without tokens and blocks of a hit."""
        self.outcome, self.new_blocks = outcome, new_blocks
        self.num_hit_tokens = self.num_shared_hit_tokens = self.num_host_hit_tokens = 0
        self.num_new_tokens = self.shared_prefix_boundary_tokens = 0
        self.hit_blocks, self.num_common_blocks = [], []

    @property
    def ok(self) -> bool:
        """Whether the operation succeeded."""
        if self.outcome is None:
            raise _unanswered_error("ok")
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


@dataclass(slots=True, repr=False)
class Decodes(_Unanswered):
    """The answer of a batch of decodes. Filled when the step has been answered.

    Until then `new_blocks` and `refused` raise WrongStateError (STEP_NOT_ANSWERED).

    Attributes:
        new_blocks: The newly allocated blocks of each request, per group; empty for most. Do not change it.
        refused: By place in the batch, the outcome of each request that got no slot: preempt a request and try again.
        is_answered: Whether the other attributes are final.
        may_need_blocks: Places in the batch of the requests that may need new blocks. All others certainly get none.
    """

    new_blocks: list[list[list[int]]] = field(init=False)
    refused: dict[int, Outcome] = field(init=False)
    is_answered: bool = field(default=False, init=False)
    may_need_blocks: Sequence[int]

    def __repr__(self) -> str:
        return f"<Decodes: {len(self.new_blocks)} requests, {self.refused}>" if self.is_answered else "<Decodes>"

    def fill(self, num_requests: int, no_blocks: list[list[int]]) -> None:
        """Answers it: no request gets a block, and none is refused."""
        self.new_blocks, self.refused, self.is_answered = [no_blocks] * num_requests, {}, True


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
