"""Reads and writes pages: what an attention kernel does with a block table, request by request in plain torch.

1. A token's key and value lie at its slot: block_id * block_size + offset.
2. Of a request's table only the blocks that hold a token which is looked at are read. Those behind a window or a chunk
   may be null, or belong to another request by now.
3. The keys and values of a step are written before any is read: a request may hit a block that another request of the
   same step fills.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from kvpool.gpu_worker.attention_metadata import AttentionMetadataBuilder, BuilderContext, CommonAttentionMetadata


@dataclass(frozen=True, slots=True)
class ReferenceBackend:
    """The backend of all layers here: its kernels take a step as it is.

    Attributes:
        layout: Name of the layout in which it sees pages.
        name: Its name.
    """

    layout: str
    name: str = "reference"

    def make_builder(self, context: BuilderContext) -> AttentionMetadataBuilder:
        """See `AttentionBackend`."""
        del context
        return _CommonBuilder()


class _CommonBuilder:
    def build(self, common: CommonAttentionMetadata) -> CommonAttentionMetadata:
        return common


@dataclass(frozen=True, slots=True)
class RequestSpan:
    """One request of a step: its tokens [start, end) are computed.

    Attributes:
        rows: Where its tokens are among the flattened ones.
        start: Position of the first.
        end: Position after the last.
        blocks: Its row of the block table (max_blocks,).
    """

    rows: slice
    start: int
    end: int
    blocks: torch.Tensor


def request_spans(metadata: CommonAttentionMetadata) -> Iterator[RequestSpan]:
    """The requests of a step, in order."""
    starts = metadata.num_computed_tokens_cpu.tolist()
    ends = metadata.seq_lens_cpu.tolist()
    loc = metadata.query_start_loc_cpu.tolist()
    for i in range(metadata.num_reqs):
        yield RequestSpan(slice(loc[i], loc[i + 1]), starts[i], ends[i], metadata.block_table[i])


def write_slots(pages: torch.Tensor, slot_mapping: torch.Tensor, values: torch.Tensor) -> None:
    """Writes each token's values (num_tokens, ...) to its slot.

    Args:
        pages: (num_blocks, block_size, ...), of any strides.
        slot_mapping: int64 (num_tokens,).
        values: (num_tokens, ...).
    """
    block_size = pages.shape[1]
    pages[slot_mapping // block_size, slot_mapping % block_size] = values


def gather_tokens(pages: torch.Tensor, blocks: torch.Tensor, first: int, end: int) -> torch.Tensor:
    """Reads tokens [first, end) of a request; touches no block that holds none of them.

    Args:
        pages: (num_blocks, block_size, ...), of any strides.
        blocks: The request's row of the block table (max_blocks,).
        first: Position of the first token.
        end: Position after the last.

    Returns:
        (end - first, ...).
    """
    block_size = pages.shape[1]
    first_block = first // block_size
    gathered = pages[blocks[first_block : -(-end // block_size)].long()].flatten(0, 1)
    return gathered[first - first_block * block_size : end - first_block * block_size]


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, seen: torch.Tensor, scale: float
) -> torch.Tensor:
    """Attention of one request, query heads sharing the heads of keys and values evenly.

    Args:
        query: (num_queries, num_heads, head_size).
        key: (num_keys, num_kv_heads, head_size).
        value: (num_keys, num_kv_heads, head_size_v).
        seen: bool (num_queries, num_keys).
        scale: What scores are multiplied with.

    Returns:
        (num_queries, num_heads, head_size_v).
    """
    grouped = query.view(len(query), key.shape[1], -1, query.shape[2])
    scores = torch.einsum("qgsd,kgd->gsqk", grouped, key) * scale
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("gsqk,kgd->qgsd", weights, value).flatten(1, 2)
