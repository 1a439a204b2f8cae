"""Block tables of the running requests, with which kernels find keys, values and states.

1. A row is one running request, the same in all groups. Row r of a group lists the request's blocks in token order,
   with the null block (0) in place of skipped blocks.
2. A change is checked in all groups before it is made in any. A slot is computed from the current blocks of the row,
   never from entries of an earlier request.
3. Tables hold kernel blocks: block b of the pool is [b * n, (b + 1) * n) if its pages are split into n kernel blocks.
4. The tables on the host are ahead of the tables on the device until `commit`.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from kvpool.core.errors import InvalidArgumentError, check_range
from kvpool.core.ids import MAX_TOKENS
from kvpool.core.specs.pool_config import KVCacheGroup
from kvpool.gpu_worker.group_table import BlockTableOptions, GroupTable, Integers, MambaStateIndices
from kvpool.gpu_worker.tensors import group_kernel_block_sizes

BlockIds = Sequence[int] | npt.NDArray[np.integer]
"""Block ids of the pool, as the service returns them."""


class BlockTables:
    """The block tables of all groups. Rows start empty. Not thread-safe.

    Attributes:
        options: Limits of the tables.
        groups: The table of each group.
    """

    def __init__(
        self,
        groups: Sequence[KVCacheGroup],
        options: BlockTableOptions,
        device: torch.device,
        kernel_block_sizes: Sequence[int] = (),
    ) -> None:
        """Allocates tables with max_num_reqs rows on host and device.

        Args:
            groups: The groups of the rank's config.
            options: Limits of the tables.
            device: Device of the kernels.
            kernel_block_sizes: As for `reshape_kv_cache`.

        Raises:
            InvalidArgumentError: A group's pages cannot be split into such blocks; names one of its layers.
        """
        self.options = options
        sizes = group_kernel_block_sizes(len(groups), kernel_block_sizes)
        self.groups = tuple(GroupTable(i, group, options, device, sizes[i]) for i, group in enumerate(groups))

    def add_row(self, row: int, block_ids: Sequence[BlockIds]) -> None:
        """Replaces the blocks of a row.

        Args:
            row: [0, max_num_reqs).
            block_ids: Blocks of each group.

        Raises:
            InvalidArgumentError: A row, group or block is out of range, or the row has too few free
                entries; nothing is changed.
        """
        self._extend(row, block_ids, starts=[0] * len(self.groups))

    def append_row(self, row: int, block_ids: Sequence[BlockIds]) -> None:
        """Adds blocks to the end of a row. Arguments and errors are those of `add_row`."""
        self._check_rows(row)
        self._extend(row, block_ids, starts=[int(table.num_entries[row]) for table in self.groups])

    def clear_row(self, row: int) -> None:
        """Fills a row with the null block."""
        self._check_rows(row)
        for table in self.groups:
            table.truncate(row, 0)

    def swap_rows(self, first: int, second: int) -> None:
        """Exchanges two rows."""
        self._check_rows(first, second)
        for table in self.groups:
            table.swap(first, second)

    def move_row(self, source: int, target: int) -> None:
        """Moves the blocks of `source` to `target`, and clears `source`."""
        self.swap_rows(source, target)
        if source != target:
            self.clear_row(source)

    def commit(self, num_reqs: int) -> None:
        """Starts the copy of rows [0, num_reqs) to the device, from the first to the last changed row."""
        check_range("num_reqs", num_reqs, 0, self.options.max_num_reqs)
        for table in self.groups:
            table.commit(num_reqs)

    def compute_slot_mapping(
        self, req_indices: Integers, positions: Integers, num_padded_tokens: int = 0
    ) -> tuple[torch.Tensor, ...]:
        """Computes the slots for the keys and values of the step's tokens.

        Args:
            req_indices: (num_tokens,), row of each token.
            positions: (num_tokens,), position of each token in its request.
            num_padded_tokens: Minimum number of slots to return; padding is `PAD_SLOT_ID`.

        Returns:
            Per group (num_tokens or num_padded_tokens,) int64: block * block_size + offset, in tokens of kernel blocks;
            `PAD_SLOT_ID` for tokens that another rank of context parallelism holds. Empty for groups of states or of
            encoder tokens. Valid until the next call.

        Raises:
            InvalidArgumentError: A token has no block or the null block, so its keys and values would be lost;
                nothing is changed.
        """
        chosen = [table for table in self.groups if table.has_token_slots]
        return self._map(chosen, req_indices, positions, num_padded_tokens)

    def compute_encoder_slot_mapping(self, req_indices: Integers, positions: Integers) -> tuple[torch.Tensor, ...]:
        """Computes the slots of encoder tokens: `compute_slot_mapping` for cross attention.

        Args:
            req_indices: (num_encoder_tokens,), row of each token.
            positions: (num_encoder_tokens,), position of each token in the encoder output of its request.

        Returns:
            Per group of cross attention (num_encoder_tokens,) int64; empty for other groups.

        Raises:
            InvalidArgumentError: A token has no block; nothing is changed.
        """
        return self._map([table for table in self.groups if table.has_encoder_slots], req_indices, positions, 0)

    def compute_state_indices(
        self, num_computed_tokens: Integers, num_scheduled_tokens: Integers
    ) -> tuple[MambaStateIndices | None, ...]:
        """Finds the states that the step reads and writes.

        Args:
            num_computed_tokens: (num_reqs,), computed tokens of rows [0, num_reqs).
            num_scheduled_tokens: (num_reqs,), tokens of the step per request, at least 1.

        Returns:
            The indices per group of states; None for other groups. Valid until the next call.

        Raises:
            InvalidArgumentError: A state has no block or the null block; nothing is changed.
        """
        self._check_lengths(num_computed_tokens, num_scheduled_tokens)
        columns = {
            table: table.state_columns(num_computed_tokens, num_scheduled_tokens)
            for table in self.groups
            if table.has_states
        }
        return tuple(table.stage_states(columns[table]) if table in columns else None for table in self.groups)

    def _map(
        self, chosen: Sequence[GroupTable], req_indices: Integers, positions: Integers, num_padded_tokens: int
    ) -> tuple[torch.Tensor, ...]:
        if req_indices.ndim != 1 or req_indices.shape != positions.shape:
            raise InvalidArgumentError("positions", f"{positions.shape} for req_indices {req_indices.shape}")
        if req_indices.size:
            self._check_rows(int(req_indices.min()), int(req_indices.max()), field="req_indices")
            check_range("positions", int(positions.min()), 0, MAX_TOKENS)
        count = max(num_padded_tokens, req_indices.size)
        for table in chosen:
            check_range("positions", count, 0, table.max_num_slots)
        slots = {table: table.slots(req_indices, positions) for table in chosen}
        return tuple(
            table.stage_slots(slots[table], count) if table in slots else table.no_slots for table in self.groups
        )

    def _extend(self, row: int, block_ids: Sequence[BlockIds], starts: Sequence[int]) -> None:
        self._check_rows(row)
        if len(block_ids) != len(self.groups):
            raise InvalidArgumentError("block_ids", f"{len(block_ids)} lists for {len(self.groups)} groups")
        entries = [
            table.entries_of(ids, start) for table, ids, start in zip(self.groups, block_ids, starts, strict=True)
        ]
        for table, start, new in zip(self.groups, starts, entries, strict=True):
            table.write(row, start, new)

    def _check_rows(self, *rows: int, field: str = "row") -> None:
        for row in rows:
            check_range(field, row, 0, self.options.max_num_reqs - 1)

    def _check_lengths(self, num_computed_tokens: Integers, num_scheduled_tokens: Integers) -> None:
        if num_computed_tokens.ndim != 1 or num_computed_tokens.shape != num_scheduled_tokens.shape:
            raise InvalidArgumentError(
                "num_scheduled_tokens",
                f"{num_scheduled_tokens.shape} for num_computed_tokens {num_computed_tokens.shape}",
            )
        check_range("num_computed_tokens", num_computed_tokens.size, 0, self.options.max_num_reqs)
        if num_computed_tokens.size:
            check_range("num_computed_tokens", int(num_computed_tokens.min()), 0, MAX_TOKENS)
            check_range("num_scheduled_tokens", int(num_scheduled_tokens.min()), 1, MAX_TOKENS)
