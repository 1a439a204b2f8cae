"""Reads and writes pages through block tables, as an attention kernel does, request by request in plain torch.

1. The key and value of a token are at its slot: block_id * block_size + offset.
2. Only blocks with tokens that are attended to are read. Blocks behind a window or a chunk may be null or belong to
   another request.
3. All keys and values of a step are written before any are read, because a request may hit a block that another request
   of the same step fills.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from kvpool.gpu_worker.attention_metadata import AttentionMetadataBuilder, BuilderContext, CommonAttentionMetadata


@dataclass(frozen=True, slots=True)
class ReferenceBackend:
    """The backend of all reference layers; uses `CommonAttentionMetadata` directly.

    Attributes:
        layout: Name of the layout of the pages.
        name: Name of the backend.
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
    """One request of a step, which computes its tokens [start, end).

    Attributes:
        rows: Rows of its tokens in the flattened step.
        start: Position of the first token.
        end: Position after the last token.
        blocks: Row of the block table (max_blocks,).
    """

    rows: slice
    start: int
    end: int
    blocks: torch.Tensor


def request_spans(metadata: CommonAttentionMetadata) -> Iterator[RequestSpan]:
    """Yields the requests of a step, in order."""
    starts = metadata.num_computed_tokens_cpu.tolist()
    ends = metadata.seq_lens_cpu.tolist()
    loc = metadata.query_start_loc_cpu.tolist()
    for i in range(metadata.num_reqs):
        yield RequestSpan(slice(loc[i], loc[i + 1]), starts[i], ends[i], metadata.block_table[i])


def write_slots(pages: torch.Tensor, slot_mapping: torch.Tensor, values: torch.Tensor) -> None:
    """Writes each token's values (num_tokens, ...) to its slot.

    Args:
        pages: (num_blocks, block_size, ...), with any strides.
        slot_mapping: int64 (num_tokens,).
        values: (num_tokens, ...).
    """
    block_size = pages.shape[1]
    pages[slot_mapping // block_size, slot_mapping % block_size] = values


def gather_tokens(pages: torch.Tensor, blocks: torch.Tensor, first: int, end: int) -> torch.Tensor:
    """Reads tokens [first, end) of a request, and only the blocks that hold them.

    Args:
        pages: (num_blocks, block_size, ...), with any strides.
        blocks: Row of the block table (max_blocks,).
        first: Position of the first token.
        end: Position after the last token.

    Returns:
        (end - first, ...).
    """
    block_size = pages.shape[1]
    first_block = first // block_size
    gathered = pages[blocks[first_block : -(-end // block_size)].long()].flatten(0, 1)
    return gathered[first - first_block * block_size : end - first_block * block_size]


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    """Computes attention of one request; query heads share key and value heads evenly.

    Args:
        query: (num_queries, num_heads, head_size).
        key: (num_keys, num_kv_heads, head_size).
        value: (num_keys, num_kv_heads, head_size_v).
        mask: bool (num_queries, num_keys), True where a query attends to a key.
        scale: Factor of the scores.

    Returns:
        (num_queries, num_heads, head_size_v).
    """
    grouped = query.view(len(query), key.shape[1], -1, query.shape[2])
    scores = torch.einsum("qgsd,kgd->gsqk", grouped, key) * scale
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    return torch.einsum("gsqk,kgd->qgsd", weights, value).flatten(1, 2)
