"""Block events: changes of the prefix cache, as values.

The fields are those that vLLM publishes; hashes are complete.
"""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final

from kvpool.core.ids import BlockHash, GroupId

TOKEN_ID_BYTES: Final = array("I").itemsize


def packed_token_ids(token_ids: Iterable[int]) -> "array[int]":
    """Packs token ids into an array of 4 bytes each.

    Raises:
        OverflowError: A token id is not in [0, 2^32).
        TypeError: A token id is not an integer.
    """
    return array("I", token_ids)


class Medium(IntEnum):
    """Tier of a pool whose memory holds a block."""

    FIRST_TIER = 0
    HOST_MEMORY = 1


@dataclass(frozen=True, slots=True)
class BlockStored:
    """A run of consecutive hash blocks of one request was cached, in full blocks or up to the end of a prefix.

    Or blocks were copied from one tier to the other, where they are cached too.

    Attributes:
        block_hashes: Hashes of the hash blocks.
        parent_block_hash: Hash of the hash block before the first one; None if there is none.
        token_ids: Token ids of the hash blocks, block_size each. Stored as 4 bytes each, because many are kept.
        block_size: Tokens per hash block, over all ranks of context parallelism.
        lora_name: LoRA of the request; None if there is none.
        group_id: Group of the blocks.
        lookahead_token_ids: The tokens after each of them that its hash covers: see `HashScheme.num_lookahead_tokens`.
        medium: Tier of the blocks.
    """

    block_hashes: tuple[BlockHash, ...]
    parent_block_hash: BlockHash | None
    token_ids: "array[int]"
    block_size: int
    lora_name: str | None
    group_id: GroupId
    lookahead_token_ids: "array[int]" = field(default_factory=lambda: array("I"))
    medium: Medium = Medium.FIRST_TIER

    @property
    def num_lookahead_tokens(self) -> int:
        """Number of tokens of lookahead_token_ids per block."""
        return len(self.lookahead_token_ids) // len(self.block_hashes)

    @property
    def lookahead_by_block(self) -> list[list[int]] | None:
        """The lookahead_token_ids of each block; None if there are none."""
        ahead, count = self.lookahead_token_ids.tolist(), self.num_lookahead_tokens
        return [ahead[i : i + count] for i in range(0, len(ahead), count)] if ahead else None


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """A cached block was evicted, by one of its hashes. Another copy with the same hash can remain.

    Attributes:
        block_hash: The hash.
        group_id: Group of the block.
        copies_left: Number of blocks of the same group and tier that still have this hash.
        medium: Tier of the block.
    """

    block_hash: BlockHash
    group_id: GroupId
    copies_left: int = 0
    medium: Medium = Medium.FIRST_TIER


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """The prefix cache was reset."""


BlockEvent = BlockStored | BlockRemoved | AllBlocksCleared
