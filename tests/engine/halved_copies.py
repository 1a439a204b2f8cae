"""A worker in lent memory whose copies between the tiers are made in pieces, so that a kill finds half-made blocks."""

import threading
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

import torch

from engine.halfway import BACKGROUND, DEMOTION, PROMOTION, stand_still
from engine.slow_worker import SlowWorker
from kvpool.client.vllm.lent_allocation import block_regions
from kvpool.lending.host_copies import HostCopies, Region


class HalvedCopies(HostCopies):
    """In the middle of the copies of one direction it may stand still.

    Then the first blocks are complete, each of the others has some of its layers.
    """

    def __init__(
        self, lender: str, buffer: torch.Tensor, regions: Sequence[Region], host: torch.Tensor, num_blocks: int
    ) -> None:
        """Makes nothing yet. `lender` is the address of the lender; for the rest see `HostCopies`."""
        super().__init__(buffer, regions, host, num_blocks)
        cut = len(regions) // 2
        at_bytes = sum(region.block_bytes for region in regions[:cut])
        self._lender = lender
        self._first = HostCopies(buffer, regions[:cut], host[:, :at_bytes], num_blocks)
        self._others = HostCopies(buffer, regions[cut:], host[:, at_bytes:], num_blocks)

    def _made_here(self, copies: Iterable[tuple[int, int]]) -> list[Any]:
        timed = []
        is_background = threading.current_thread() is not threading.main_thread()
        for is_demotion, run in groupby(copies, key=lambda copy: copy[0] < copy[1]):
            pairs = [*run]
            half = len(pairs) // 2
            timed += super()._made_here(pairs[:half]) + self._first._made_here(pairs[half:])
            stand_still(self._lender, DEMOTION if is_demotion else BACKGROUND if is_background else PROMOTION)
            timed += self._others._made_here(pairs[half:])
        return timed


class HalvedCopiesWorker(SlowWorker):
    """Its steps run late, too."""

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Maps the memory as the worker does."""
        super().initialize_from_config(kv_cache_config)
        memory, num_blocks = self._kvpool_memory, kv_cache_config.num_blocks
        assert memory
        assert memory.host is not None
        regions, lender = block_regions(kv_cache_config), self._kvpool_lender.address
        self._kvpool_copies = HalvedCopies(lender, memory.buffer, regions, memory.host, num_blocks)
