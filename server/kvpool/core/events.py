"""What changes in the prefix cache, as values. Field by field what vLLM publishes; hashes are whole here."""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from kvpool.core.ids import BlockHash, GroupId

TOKEN_ID_BYTES: Final = array("I").itemsize


def packed_token_ids(token_ids: Iterable[int]) -> "array[int]":
    """Packs token ids, 4 bytes each.

    Raises:
        OverflowError: One is not in [0, 2^32).
        TypeError: One is no integer.
    """
    return array("I", token_ids)


@dataclass(frozen=True, slots=True)
class BlockStored:
    """A run of consecutive full blocks of one request was cached.

    Attributes:
        block_hashes: Their hashes.
        parent_block_hash: Hash of the block before the first; None if there is none.
        token_ids: Their tokens, block_size for each; 4 bytes each, as many of these are kept.
        block_size: Tokens a block covers, over all ranks of context parallelism.
        lora_name: LoRA of the request; None if there is none.
        group_id: Group of the blocks.
    """

    block_hashes: tuple[BlockHash, ...]
    parent_block_hash: BlockHash | None
    token_ids: "array[int]"
    block_size: int
    lora_name: str | None
    group_id: GroupId


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """A cached block was given up. Another copy with the same hash may remain.

    Attributes:
        block_hash: Its hash.
        group_id: Its group.
        copies_left: Blocks of the group that still carry this hash.
    """

    block_hash: BlockHash
    group_id: GroupId
    copies_left: int = 0


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """The prefix cache was reset."""


BlockEvent = BlockStored | BlockRemoved | AllBlocksCleared
