"""The block table of one group on host and device, with slot and state look-up."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from kvpool.core.errors import InvalidArgumentError, check_range
from kvpool.core.ids import MAX_BLOCKS, MAX_TOKENS, NULL_BLOCK
from kvpool.core.specs.kinds import (
    CircularBufferSpec,
    CrossAttentionSpec,
    MambaSpec,
    allocation_spec,
    num_draft_blocks,
)
from kvpool.core.specs.pool_config import KVCacheGroup
from kvpool.gpu_worker.layouts import kernel_blocks_per_block
from kvpool.gpu_worker.workspace import StagedArray

PAD_SLOT_ID: Final = -1
"""Slot of a token that is not written, and index of a missing state. The kernels of vLLM skip it."""

Integers = npt.NDArray[np.integer]


@dataclass(frozen=True, slots=True)
class BlockTableOptions:
    """Limits of the block tables of a rank.

    Attributes:
        num_blocks: Number of blocks of the pool.
        max_num_reqs: Maximum number of running requests.
        max_model_len: Maximum number of tokens of a request.
        max_num_batched_tokens: Maximum number of tokens per step.
        max_num_encoder_input_tokens: Maximum number of encoder output tokens, both per step and per request.
        dcp_world_size: Number of ranks over which decode context parallelism spreads a request, token by token.
        dcp_rank: Index of this rank among them. It holds the tokens at dcp_rank, dcp_rank + dcp_world_size, ...
    """

    num_blocks: int
    max_num_reqs: int
    max_model_len: int
    max_num_batched_tokens: int
    max_num_encoder_input_tokens: int = 0
    dcp_world_size: int = 1
    dcp_rank: int = 0

    def __post_init__(self) -> None:
        check_range("num_blocks", self.num_blocks, 1, MAX_BLOCKS)
        for name in ("max_num_reqs", "max_model_len", "max_num_batched_tokens"):
            check_range(name, getattr(self, name), 1, MAX_TOKENS)
        check_range("max_num_encoder_input_tokens", self.max_num_encoder_input_tokens, 0, MAX_TOKENS)
        check_range("dcp_world_size", self.dcp_world_size, 1, 1024)
        check_range("dcp_rank", self.dcp_rank, 0, self.dcp_world_size - 1)


@dataclass(frozen=True, slots=True)
class MambaStateIndices:
    """The states that a step reads and writes. The state after token t is in column t // block_size of a request's row.

    A step that computes tokens [n, n + k) reads the state after token n - 1 and writes the state after token n + k - 1.
    With prefix caching of states it also writes the state at the end of each block in between. Names follow vLLM.

    Attributes:
        read_block_ids: (num_reqs,) int32, block of the state to read; `PAD_SLOT_ID` for a request without a state.
        written_block_ids: (num_reqs,) int32, block of the state after the last token of the step.
        has_initial_state: (num_reqs,) bool, whether a state is read.
        block_idx_last_computed_token: (num_reqs,) int32, column of the state to read; 0 for a request without a state.
        block_idx_first_scheduled_token: (num_reqs,) int32, column of the state after the step's first token.
        block_idx_last_scheduled_token: (num_reqs,) int32, column of the state to write.
        draft_block_ids: (num_reqs, num_speculative_blocks) int32, the last blocks of the row, for the state after each
            draft token. The runner copies the state of the last accepted draft to where the next step reads.
    """

    read_block_ids: torch.Tensor
    written_block_ids: torch.Tensor
    has_initial_state: torch.Tensor
    block_idx_last_computed_token: torch.Tensor
    block_idx_first_scheduled_token: torch.Tensor
    block_idx_last_scheduled_token: torch.Tensor
    draft_block_ids: torch.Tensor


class GroupTable:
    """The block table of one group. Callers follow the rules of `BlockTables` and check rows.

    Attributes:
        num_entries: (max_num_reqs,) int32 on the host, number of entries of each row.
        block_size: Tokens per kernel block on this rank.
        has_token_slots: Whether each token of a request has a slot.
        has_encoder_slots: Whether each encoder token has a slot.
        has_states: Whether blocks hold states.
        is_spread: Whether context parallelism spreads the tokens over ranks.
        max_num_slots: Maximum number of slots per mapping.
        no_slots: (0,) int64, for groups without slots in a mapping.
    """

    def __init__(
        self,
        group_id: int,
        group: KVCacheGroup,
        options: BlockTableOptions,
        device: torch.device,
        kernel_block_size: int,
    ) -> None:
        spec = allocation_spec(group.spec)
        self._name = (
            f"group {group_id} (layer {group.layer_names[0]!r}, ...)" if group.layer_names else f"group {group_id}"
        )
        layer_name = group.layer_names[0] if group.layer_names else f"of group {group_id}"
        self._per_block = kernel_blocks_per_block(layer_name, group.spec, kernel_block_size)
        if options.num_blocks * self._per_block > MAX_BLOCKS:
            raise InvalidArgumentError(
                "kernel_block_sizes",
                f"{self._name}: {options.num_blocks} x {self._per_block} blocks are over {MAX_BLOCKS}",
            )
        self._num_blocks = options.num_blocks
        self.block_size = spec.block_size // self._per_block
        self._ranks, self._rank = (options.dcp_world_size, options.dcp_rank) if spec.is_sharded else (1, 0)
        self.is_spread = self._ranks > 1
        self.has_encoder_slots = isinstance(spec, CrossAttentionSpec)
        self.has_states = isinstance(spec, MambaSpec)
        self.has_token_slots = not (self.has_encoder_slots or self.has_states)
        self._is_circular = isinstance(spec, CircularBufferSpec)
        self._num_drafts = num_draft_blocks(spec)
        max_tokens = options.max_num_encoder_input_tokens if self.has_encoder_slots else options.max_model_len
        width = (-(-max_tokens // spec.span_tokens(self._ranks)) + self._num_drafts) * self._per_block
        self._table = StagedArray((options.max_num_reqs, max(width, 1)), torch.int32, device, NULL_BLOCK)
        self.num_entries = np.zeros(options.max_num_reqs, np.int32)
        self._changed = (0, 0)
        self.max_num_slots = (
            options.max_num_encoder_input_tokens if self.has_encoder_slots else options.max_num_batched_tokens
        )
        num_slots = 0 if self.has_states else self.max_num_slots
        self._slots = StagedArray((num_slots,), torch.int64, device, PAD_SLOT_ID)
        self.no_slots = self._slots.device[:0]
        num_columns = 5 + self._num_drafts if self.has_states else 0
        self._states = StagedArray((num_columns, options.max_num_reqs), torch.int32, device)

    @property
    def device_table(self) -> torch.Tensor:
        """(max_num_reqs, max blocks per row) int32, as last committed. Always the same tensor."""
        return self._table.device

    @property
    def host_table(self) -> npt.NDArray[np.int32]:
        """(max_num_reqs, max blocks per row) int32, current contents; read only."""
        view: npt.NDArray[np.int32] = self._table.host.view()
        view.flags.writeable = False
        return view

    def entries_of(self, block_ids: Sequence[int] | Integers, start: int) -> Integers:
        """Converts blocks of the pool to entries, and checks that they fit a row from `start` on.

        Raises:
            InvalidArgumentError: A block is not in the pool, or the row has too few free entries.
        """
        ids = np.asarray(block_ids, dtype=np.int64)
        if ids.size and (ids.min() < 0 or ids.max() >= self._num_blocks):
            wrong = ids[(ids < 0) | (ids >= self._num_blocks)][0]
            raise InvalidArgumentError("block_ids", f"{self._name}: {wrong} is not in [0, {self._num_blocks})")
        width = self._table.host.shape[1]
        if start + ids.size * self._per_block > width:
            have, most = start // self._per_block + ids.size, width // self._per_block
            raise InvalidArgumentError(
                "block_ids", f"{self._name}: {have} blocks; a request of maximum length takes {most}"
            )
        if self._per_block == 1:
            return ids
        return (ids[:, None] * self._per_block + np.arange(self._per_block)).ravel()

    def write(self, row: int, start: int, entries: Integers) -> None:
        """Writes entries into a row from `start` on, and ends the row after them."""
        end = start + entries.size
        self._table.wait()
        self._table.host[row, start:end] = entries
        self.num_entries[row] = max(self.num_entries[row], end)
        if entries.size:
            self._touch(row)
        self.truncate(row, end)

    def truncate(self, row: int, end: int) -> None:
        """Ends a row at `end` and fills the rest with the null block."""
        old_end = int(self.num_entries[row])
        if end < old_end:
            self._table.wait()
            self._table.host[row, end:old_end] = NULL_BLOCK
            self.num_entries[row] = end
            self._touch(row)

    def swap(self, first: int, second: int) -> None:
        """Exchanges two rows."""
        end = int(max(self.num_entries[first], self.num_entries[second]))
        self._table.wait()
        rows = self._table.host
        rows[[first, second], :end] = rows[[second, first], :end]
        self.num_entries[[first, second]] = self.num_entries[[second, first]]
        self._touch(first)
        self._touch(second)

    def commit(self, num_reqs: int) -> None:
        """Starts the copy of the changed rows among the first num_reqs."""
        start, stop = self._changed
        if start < min(stop, num_reqs):
            self._table.copy(start, min(stop, num_reqs))
        self._changed = (max(start, num_reqs), stop) if stop > num_reqs else (0, 0)

    def slots(self, req_indices: Integers, positions: Integers) -> Integers:
        """Computes slots (num_tokens,) int64; see `BlockTables.compute_slot_mapping`."""
        local = positions // self._ranks if self._ranks > 1 else positions
        if self._is_circular:
            local = local % (self.block_size * self._per_block)
        columns, offsets = np.divmod(local, self.block_size)
        entries = self._entries_at(req_indices, columns, "positions", 0)
        slots = entries.astype(np.int64) * self.block_size + offsets
        if self._ranks > 1:
            slots[positions % self._ranks != self._rank] = PAD_SLOT_ID
        return slots

    def stage_slots(self, slots: Integers, count: int) -> torch.Tensor:
        """Starts the copy of slots, padded to `count`."""
        self._slots.wait()
        host = self._slots.host
        host[: slots.size] = slots
        host[slots.size : count] = PAD_SLOT_ID
        return self._slots.copy(0, count)

    def state_columns(self, num_computed_tokens: Integers, num_scheduled_tokens: Integers) -> Integers:
        """Computes (5 + num_speculative_blocks, num_reqs): blocks read and written, their columns, and draft blocks."""
        rows = np.arange(num_computed_tokens.size)
        read = np.maximum(num_computed_tokens - 1, 0) // self.block_size
        first = num_computed_tokens // self.block_size
        last = (num_computed_tokens + num_scheduled_tokens - 1) // self.block_size
        started = num_computed_tokens > 0
        read_ids = np.full(rows.size, PAD_SLOT_ID)
        read_ids[started] = self._entries_at(rows[started], read[started], "num_computed_tokens", self._num_drafts)
        written_ids = self._entries_at(rows, last, "num_scheduled_tokens", self._num_drafts)
        drafts = self.num_entries[: rows.size] - self._num_drafts + np.arange(self._num_drafts)[:, None]
        return np.vstack([read_ids, written_ids, read, first, last, self._table.host[rows, drafts]])

    def stage_states(self, columns: Integers) -> MambaStateIndices:
        """Starts the copy of the result of `state_columns`."""
        num_reqs = columns.shape[1]
        self._states.wait()
        self._states.host[:, :num_reqs] = columns
        device = self._states.copy(0, columns.shape[0])[:, :num_reqs]
        read_ids, written_ids, read, first, last = device[:5]
        return MambaStateIndices(read_ids, written_ids, read_ids >= 0, read, first, last, device[5:].t())

    def _entries_at(self, rows: Integers, columns: Integers, field: str, num_spare: int) -> Integers:
        """Reads the entries (n,) at rows and columns.

        Args:
            rows: (n,), row of each entry.
            columns: (n,), column of each entry.
            field: Argument that an error names.
            num_spare: Number of entries at the end of a row that are not for tokens.

        Raises:
            InvalidArgumentError: A row ends before its column, or has the null block there.
        """
        if not rows.size:
            return np.zeros(0, np.int32)
        ends = self.num_entries[rows] - num_spare
        entries: Integers = self._table.host[rows, np.minimum(columns, np.maximum(ends - 1, 0))]
        missing = (columns >= ends) | (entries < self._per_block)
        if missing.any():
            at = int(missing.argmax())
            row, column = int(rows[at]), int(columns[at]) // self._per_block
            have = int(ends[at]) // self._per_block
            found = "has the null block" if column < have else f"has {have} blocks and no entry"
            raise InvalidArgumentError(field, f"{self._name}: row {row} {found} in column {column}")
        return entries

    def _touch(self, row: int) -> None:
        start, stop = self._changed
        self._changed = (min(start, row), max(stop, row + 1)) if start < stop else (row, row + 1)
