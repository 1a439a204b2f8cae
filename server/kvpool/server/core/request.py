"""A request as the pool knows it, and its block tables."""

from dataclasses import dataclass, field

from kvpool.server.core.types import BlockHash, BlockId, RequestId, RequestNumber, WriterId


@dataclass(slots=True)
class BlockTable:
    """A request's blocks in one group.

    Attributes:
        block_ids: The blocks in the order of the tokens they hold, after as many nulls as were skipped.
        num_cached: How many of the first blocks were cached by this request or hit; only grows while it holds blocks.
        num_skipped: How many of the first stand null; only grows while it holds blocks.
    """

    block_ids: list[BlockId] = field(default_factory=list)
    num_cached: int = 0
    num_skipped: int = 0

    def clear(self) -> None:
        """Empties the table, whose blocks are freed."""
        self.block_ids = []
        self.num_cached = self.num_skipped = 0


@dataclass(slots=True, eq=False)
class Request:
    """A request of a session.

    Attributes:
        request_id: Its name.
        number: Its number in steps.
        writer: The session.
        num_tokens: Tokens known, prompt and output; caching never passes them.
        num_computed_tokens: Tokens that have room, hits included. The next allocation starts there.
        num_preemptions: Times its blocks were taken back.
        hashes: One for each full hash block of the known tokens, if caching is on.
        joined_hashes: Hashes of larger blocks, by the hash blocks that each covers; made when they are needed.
        token_ids: The known tokens, if the pool makes events.
        lora_name: Its LoRA, for events.
        tables: Its blocks, group by group.
    """

    request_id: RequestId
    number: RequestNumber
    writer: WriterId
    tables: tuple[BlockTable, ...]
    num_tokens: int = 0
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    hashes: list[BlockHash] = field(default_factory=list)
    joined_hashes: dict[int, list[BlockHash]] = field(default_factory=dict)
    token_ids: list[int] = field(default_factory=list)
    lora_name: str | None = None

    @property
    def holds_blocks(self) -> bool:
        """Whether it has any block."""
        return any(table.block_ids for table in self.tables)
