"""A request as the pool knows it, its block tables, and what its session holds.

1. The lists of a request (hashes, joined hashes, token ids, tables that skipped nothing) only grow, at their end, or
   are replaced: whoever has one and its length has what it held then.
2. Every request of a session has the session's holding.
"""

from dataclasses import dataclass, field

from kvpool.core.ids import BlockHash, BlockId, RequestId, RequestNumber, SessionNumber, StepNumber


@dataclass(slots=True)
class BlockTable:
    """A request's blocks in one group.

    Attributes:
        block_ids: The blocks in the order of the tokens they hold, after as many nulls as were skipped. Changed in
            place, other than at its end, only once something was skipped.
        num_cached: How many of the first blocks were hit, or cached by this request when they became full, or passed
            over then (see `retention`); only grows while it holds blocks.
        num_skipped: How many of the first stand null; only grows while it holds blocks.
    """

    block_ids: list[BlockId] = field(default_factory=list)
    num_cached: int = 0
    num_skipped: int = 0

    @property
    def held_block_ids(self) -> list[BlockId]:
        """The blocks that it holds, those skipped left out. A copy."""
        return self.block_ids[self.num_skipped :]

    def clear(self) -> None:
        """Empties the table, whose blocks are freed."""
        self.block_ids = []
        self.num_cached = self.num_skipped = 0


@dataclass(slots=True, eq=False)
class Holding:
    """The blocks that the requests of a session with a quota hold, each once. Kept by `Quotas`.

    Attributes:
        min_blocks: See `Quota`.
        max_blocks: See `Quota`.
        counts: In how many of its tables each block is.
        uncovered: Of these blocks, those beyond its minimum, in the order in which they came.
        is_over: Whether what it asked for last would have passed its maximum.
    """

    min_blocks: int
    max_blocks: int
    counts: dict[BlockId, int] = field(default_factory=dict)
    uncovered: dict[BlockId, None] = field(default_factory=dict)
    is_over: bool = False

    @property
    def num_lacking(self) -> int:
        """Blocks of its minimum that it does not hold."""
        return self.min_blocks - len(self.counts) + len(self.uncovered)

    def drop(self, block_id: BlockId) -> None:
        """Counts one table less for a block."""
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
        request_id: Its name.
        number: Its number in steps.
        session_number: The session's number.
        num_tokens: Tokens known, prompt and output; caching never passes them.
        num_prompt_tokens: Those it was declared with.
        shared_prefix_boundary_tokens: Up to where the leading groups had its tokens cached at its newest look-up, if
            that is further than all had; else 0. See `prefix_search`; only known where windows are cached sparsely.
        num_computed_tokens: Tokens that have room, hits included. The next allocation starts there.
        credit_tokens: Up to how many computed tokens it can go without a change of the pool.
        num_preemptions: Times its blocks were taken back.
        filling_sequence: Newest change of its session that gave it room, whose execution fills that.
        has_uncounted_lookup: Whether its newest look-up is to be counted once it is given room.
        hashes: One for each full hash block of the known tokens, if caching is on.
        joined_hashes: Hashes of larger blocks, by the hash blocks that each covers; made when they are needed.
        token_ids: The known tokens, if the pool makes events.
        lora_name: Its LoRA, for events.
        tables: Its blocks, group by group.
        holding: What its session's requests hold, if that has a quota.
    """

    request_id: RequestId
    number: RequestNumber
    session_number: SessionNumber
    tables: tuple[BlockTable, ...]
    num_tokens: int = 0
    num_prompt_tokens: int = 0
    shared_prefix_boundary_tokens: int = 0
    num_computed_tokens: int = 0
    credit_tokens: int = 0
    num_preemptions: int = 0
    filling_sequence: StepNumber = StepNumber(0)  # noqa: RUF009 - a NewType of int is immutable
    has_uncounted_lookup: bool = False
    hashes: list[BlockHash] = field(default_factory=list)
    joined_hashes: dict[int, list[BlockHash]] = field(default_factory=dict)
    token_ids: list[int] = field(default_factory=list)
    lora_name: str | None = None
    holding: Holding | None = None

    @property
    def holds_blocks(self) -> bool:
        """Whether it has any block."""
        for table in self.tables:  # noqa: SIM110 - a generator takes three times as long
            if table.block_ids:
                return True
        return False
